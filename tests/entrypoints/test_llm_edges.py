"""Arguments of `LLM` that are nearly right, and a close in the middle."""

import numpy as np
import pytest
import torch

from deepinfer.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "prompts",
    [
        [np.int64(3), np.int32(4)],
        [[np.int64(3), np.int64(4)]],
        np.array([3, 4]),
        np.array([[3, 4]]),
        torch.tensor([3, 4]),
        torch.tensor([[3, 4]]),
        {"prompt_token_ids": [np.int64(3), 4]},
    ],
)
def test_integers_of_numpy_are_integers(make_llm, prompts) -> None:
    (output,) = make_llm().generate(prompts)
    assert output.error is None and output.prompt_token_ids == [3, 4]
    assert all(type(token_id) is int for token_id in output.prompt_token_ids)


@pytest.mark.parametrize("prompts", [None, 5, np.int64(5), np.array(5), b"text", True])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_what_is_no_prompt_is_refused_by_name(make_llm, call, prompts) -> None:
    with pytest.raises(TypeError, match=r"prompts must be a text, a list of token ids, a dict .* got "):
        getattr(make_llm(), call)(prompts)


@pytest.mark.parametrize("messages", [None, 5, "Hi", {"role": "user", "content": "Hi"}])
def test_what_is_no_conversation_is_refused_by_name(make_llm, messages) -> None:
    with pytest.raises(TypeError, match="messages must be a list of messages"):
        make_llm().chat(messages)


def test_a_stream_that_runs_while_the_llm_is_closed_says_so(make_llm) -> None:
    llm = make_llm()
    stream = llm.stream(["one", "two"], SamplingParams(max_tokens=9))
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("one")


def test_logits_of_a_text_are_those_of_its_ids(make_llm) -> None:
    llm = make_llm()
    ids = llm.prompts.read("Once").token_ids
    assert llm.logits("Once").shape == llm.logits(ids).shape == (len(ids), 384)
