"""From tokens to results: stop rules, text and logprobs of one request, without an engine."""

import math
from pathlib import Path

import numpy as np
import pytest

from deepinfer.core.errors import RequestError
from deepinfer.core.output_recorder import OutputRecorder
from deepinfer.core.request import Request
from deepinfer.core.sampler import TokenLogprobs
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer

EOS = 1
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(Path(__file__).parents[1] / "data")


@pytest.fixture
def begin(tokenizer):
    """Starts a request; gives it and its recorder."""

    def make(max_len=100, with_text=True, **params):
        recorder = OutputRecorder([EOS], tokenizer if with_text else None)
        params = SamplingParams(**({"max_tokens": 50} | params))
        request = Request.new("r", list(PROMPT), params, 9, max_len, None)
        recorder.start(request)
        return recorder, request

    return make


def feed(recorder, request, tokens):
    for token in tokens:
        assert request.completion.finish_reason is None
        recorder.add_token(request, token)
    return request.completion


def table(*rows):
    """Logprobs of rows of (token's logprob, its rank, best ids, their logprobs)."""
    columns = list(zip(*rows, strict=True))
    types = (np.float32, np.int32, np.int32, np.float32)
    return TokenLogprobs(*(np.array(column, dtype=kind) for column, kind in zip(columns, types, strict=True)))


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stopped_by"),
    [
        ({"max_tokens": 3}, [10, 11, 12], "length", None),
        ({}, [10, EOS], "stop", None),
        ({"ignore_eos": True, "max_tokens": 2}, [10, EOS], "length", None),
        ({"stop_token_ids": [11]}, [10, 11], "stop", 11),
        ({"stop_token_ids": [EOS]}, [10, EOS], "stop", None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [10, EOS], "stop", EOS),
        ({"stop_token_ids": [12], "max_tokens": 3}, [10, 11, 12], "stop", 12),
        ({"max_len": 5}, [10, 11], "length", None),
        ({"max_len": 5, "stop_token_ids": [11]}, [10, 11], "stop", 11),
    ],
)
@pytest.mark.parametrize("with_text", [True, False])
def test_the_first_rule_that_holds_ends_the_answer(begin, params, tokens, reason, stopped_by, with_text) -> None:
    completion = feed(*begin(with_text=with_text, **params), tokens)
    assert (completion.finish_reason, completion.stop_reason) == (reason, stopped_by)
    assert completion.token_ids == tokens


def test_text_grows_with_tokens_and_the_stop_token_leaves_none(begin, tokenizer) -> None:
    recorder, request = begin(stop_token_ids=[13])
    word = [40, 41, 42]
    completion = feed(recorder, request, word)
    assert completion.text == tokenizer.decode(word) and not request.output.finished
    assert feed(recorder, request, [13]).text == tokenizer.decode(word)
    assert request.output.finished


def test_special_tokens_are_left_out_unless_asked_for(begin, tokenizer) -> None:
    """D-12."""
    assert feed(*begin(ignore_eos=True, max_tokens=3), [40, EOS, 41]).text == tokenizer.decode([40, 41])
    kept = feed(*begin(ignore_eos=True, max_tokens=3, skip_special_tokens=False), [40, EOS, 41]).text
    assert kept == tokenizer.decode([40, EOS, 41], skip_special_tokens=False) != tokenizer.decode([40, 41])


def test_half_a_character_waits_for_its_other_half_and_shows_at_the_end(begin, tokenizer) -> None:
    tokens = tokenizer.encode("Ж")
    assert len(tokens) == 2
    recorder, request = begin()
    assert feed(recorder, request, tokens[:1]).text == ""
    assert feed(recorder, request, tokens[1:]).text == "Ж"
    recorder, request = begin(max_tokens=1)
    assert feed(recorder, request, tokens[:1]).text == "\N{REPLACEMENT CHARACTER}"


def test_half_a_character_of_the_prompt_shows_as_the_completed_character_only(tokenizer) -> None:
    """ST-3."""
    first, last = tokenizer.encode("Ж")
    recorder = OutputRecorder([EOS], tokenizer)
    request = Request.new("r", [40, 41, first], SamplingParams(max_tokens=2), 9, 100, None)
    recorder.start(request)
    assert feed(recorder, request, [last]).text == "Ж"
    assert feed(recorder, request, [42]).text == "Ж" + tokenizer.decode([42])


def test_without_a_tokenizer_there_are_ids_and_no_text(begin) -> None:
    assert feed(*begin(with_text=False, max_tokens=2), [40, 41]).text == ""


def test_a_row_without_a_draw_is_a_numerical_error_and_keeps_what_was_there(begin, tokenizer) -> None:
    recorder, request = begin()
    completion = feed(recorder, request, [40, 41, -1])
    assert (completion.token_ids, completion.text) == ([40, 41], tokenizer.decode([40, 41]))
    assert (completion.finish_reason, request.output.error.code) == ("error", "numerical_error")
    assert "position 5" in str(request.output.error) and request.output.finished


def test_an_error_or_an_abort_closes_the_result(begin) -> None:
    recorder, request = begin()
    recorder.fail(request, RequestError("x", "y"))
    assert request.output.error.code == "x" and request.completion.finish_reason == "error"
    recorder, request = begin()
    recorder.finish(request, "abort")
    assert request.output.finished and request.output.error is None
    assert request.output.timings.finished >= request.output.timings.arrival


def test_the_first_token_is_marked_once(begin) -> None:
    recorder, request = begin()
    feed(recorder, request, [10])
    first = request.output.timings.first_token
    feed(recorder, request, [11])
    assert request.output.timings.first_token == first is not None


def test_an_entry_has_the_sampled_token_first_and_then_the_best(begin, tokenizer) -> None:
    recorder, request = begin(logprobs=2)
    feed(recorder, request, [40])
    recorder.add_logprobs(request, 40, table((-3.0, 5, [7, 8, 9], [-0.5, -1.0, -2.0])), 0)
    feed(recorder, request, [7])
    recorder.add_logprobs(request, 7, table((0, 0, [0, 0], [0, 0]), (-0.5, 1, [7, 8], [-0.5, -1.0])), 1)
    first, second = request.completion.logprobs
    assert [(t, p.logprob, p.rank) for t, p in first.items()] == [(40, -3.0, 5), (7, -0.5, 1), (8, -1.0, 2)]
    assert [(t, p.logprob, p.rank) for t, p in second.items()] == [(7, -0.5, 1), (8, -1.0, 2)]
    assert first[40].decoded_token == tokenizer.decode([40])
    assert request.completion.cumulative_logprob == -3.5


def test_zero_logprobs_record_the_sampled_token_alone(begin) -> None:
    recorder, request = begin(logprobs=0, with_text=False)
    feed(recorder, request, [40])
    recorder.add_logprobs(request, 40, table((-3.0, 5, [7], [-0.5])), 0)
    assert [list(entry) for entry in request.completion.logprobs] == [[40]]
    assert request.completion.logprobs[0][40].decoded_token is None


def test_prompt_logprobs_come_in_parts_and_begin_with_none(begin) -> None:
    recorder, request = begin(prompt_logprobs=1)
    recorder.add_prompt_logprobs(request, [6], table((-1.0, 2, [9], [-0.5])))
    recorder.add_prompt_logprobs(request, [7], table((-0.25, 1, [7], [-0.25])))
    found = request.output.prompt_logprobs
    assert found[0] is None and [list(entry) for entry in found[1:]] == [[6, 9], [7]]


def test_prompt_logprobs_that_nobody_asked_for_are_a_defect(begin) -> None:
    recorder, request = begin()
    with pytest.raises(AssertionError, match="not asked for"):
        recorder.add_prompt_logprobs(request, [6], table((-1.0, 2, [9], [-0.5])))


def test_values_stay_what_they_are(begin) -> None:
    """A token of no probability has -inf, and float32 numbers are not rounded again."""
    recorder, request = begin(logprobs=1)
    feed(recorder, request, [40])
    recorder.add_logprobs(request, 40, table((-math.inf, 64, [7], [np.float32(-0.1)])), 0)
    entry = request.completion.logprobs[0]
    assert entry[40].logprob == -math.inf and entry[7].logprob == float(np.float32(-0.1))
