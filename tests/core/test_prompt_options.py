"""How a prompt runs is asked for by name and number; anything else is refused when it is submitted."""

import numpy as np
import pytest

from deepinfer import RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=2)


@pytest.mark.parametrize("name", ["chunk_size", "decode_from", "keep_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "3", [1], float("nan")])
def test_numbers_are_integers_of_at_least_one(make_engine, count_up, name, value) -> None:
    engine = make_engine(count_up())
    with pytest.raises(RequestError, match=f"{name} is .*; it must be an integer, at least 1") as caught:
        engine.add_request("a", [1, 2], GREEDY, **{name: value})
    assert caught.value.code == "invalid_parameter" and not engine.has_unfinished()


@pytest.mark.parametrize("value", ["decode", "", 1, True, ["off"]])
def test_replay_is_one_of_its_names(make_engine, count_up, value) -> None:
    engine = make_engine(count_up())
    with pytest.raises(RequestError, match=r"replay is .*; it must be one of 'off', 'decoder', 'full'") as caught:
        engine.add_request("a", [1, 2], GREEDY, replay=value)
    assert caught.value.code == "invalid_parameter" and not engine.has_unfinished()


def test_integers_of_numpy_and_names_pass(make_engine, count_up, drain) -> None:
    engine = make_engine(count_up())
    engine.add_request("a", [1, 2, 3], GREEDY, chunk_size=np.int64(2), decode_from=np.int32(2), replay="off")
    assert drain(engine)["a"].outputs[0].token_ids == [4, 5]
