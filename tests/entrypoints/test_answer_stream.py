"""An answer that is read piece by piece says what it says when it is read whole."""

import random

import pytest

from deepinfer.core.answer_text import AnswerText
from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.outputs import CompletionOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.chat_formats import chat_format
from deepinfer.entrypoints.prompts import PreparedPrompt, PromptReader

CALL = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="get">\n<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
PARTS = (
    "abc",
    " the",
    "é",
    "🙂",
    "中",
    "</think>",
    "<think>",
    "<｜User｜>",
    "<｜DSML｜",
    CALL,
    "\n\n",
    "<",
    "stop",
    "x",
)


def some_ids(tokenizer, rng):
    """Token ids of an answer: text, control tokens, and bytes that are no whole characters."""
    ids = []
    for _ in range(rng.randrange(1, 12)):
        part = tokenizer.encode(rng.choice(PARTS), parse_special=True)
        ids += part if rng.random() < 0.9 else part[: rng.randrange(len(part) + 1)]
        if rng.random() < 0.15:
            ids.append(rng.randrange(384))
    return ids or [70]


def grown(tokenizer, ids, params):
    """What the engine makes of the ids: the answer after each token."""
    text = AnswerText(
        IncrementalDetokenizer(tokenizer, params.skip_special_tokens),
        params.stop,
        include_stop=params.include_stop_str_in_output,
        min_tokens=0,
    )
    done = CompletionOutput()
    for place, token_id in enumerate(ids):
        before = len(done.text)
        done.token_ids.append(token_id)
        done.text += text.feed(token_id)
        if text.stopped_by is not None:
            done.finish_reason, done.stop_reason = "stop", text.stopped_by
        elif place == len(ids) - 1:
            done.finish_reason = "length"
            done.text += text.finish()
        yield done, CompletionOutput(0, done.text[before:], [token_id], done.finish_reason, done.stop_reason)
        if done.finish_reason is not None:
            return


@pytest.mark.parametrize("seed", range(150))
def test_pieces_say_what_the_whole_says(tokenizer, seed) -> None:
    rng = random.Random(seed)
    reader = PromptReader(tokenizer, chat_format("DeepseekV41ForCausalLM"))
    prompt = PreparedPrompt([0], "x", True, rng.random() < 0.7)
    params = SamplingParams(
        max_tokens=1000,
        stop=rng.choice(((), ("stop",), ("the", "c"), ("🙂",), ("\n\n",))),
        include_stop_str_in_output=rng.random() < 0.3,
        skip_special_tokens=rng.random() < 0.8,
    )
    stream = reader.follow_answer(prompt, params)
    pending = CompletionOutput()
    reasoning, content, calls = "", "", []
    for done, news in grown(tokenizer, some_ids(tokenizer, rng), params):
        pending.text += news.text
        pending.token_ids += news.token_ids
        pending.finish_reason, pending.stop_reason = news.finish_reason, news.stop_reason
        if done.finish_reason is None and rng.random() < 0.4:
            continue  # the consumer was slow: the next piece holds this one too
        delta = stream.feed(pending)
        pending = CompletionOutput()
        reasoning, content = reasoning + delta.reasoning_content, content + delta.content
        calls += [(call.name, call.arguments) for call in delta.tool_calls]
    whole = reader.read_answer(prompt, done)
    assert content == whole.content
    assert reasoning == (whole.reasoning_content or "")
    assert calls == [(call.name, call.arguments) for call in whole.tool_calls]
