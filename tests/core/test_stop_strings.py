"""Stop strings: found wherever they end, cut exactly there, never shown in part."""

import random

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.core.answer_text import AnswerText, text_with
from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.outputs import CompletionOutput
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.testing import PuppetModel, ScriptedDraft

EOS = 1

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(pytestconfig):
    return Tokenizer.from_dir(pytestconfig.rootpath / "tests" / "data")


def speaker(tokenizer, ids):
    """A model that says these ids behind a prompt of one token, and a draft that knows all of them."""

    def logits(seen):
        row = np.zeros(384)
        row[ids[(len(seen) - 1) % len(ids)]] = 9.0
        return row

    model = PuppetModel(384, logits, eos_token_ids=(EOS,))
    draft = ScriptedDraft(lambda seen: ((ids * 3)[len(seen) - 1 :][:8], [0.9] * len((ids * 3)[len(seen) - 1 :][:8])), 8)
    return model, draft


def say(tokenizer, text, params, *, blocks, **settings):
    ids = tokenizer.encode(text, parse_special=True)
    model, draft = speaker(tokenizer, ids)
    if blocks:
        settings |= {"draft": draft, "draft_schedule": "fixed"}
    with LLM(
        model, tokenizer=tokenizer, backend="cpu", block_size=4, max_model_len=64, num_kv_blocks=32, **settings
    ) as llm:
        (result,) = llm.generate([5], params)
        steps = llm.stats.num_steps
    assert not blocks or steps <= 1 + -(-len(result.outputs[0].token_ids) // 9) + 1
    return result.outputs[0]


@pytest.mark.parametrize("blocks", [False, True])
def test_text_ids_and_logprobs_end_at_one_place(tokenizer, blocks) -> None:  # ST-1
    params = SamplingParams(temperature=0, max_tokens=20, stop=["llo"], logprobs=1)
    done = say(tokenizer, "0123 hello world", params, blocks=blocks)
    ids = tokenizer.encode("0123 hello world")
    text = ""
    count = next(n for n in range(len(ids)) if "llo" in tokenizer.decode(ids[: n + 1])) + 1
    assert done.token_ids == ids[:count] and len(done.logprobs) == count
    text = tokenizer.decode(done.token_ids)
    assert done.text == text[: text.index("llo")] == "0123 he"
    assert (done.finish_reason, done.stop_reason) == ("stop", "llo")
    total = sum(entry[t].logprob for t, entry in zip(done.token_ids, done.logprobs, strict=True))
    assert done.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("stop", ["12", "1", "23", "0"])
def test_a_short_stop_early_in_a_long_block_is_found(tokenizer, stop) -> None:  # ST-2
    params = SamplingParams(temperature=0, max_tokens=20, stop=[stop])
    done = say(tokenizer, "0123456789", params, blocks=True)
    assert done.text == "0123456789"[: "0123456789".index(stop)] and done.stop_reason == stop


@pytest.mark.parametrize("blocks", [False, True])
def test_counts_describe_the_returned_tokens(tokenizer, blocks) -> None:  # ST-4
    """EOS in the middle of an accepted block: nothing behind it counts."""
    text = "abc</think>no<｜end▁of▁sentence｜>xyzxyz"
    done = say(tokenizer, text, SamplingParams(temperature=0, max_tokens=20, logprobs=0), blocks=blocks)
    assert done.token_ids[-1] == EOS and EOS not in done.token_ids[:-1]
    assert done.text == "abcno" and done.finish_reason == "stop" and len(done.logprobs) == len(done.token_ids)


@pytest.mark.parametrize("blocks", [False, True])
def test_special_tokens_are_not_shown_unless_asked_for(tokenizer, blocks) -> None:  # LC-4, D-12
    text = "a<｜User｜>b<think>c<｜end▁of▁sentence｜>d"
    hidden = say(tokenizer, text, SamplingParams(temperature=0, max_tokens=20), blocks=blocks)
    shown = say(tokenizer, text, SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=False), blocks=blocks)
    assert hidden.text == "abc" and shown.text == "a<｜User｜>b<think>c"


@pytest.mark.parametrize("blocks", [False, True])
def test_the_first_to_end_wins_and_of_those_the_longest(tokenizer, blocks) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop=["56789", "345", "45", "zz"])
    done = say(tokenizer, "0123456789", params, blocks=blocks)
    assert (done.text, done.stop_reason) == ("012", "345")


@pytest.mark.parametrize("include", [False, True])
def test_include_stop_str_in_output(tokenizer, include) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop="34", include_stop_str_in_output=include)
    done = say(tokenizer, "0123456789", params, blocks=True)
    assert done.text == ("01234" if include else "012")
    by_id = SamplingParams(
        temperature=0, max_tokens=20, stop_token_ids=tokenizer.encode("4"), include_stop_str_in_output=include
    )
    done = say(tokenizer, "0123456789", by_id, blocks=True)
    assert done.text == ("01234" if include else "0123") and done.stop_reason == tokenizer.encode("4")[0]


def test_no_stop_before_min_tokens(tokenizer) -> None:
    for least, text in ((0, "0"), (2, "0"), (3, "0120"), (4, "0120"), (5, "0120"), (6, "0120120")):
        params = SamplingParams(temperature=0, max_tokens=20, stop=["12"], min_tokens=least + (least > 0))
        done = say(tokenizer, "012", params, blocks=True)
        assert len(done.token_ids) >= params.min_tokens and done.text == text, least


def test_a_stop_string_beats_the_length(tokenizer) -> None:
    done = say(tokenizer, "0123", SamplingParams(temperature=0, max_tokens=3, stop="12"), blocks=False)
    assert (done.finish_reason, done.stop_reason, done.text) == ("stop", "12", "0")


def test_half_characters_do_not_hide_a_stop(tokenizer) -> None:
    text = "x\U0001f600yé!"
    assert len(tokenizer.encode(text)) > 5
    for stop in ("\U0001f600", "é", "yé", "\U0001f600y"):
        done = say(tokenizer, text, SamplingParams(temperature=0, max_tokens=12, stop=stop), blocks=True)
        assert done.text == text[: text.index(stop)] and done.stop_reason == stop


def test_streams_never_take_text_back(tokenizer) -> None:
    """What may begin a stop string is shown only when it did not."""
    ids = tokenizer.encode("ab ab abc abd")
    model, _ = speaker(tokenizer, ids)
    with LLM(model, tokenizer=tokenizer, backend="cpu", max_model_len=64, num_kv_blocks=8) as llm:
        for stop in (["abd"], ["b ", "zz"], ["abc abx", "c abd"], ["ab abd", "nothing"]):
            shown, texts = "", []
            for snapshot in llm.stream([5], SamplingParams(temperature=0, max_tokens=len(ids), stop=stop)):
                assert snapshot.outputs[0].text == shown + snapshot.delta
                shown += snapshot.delta
                texts.append(shown)
            whole = tokenizer.decode(ids)
            ends = [whole.index(s) for s in stop if s in whole]
            assert shown == whole[: min(ends, default=len(whole))]
            assert all(not t.endswith(s) for t in texts for s in stop)


def test_text_is_found_and_held_as_by_brute_force(tokenizer) -> None:
    """Random ids, stops of every length: the shown text is a prefix that no stop string can still begin in."""
    rng = random.Random(5)
    letters = [67, 68, 250, 300, 340, 325, 326, 223]
    for _ in range(400):
        ids = [rng.choice(letters) for _ in range(rng.randint(1, 14))]
        whole = tokenizer.decode(ids)
        stops = []
        for _ in range(rng.randint(1, 3)):
            start = rng.randrange(max(len(whole), 1))
            stops.append(whole[start : start + rng.randint(1, 5)] or "q")
        text = AnswerText(IncrementalDetokenizer(tokenizer), stops)
        plain = IncrementalDetokenizer(tokenizer)
        shown, settled = "", ""
        for token in ids:
            before = len(settled)
            settled += plain.feed([token])
            shown += text.feed(token)
            ends = [
                (e, e - len(s), s)
                for s in stops
                for e in range(before + 1, len(settled) + 1)
                if settled[:e].endswith(s)
            ]
            if ends:
                _, start, stop = min(ends)
                assert text.stopped_by == stop and shown == settled[:start]
                break
            held = max((k for s in stops for k in range(1, len(s)) if settled.endswith(s[:k])), default=0)
            assert text.stopped_by is None and shown == settled[: len(settled) - held]
        else:
            shown += text.finish()
            assert shown == whole
            continue
        assert text.feed(67) == "" and text.finish() == ""


def test_text_with_control_tokens_ends_where_the_text_ends(tokenizer) -> None:
    think = tokenizer.token_to_id("</think>")
    ids = tokenizer.encode("why</think>so be it", parse_special=True)

    def read(text, stop_reason, ids=ids):
        done = CompletionOutput(text=text, token_ids=list(ids), finish_reason="stop", stop_reason=stop_reason)
        return text_with(tokenizer, done, {think})

    assert read("whyso be it", None) == "why</think>so be it"
    assert read("whyso ", "be") == "why</think>so "
    assert read("w", "hy") == "w"
    assert read("", "w") == ""
    assert read("why</think>so", " be") == "why</think>so"  # with skip_special_tokens=False
    assert read("", None) == "why</think>so be it"  # with detokenize=False
    assert read("whyso be i", ids[-1], [*ids, ids[-1]]).startswith("why</think>so be i")
