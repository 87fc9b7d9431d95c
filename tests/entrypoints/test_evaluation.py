"""`deepinfer eval`: what it counts, with an engine that knows the answers and with one that knows nothing."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from deepinfer.core.errors import ConfigError
from deepinfer.core.reliability import Reliability
from deepinfer.entrypoints.cli import app
from deepinfer.entrypoints.eval_tasks import SUITES, make_items
from deepinfer.entrypoints.evaluation import Evaluation, chosen_tasks, evaluate
from deepinfer.models.deepseek_v41_flash.chat import encode_chat
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

SHORT = ("copy", "think", "lookup", "extract", "tool_call", "pass_key_512")


@pytest.fixture
def oracle(make_llm, tokenizer):
    """An engine that answers right, but for the tasks named."""

    def make(spoiled=(), failing=()):
        answers = {}
        for name, spec in chosen_tasks("tiny", SHORT).items():
            for item in make_items(spec, name, lambda text: len(tokenizer.encode(text)), 5):
                prompt = encode_chat(item.request).to_ids(tokenizer)
                ids = encode_chat(item.answered_request, add_generation_prompt=False).to_ids(tokenizer)
                answer = [40, *ids[len(prompt) :]] if name in spoiled else ids[len(prompt) :]
                answers[tuple(prompt)] = [None] if name in failing else answer
        llm = make_llm(lambda ids, step: answers[tuple(ids)][step], max_model_len=16384)
        llm.engine.max_len = 16384
        return llm

    return make


def run(llm, names=SHORT, limit=5, **options):
    result = Evaluation("models/tiny", "tiny", {})
    specs = {name: spec.__class__(spec.num_items, 2000, spec.pass_key_tokens) for name, spec in chosen(names).items()}
    evaluate(llm, specs, result, limit=limit, **options)
    return result


def chosen(names):
    return chosen_tasks("tiny", names)


def test_right_answers_count(oracle) -> None:
    result = run(oracle())
    assert {name: (score.correct, score.total) for name, score in result.tasks.items()} == dict.fromkeys(SHORT, (5, 5))
    assert result.total.accuracy == 1.0 and result.exit_status == 0


def test_wrong_answers_are_no_failure_and_are_kept_to_be_shown(oracle) -> None:
    result = run(oracle(spoiled=("copy", "tool_call")), keep_wrong=2)
    assert [name for name, score in result.tasks.items() if score.correct == 0] == ["copy", "tool_call"]
    assert result.total.correct == 20 and result.exit_status == 0
    wrong = result.tasks["copy"].wrong
    assert len(wrong) == 2 and wrong[0]["said"].endswith(wrong[0]["right"])
    assert result.tasks["lookup"].wrong == []


def test_items_that_the_engine_cannot_serve_fail_the_command(oracle) -> None:
    result = run(oracle(failing=("lookup",)), keep_wrong=1)
    assert result.tasks["lookup"].failed == 5 and result.tasks["lookup"].correct == 0
    assert result.total.correct == 25 and result.exit_status == 1
    assert "NaN" in result.tasks["lookup"].wrong[0]["said"]


def test_the_digest_tells_equal_answers_from_others(oracle) -> None:
    assert run(oracle()).digest == run(oracle()).digest
    assert run(oracle()).digest != run(oracle(spoiled=("copy",))).digest


def test_questions_longer_than_the_model_are_skipped(make_llm) -> None:
    result = run(make_llm(max_model_len=400), names=("pass_key_512",))
    assert result.tasks == {} and "the model takes 400" in result.skipped["pass_key_512"]
    assert math.isnan(result.total.accuracy) and result.as_dict()["total"]["accuracy"] is None


def test_a_model_without_words_is_refused(make_llm) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        run(make_llm(text=False))


def test_suites_and_tasks_are_checked() -> None:
    with pytest.raises(ConfigError, match="--suite 'huge' is not one of tiny, long"):
        chosen_tasks("huge")
    with pytest.raises(ConfigError, match="--task dance: suite 'tiny' has copy"):
        chosen_tasks("tiny", ["copy", "dance"])
    assert list(chosen_tasks("tiny")) == list(SUITES["tiny"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "model"
    make_tiny(folder, seed=4)
    return str(folder)


def command(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


RANDOM = ("--backend", "cpu", "--num-threads", "1", "--task", "add", "--task", "compare", "--limit", "2", "--json")


@pytest.mark.usefixtures("one_thread")
def test_a_random_checkpoint_knows_nothing_and_gives_equal_tokens_in_every_way(checkpoint) -> None:
    ways = [
        (),
        ("--speculation", "coupled"),
        ("--speculation", "coupled", "--num-drafts", "2", "--chunk-size", "8"),
        ("--no-prefix-caching", "--max-num-seqs", "1"),
    ]
    results = []
    for way in ways:
        outcome = command("--model", checkpoint, *RANDOM, *way)
        assert outcome.exit_code == 0, outcome.output
        results.append(json.loads(outcome.stdout))
    for result in results:
        assert result["tasks"]["add"]["total"] == 2 and result["total"]["correct"] == 0
        assert result["num_generated_tokens"] > 0
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["speculation"] is None
    facts = results[1]["speculation"]
    assert len(facts["acceptance"]) == 5 and sum(facts["reliability"]["tried"]) >= facts["verified"][0] > 0
    assert sum(facts["reliability"]["kept"]) == sum(facts["accepted"])
    assert 0 <= facts["expected_calibration_error"] <= 1
    assert len(results[2]["speculation"]["verified"]) == 2


@pytest.mark.usefixtures("one_thread")
def test_records_of_another_format_are_asked_for_by_name(checkpoint) -> None:
    outcome = command("--model", checkpoint, *RANDOM, "--kv-format", "f32", "--replay", "decoder", "--limit", "1")
    assert outcome.exit_code == 0, outcome.output
    settings = json.loads(outcome.stdout)["settings"]
    assert settings["kv_rounding"] is False and settings["replay"] == "decoder"


@pytest.mark.usefixtures("one_thread")
def test_the_result_names_what_it_ran_on(checkpoint) -> None:
    outcome = command("--model", checkpoint, *RANDOM[2:], "--set", "backend=fake", "--limit", "1")
    assert outcome.exit_code == 0, outcome.output
    settings = json.loads(outcome.stdout)["settings"]
    assert (settings["backend"], settings["dtype"]) == ("fake", "bfloat16")


@pytest.mark.usefixtures("one_thread")
def test_the_result_names_settings_of_a_file_as_it_does_options(checkpoint, tmp_path) -> None:
    (tmp_path / "engine.toml").write_text('replay = "decoder"\nmax_num_batched_tokens = 64\nspeculation = "coupled"\n')
    config = str(tmp_path / "engine.toml")
    outcome = command("--model", checkpoint, *RANDOM, "--config", config, "--speculation", "off", "--limit", "1")
    assert outcome.exit_code == 0, outcome.output
    settings = json.loads(outcome.stdout)["settings"]
    assert settings["replay"] == "decoder" and settings["max_num_batched_tokens"] == 64
    assert "speculation" not in settings and "model" not in settings
    outcome = command("--model", checkpoint, *RANDOM, "--config", config, "--limit", "1")
    settings = json.loads(outcome.stdout)["settings"]
    assert settings["speculation"] == "coupled" and settings["draft_schedule"] == "fixed"


@pytest.mark.usefixtures("one_thread")
def test_an_evaluation_that_asks_nothing_is_no_success(checkpoint) -> None:
    outcome = command("--model", checkpoint, "--backend", "cpu", "--task", "pass_key_512", "--max-model-len", "400")
    assert outcome.exit_code == 2
    assert "nothing was asked: pass_key_512" in " ".join(outcome.output.split())


@pytest.mark.usefixtures("one_thread")
def test_people_get_tables(checkpoint) -> None:
    outcome = command("--model", checkpoint, *RANDOM[:-1], "--speculation", "coupled", "--show-wrong", "1")
    assert outcome.exit_code == 0, outcome.output
    for words in ("suite tiny", "0.0 %", "digest of all answers", "accepted per block"):
        assert words in outcome.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nowhere"), "'nowhere' is no folder"),
        (("--suite", "huge"), "--suite 'huge'"),
        (("--task", "dance"), "--task dance"),
        (("--kv-format", "int3"), "not one of native, f32"),
        (("--model", "x", "--set", "speculatoin=coupled"), "speculatoin"),
    ],
)
def test_what_cannot_start_has_status_2(arguments, words) -> None:
    outcome = command(*arguments)
    assert outcome.exit_code == 2 and words in outcome.output


def test_the_command_explains_itself() -> None:
    outcome = command("--help")
    assert outcome.exit_code == 0 and "--speculation" in outcome.output and "--kv-format" in outcome.output


def test_confidences_are_compared_with_what_was_kept() -> None:
    bins = Reliability()
    assert math.isnan(bins.expected_calibration_error())
    confidences = np.array([[0.95, 0.55, 0.15], [0.95, 0.55, 1.0]], np.float32)
    # the first keeps one draft of three, so its third draft says nothing; the second had one verified, and lost it
    bins.add(confidences, np.array([3, 1], np.int32), np.array([1, 0], np.int32))
    assert bins.tried == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert bins.kept == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert bins.promised == pytest.approx([0, 0, 0, 0, 0, 0.55, 0, 0, 0, 1.9])
    assert bins.expected_calibration_error() == pytest.approx((0.55 + 0.9) / 3)
    bins.add(np.array([[1.0]], np.float32), np.array([1], np.int32), np.array([1], np.int32))
    assert bins.tried[9] == 3 and bins.kept[9] == 2
