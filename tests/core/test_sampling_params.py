from __future__ import annotations

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest

from deepinfer.core.errors import RequestError
from deepinfer.core.sampling_params import (
    GREEDY_BELOW,
    MAX_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_TOP_P,
    InvalidParameterError,
    SamplingParams,
)

VOCAB = 128


def test_defaults_ask_for_nothing_unusual():
    params = SamplingParams()
    params.validate(VOCAB)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, -1, 0.0)
    assert params.max_tokens == 16 and params.seed is None and params.logprobs is None and not params.greedy


def test_supported_parameters_pass():
    SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=2**64 - 1,
        max_tokens=0,
        stop_token_ids=[0, 127],
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=0,
        skip_special_tokens=False,
    ).validate(VOCAB)


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("temperature", -0.1, "0 \\(greedy\\) or a positive number"),
        ("temperature", math.nan, "positive number"),
        ("temperature", math.inf, "positive number"),
        ("temperature", True, "positive number"),
        ("temperature", "1", "positive number"),
        ("temperature", None, "positive number"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("top_k", -2, "-1 or 0 for off"),
        ("top_k", 5.0, "-1 or 0 for off"),
        ("top_k", True, "-1 or 0 for off"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("seed", -1, "from 0 to 2\\^64 - 1"),
        ("seed", 2**64, "from 0 to 2\\^64 - 1"),
        ("seed", 1.0, "from 0 to 2\\^64 - 1"),
        ("max_tokens", -1, "at least 0"),
        ("max_tokens", None, "at least 0"),
        ("max_tokens", False, "at least 0"),
        ("min_tokens", 17, "from 0 to max_tokens, which is 16"),
        ("n", 0, "at least 1"),
        ("n", 16385, "at most 16384"),
        ("allowed_token_ids", [], "at least one token id"),
        ("logprobs_mode", "raw_logits", "'raw_logprobs' or 'processed_logprobs'"),
        ("thinking_budget", -1, "at least 0"),
        ("logits_processors", ["a"], "a mapping of a processor's name"),
        ("logprobs", -1, "at least 0"),
        ("logprobs", True, "at least 0"),
        ("prompt_logprobs", -1, "at least 0"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", math.nan, "from -2 to 2"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", 1e-300, "from 0.001 to 1000"),
        ("repetition_penalty", 1e300, "from 0.001 to 1000"),
        ("temperature", 1e308, "up to 1e30"),
        ("temperature", 1e39, "up to 1e30"),
        ("top_p", 1e-300, "between 0 and 1.2e-38"),
        ("stop_token_ids", 5, "a list of token ids"),
        ("stop_token_ids", [True], "a list of token ids"),
        ("stop_token_ids", ["1"], "a list of token ids"),
        ("stop", [""], "non-empty strings"),
        ("stop", 3, "non-empty strings"),
        ("logit_bias", [1], "a mapping"),
        ("ignore_eos", 1, "True or False"),
        ("skip_special_tokens", None, "True or False"),
    ],
)
def test_impossible_values_are_refused_by_name_value_and_remedy(field, value, right):
    with pytest.raises(InvalidParameterError, match=f"^invalid_parameter: {field} must be .*{right}") as caught:
        SamplingParams(**{field: value})
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, RequestError) and isinstance(caught.value, ValueError)


FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 10**6000, Fraction(10**400, 3)], ids=["plus", "minus", "huge", "ratio"]
)
def test_numbers_too_large_for_a_float_are_refused(field, value):
    with pytest.raises(InvalidParameterError, match=f"{field} must be "):
        SamplingParams(**{field: value})


def test_extremes_leave_finite_float32_numbers():
    params = SamplingParams(temperature=GREEDY_BELOW, repetition_penalty=MAX_REPETITION_PENALTY, top_p=MIN_TOP_P)
    factor = np.float32(params.repetition_penalty)
    for logit in (np.float32(MAX_BIAS) * factor, np.float32(MAX_BIAS) / np.float32(1 / MAX_REPETITION_PENALTY)):
        assert np.isfinite(logit / np.float32(params.temperature))
    assert np.float32(params.top_p) > 0 and np.isfinite(np.float32(MAX_TEMPERATURE))


def test_a_deeply_nested_value_is_shown_shortly():
    value = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(InvalidParameterError, match="top_k must be") as caught:
        SamplingParams(top_k=value)
    assert len(str(caught.value)) < 300


def test_golden_ids_are_ids_or_free_places():
    SamplingParams(golden_token_ids=[-1, 5, VOCAB - 1]).validate(VOCAB)
    for token_id in (-2, VOCAB):
        with pytest.raises(InvalidParameterError, match=rf"golden_token_ids\[0\] has id {token_id}"):
            SamplingParams(golden_token_ids=[token_id]).validate(VOCAB)


@pytest.mark.parametrize("bias", [{3: math.nan}, {3: math.inf}, {3: -2e30}, {"x": 1.0}, {1.5: 1.0}, {3: True}])
def test_biases_that_are_not_finite_numbers_of_ids_are_refused(bias):
    with pytest.raises(InvalidParameterError, match="logit_bias must map token ids to finite numbers"):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("token_id", [VOCAB, -1])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_at_submit(field, token_id):  # SA-8
    with pytest.raises(InvalidParameterError, match=rf"{field}\[1\] has id {token_id}; .* 0 to 127"):
        SamplingParams(**{field: [3, token_id]}).validate(VOCAB)


@pytest.mark.parametrize("key", [VOCAB, -1, "128"])
def test_a_bias_outside_the_vocabulary_is_refused_at_submit(key):  # SA-7
    with pytest.raises(InvalidParameterError, match=f"logit_bias has id {key}; "):
        SamplingParams(logit_bias={key: 1.0}).validate(VOCAB)


@pytest.mark.parametrize(
    "neutral",
    [{"stop": []}, {"stop": None}, {"logit_bias": {}}, {"bad_words": []}, {"repetition_penalty": 1}, {"n": 1}],
)
def test_neutral_values_pass(neutral):
    SamplingParams(**neutral).validate(VOCAB)


def test_zero_tokens_mean_zero():  # D-1
    assert SamplingParams(max_tokens=0).max_tokens == 0


def test_more_logprobs_than_the_vocabulary_are_fine():  # SA-4
    SamplingParams(logprobs=VOCAB + 1, prompt_logprobs=10**9).validate(VOCAB)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1, False)])
def test_tiny_temperatures_are_greedy_as_in_vllm(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.arange(2).tolist())
    assert type(params.temperature) is float and type(params.top_k) is int


def test_lists_are_copied_and_the_object_does_not_change():
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids)
    ids.append(3)
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5
    assert dataclasses.replace(params, temperature=0.5).stop_token_ids == (1, 2)


def test_params_and_errors_cross_process_boundaries():
    params = SamplingParams(logit_bias={"3": 1}, seed=7)
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(top_p=0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is InvalidParameterError and str(copy) == str(caught.value)
