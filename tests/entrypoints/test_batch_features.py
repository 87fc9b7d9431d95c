"""Batch files with the parameters that shape answers, through a real engine: choices, stops, finish reasons, usage."""

import numpy as np
import pytest

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.batch import BatchRunner
from deepinfer.entrypoints.chat_formats import chat_format
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.result_file import ResultFile
from deepinfer.testing import PuppetModel
from deepinfer.testing.workloads import cpu_ops

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llm(tokenizer):
    """A model that thinks out loud and then answers, letter by letter, at temperature 0; it dithers otherwise."""
    said = [*tokenizer.encode("why not</think>0123456789 the end", parse_special=True), tokenizer.eos_token_id]
    starts = {tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>"), tokenizer.bos_token_id}

    def logits(ids):
        row = np.zeros(384)
        begin = max(i for i, t in enumerate(ids) if t in starts)
        if ids[begin] == tokenizer.token_to_id("</think>"):
            begin -= said.index(tokenizer.token_to_id("</think>")) + 1
        if ids[begin] == tokenizer.bos_token_id:
            begin = len(ids) - 1
        row[said[min(len(ids) - 1 - begin, len(said) - 1)]] = 4.0
        return row

    config = EngineConfig(model="models/tiny", block_size=16, max_model_len=256, num_kv_blocks=64)
    engine = Engine(PuppetModel(384, logits, eos_token_ids=(tokenizer.eos_token_id,)), config, cpu_ops(), tokenizer)
    return LLM.from_engine(engine, tokenizer=tokenizer, chat=chat_format("DeepseekV41ForCausalLM"))


@pytest.fixture
def answer(llm, write_input, read_output, tmp_path):
    def go(*items):
        results = ResultFile(tmp_path / "out.jsonl")
        try:
            BatchRunner(llm, write_input(items), results).run()
        finally:
            results.close()
        return {record["custom_id"]: record for record in read_output(tmp_path / "out.jsonl")}

    return go


def body_of(record):
    assert record["error"] is None, record["error"]
    return record["response"]["body"]


def test_a_stop_string_ends_content_ids_and_logprobs_together(answer, lines, tokenizer) -> None:
    records = answer(
        lines.chat("chat", temperature=0, max_tokens=60, stop=["345"], logprobs=True, top_logprobs=2),
        lines.chat("thinking", temperature=0, max_tokens=60, stop=["y n"]),
        lines.chat("whole", temperature=0, max_tokens=60),
        lines.chat("kept", temperature=0, max_tokens=60, stop="345", include_stop_str_in_output=True),
    )
    (choice,) = body_of(records["chat"])["choices"]
    assert choice["message"]["content"] == "012" and choice["message"]["reasoning_content"] == "why not"
    assert choice["finish_reason"] == "stop"
    usage = body_of(records["chat"])["usage"]
    assert len(choice["logprobs"]["content"]) == usage["completion_tokens"]
    spelled = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert spelled == "why not</think>012345"
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(tokenizer.encode("why not")) + 1  # ST-4
    (thinking,) = body_of(records["thinking"])["choices"]
    assert thinking["message"]["reasoning_content"] == "wh" and thinking["message"]["content"] == ""
    assert "'y n' stopped it inside its reasoning" in body_of(records["thinking"])["note"]
    assert body_of(records["whole"])["choices"][0]["message"]["content"] == "0123456789 the end"
    assert body_of(records["kept"])["choices"][0]["message"]["content"] == "012345"


def test_choices_stand_in_order_and_usage_counts_all_of_them(answer, lines) -> None:
    records = answer(
        lines.chat("chat", n=3, seed=1, max_tokens=9, temperature=2.5, logprobs=True),
        lines.completion("text", "Once", n=2, seed=1, max_tokens=5, temperature=2.5, logprobs=0),
        lines.chat("mixed", n=6, seed=4, max_tokens=45, temperature=0.62, stop=["the"]),
    )
    for name, count, most in (("chat", 3, 9), ("text", 2, 5)):
        body = body_of(records[name])
        assert [choice["index"] for choice in body["choices"]] == list(range(count))
        assert body["usage"]["completion_tokens"] <= count * most
        lengths = [len(c["logprobs"]["content" if name == "chat" else "tokens"]) for c in body["choices"]]
        assert sum(lengths) == body["usage"]["completion_tokens"]
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    texts = [str(c["message"]) for c in body_of(records["chat"])["choices"]]
    assert len(set(texts)) == 3
    reasons = {c["finish_reason"] for c in body_of(records["mixed"])["choices"]}
    assert reasons <= {"stop", "length"}


def test_the_parameters_of_a_body_work(answer, lines, tokenizer) -> None:  # D-3
    nine = tokenizer.encode("9")[0]
    records = answer(
        lines.chat("bias", temperature=0, max_tokens=3, logit_bias={str(nine): 100}),
        lines.chat("allowed", max_tokens=4, allowed_token_ids=[nine], thinking={"type": "disabled"}),
        lines.chat("penalty", temperature=0, max_tokens=8, logit_bias={str(nine): 5}, frequency_penalty=2.0),
        lines.chat("bad", temperature=0, max_tokens=60, bad_words=["4", "89"], thinking={"type": "disabled"}),
        lines.chat("least", temperature=0, max_tokens=60, stop=["0", "7"], min_tokens=15),
        lines.chat("budget", temperature=0, max_tokens=30, thinking_budget=2),
        lines.chat("golden", temperature=0, max_tokens=3, golden_token_ids=[nine] * 3, logprobs=True),
        lines.completion("ids", "x", temperature=0, max_tokens=9, stop_token_ids=[nine], logit_bias={str(nine): 50}),
    )
    content = {name: body_of(record)["choices"][0] for name, record in records.items()}
    assert content["bias"]["message"]["reasoning_content"] == "999"
    assert content["allowed"]["message"]["content"] == "9999"
    assert content["penalty"]["message"]["reasoning_content"].count("9") < 4
    assert "4" not in content["bad"]["message"]["content"] and "89" not in content["bad"]["message"]["content"]
    assert content["least"]["message"]["content"] == "0123456"
    assert len(tokenizer.encode(content["budget"]["message"]["reasoning_content"])) == 2
    assert content["golden"]["message"]["reasoning_content"] == "999"
    assert content["golden"]["logprobs"]["content"][0]["logprob"] < -2
    assert content["ids"]["text"] == "" and content["ids"]["finish_reason"] == "stop"


def test_what_cannot_be_had_is_refused_by_name(answer, lines) -> None:
    records = answer(
        lines.chat("processor", logits_processors={"nope": 1}),
        lines.chat("id", logit_bias={"384": 1}),
        lines.chat("mode", logprobs_mode="raw_logits"),
        lines.chat("forced", golden_token_ids=[5], allowed_token_ids=[6]),
    )
    assert {name: record["error"]["code"] for name, record in records.items()} == {
        "processor": "unknown_logits_processor",
        "id": "invalid_parameter",  # SA-7
        "mode": "invalid_parameter",
        "forced": "invalid_parameter",
    }


def test_what_a_result_knows_stands_in_its_line(answer, lines, llm) -> None:
    nine = llm.tokenizer.encode("9")[0]
    text = "long enough to fill a block or two of the cache"
    records = answer(
        lines.completion("first", text, temperature=0, max_tokens=2, seed=2**63 + 1),
        lines.completion("scored", "Once", temperature=0, max_tokens=1, prompt_logprobs=2),
        lines.completion("asked", "Once", temperature=0, max_tokens=2, logprobs=0, logprob_token_ids=[nine]),
        lines.chat("chat", temperature=0, max_tokens=60, stop=["45"], logprobs=True, logprob_token_ids=[nine]),
        lines.completion("id", "x", temperature=0, max_tokens=9, stop_token_ids=[nine], logit_bias={str(nine): 50}),
    )
    first = body_of(records["first"])
    assert first["seed"] == 2**63 + 1 and first["approximate"] is False
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert first["choices"][0]["stop_reason"] is None and "prompt_logprobs" not in first
    scored = body_of(records["scored"])["prompt_logprobs"]
    assert scored[0] is None and len(scored) == body_of(records["scored"])["usage"]["prompt_tokens"]
    assert all(len(entries) in (2, 3) and {e["rank"] for e in entries.values()} >= {1, 2} for entries in scored[1:])
    asked = body_of(records["asked"])["choices"][0]["logprobs"]["top_logprobs"]
    assert [sorted(entries) for entries in asked] == [["9", "w"]] * 2
    chat = body_of(records["chat"])["choices"][0]
    assert chat["stop_reason"] == "45" and chat["finish_reason"] == "stop"
    assert all("9" in [e["token"] for e in entry["top_logprobs"]] for entry in chat["logprobs"]["content"])
    assert body_of(records["id"])["choices"][0]["stop_reason"] == nine


def test_requests_share_stored_prompts_unless_their_salts_differ(answer, lines, llm) -> None:
    ids = [llm.tokenizer.bos_token_id, *(5 + i for i in range(69))]
    ends = {"temperature": 0, "max_tokens": 1}
    once = {name: lines.completion(name, ids, cache_salt=salt, **ends) for name, salt in [("a", "x"), ("b", "y")]}
    llm.generate(ids, SamplingParams(**ends), cache_salt="x")
    records = answer(*once.values(), lines.completion("bad", ids, cache_salt=3, **ends))
    cached = {name: body_of(records[name])["usage"]["prompt_tokens_details"]["cached_tokens"] for name in once}
    assert cached == {"a": 64, "b": 0}
    assert records["bad"]["error"]["code"] == "invalid_parameter"
    assert "cache_salt must be a string" in records["bad"]["error"]["message"]


def test_more_logprobs_than_a_line_may_ask_for_are_refused(answer, lines) -> None:
    records = answer(
        lines.completion("prompt", prompt_logprobs=21), lines.chat("chat", prompt_logprobs=-1), lines.chat("none")
    )
    assert "prompt_logprobs must be from 0 to 20, got 21" in records["prompt"]["error"]["message"]
    assert records["chat"]["error"]["code"] == "invalid_parameter" and records["none"]["error"] is None
