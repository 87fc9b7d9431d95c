"""The small checkpoint answers right, and every way of running gives the same tokens.

These are samples; docs/tiny_checkpoint.md has the whole suite.
"""

import json

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.entrypoints.eval_tasks import SUITES
from deepinfer.entrypoints.evaluation import Evaluation, chosen_tasks, evaluate

SHORT = [name for name, spec in SUITES["tiny"].items() if not spec.pass_key_tokens]
MIXED = [*SHORT, "pass_key_512"]


def ask(folder, tasks, limit=None, **settings):
    """The evaluation of some tasks on the CPU."""
    result = Evaluation(str(folder), "tiny", settings)
    with LLM(str(folder), backend="cpu", max_model_len=2304, **settings) as llm:
        evaluate(llm, chosen_tasks("tiny", tasks), result, limit=limit)
    assert result.exit_status == 0
    return result


@pytest.fixture(scope="module")
def plain(tiny):
    """The oracle: whole prompts, nothing shared, no drafts."""
    return ask(tiny, MIXED, 6, prefix_caching=False)


def test_the_checkpoint_fits_the_repository_and_says_what_it_is(tiny) -> None:
    assert sum(file.stat().st_size for file in tiny.iterdir()) < 16_000_000
    card = (tiny / "README.md").read_text(encoding="utf-8")
    assert all(part in card for part in ("## Data", "PSF-2.0", "## Training", "through the engine", "Apache-2.0"))


def test_short_tasks_are_answered_right(plain) -> None:
    assert all(score.correct >= 5 for score in plain.tasks.values()), plain.as_dict()["tasks"]
    assert plain.total.accuracy >= 0.95 and plain.total.total == 6 * len(MIXED)


def test_pass_keys_in_two_thousand_tokens_are_found(tiny) -> None:
    score = ask(tiny, ["pass_key_2k"]).tasks["pass_key_2k"]
    assert score.total == 40 and score.correct >= 38


def test_drafts_change_no_token_are_accepted_and_know_when(tiny, plain) -> None:
    drafted = ask(tiny, MIXED, 6, speculation="coupled", draft_schedule="fixed")
    assert drafted.digest == plain.digest
    assert drafted.speculation["accepted_per_block"] >= 3
    assert drafted.speculation["expected_calibration_error"] < 0.05


@pytest.mark.parametrize(
    "settings",
    [{"prefix_caching": True, "block_size": 32}, {"max_num_batched_tokens": 96}, {"max_num_seqs": 1}],
    ids=["stored prefixes", "chunks of 96", "one at a time"],
)
def test_the_way_of_running_changes_no_token(tiny, plain, settings) -> None:
    assert ask(tiny, MIXED, 6, **settings).digest == plain.digest


def test_float32_records_answer_as_well(tiny, plain) -> None:
    wide = ask(tiny, MIXED, 6, kv_rounding=False)
    assert abs(wide.total.accuracy - plain.total.accuracy) <= 1 / plain.total.total


def test_the_answers_of_the_demo_are_right(tiny, repository) -> None:
    requests = [json.loads(line) for line in (repository / "examples" / "requests.jsonl").read_text().splitlines()]
    right = {
        "copy": "Tolira, Besun, Kamir, Dovela",
        "copy-zh": "西山城，长白湖，北青桥",
        "reverse": "733, 906, 58, 4071",
        "sort": "47, 96, 305, 812",
        "sort-zh": "75，318，640",
        "add": "623",
        "compare": "3970",
        "think": "705",
        "lookup": "33",
        "extract": '{"name": "Rosa", "age": 41, "city": "Madrino"}',
        "tool-call": "",
        "pass-key": "86126",
    }
    assert [request["custom_id"] for request in requests] == list(right)
    exact = SamplingParams(temperature=0, max_tokens=128)
    with LLM(str(tiny), backend="cpu", max_model_len=2048) as llm:
        for request in requests:
            prompt = llm.prompts.read_chat(request["body"])
            (output,) = llm.generate([{"prompt_token_ids": prompt.token_ids}], exact)
            message = llm.prompts.read_answer(prompt, output.outputs[0])
            assert message.content == right[request["custom_id"]], request["custom_id"]
            if request["custom_id"] == "tool-call":
                (call,) = message.tool_calls
                assert (call.name, json.loads(call.arguments)) == ("set_timer", {"minutes": 25})
