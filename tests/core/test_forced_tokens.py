"""Tokens that are forced: golden ids and the end of the reasoning; the model's logprobs of them are reported."""

import numpy as np
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.testing import HashModel, PuppetModel, ScriptedDraft

VOCAB = 384

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer(pytestconfig):
    return Tokenizer.from_dir(pytestconfig.rootpath / "tests" / "data")


def llm_of(model, **settings):
    return LLM(model, backend="cpu", block_size=4, window_page=2, max_model_len=64, num_kv_blocks=64, **settings)


def test_golden_tokens_score_a_text_as_prompt_logprobs_do() -> None:
    """Teacher forcing: the logprobs of forced outputs are those that the same tokens have inside a prompt."""
    model, prompt = HashModel(VOCAB), [5, 6, 7]
    golden = np.random.default_rng(1).integers(0, VOCAB, 12).tolist()
    with llm_of(model) as llm:
        (forced,) = llm.generate(prompt, SamplingParams(max_tokens=12, golden_token_ids=golden, logprobs=2))
        (scored,) = llm.generate(prompt + golden, SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert forced.outputs[0].token_ids == golden
    assert forced.outputs[0].logprobs == scored.prompt_logprobs[3:]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_that_disagree_with_forced_tokens_are_rejected(asynchronous) -> None:
    golden = [10, 11, -1, 13, 14, -1, 16]
    params = SamplingParams(max_tokens=10, seed=2, golden_token_ids=golden, logprobs=1)
    with llm_of(HashModel(VOCAB)) as llm:
        (want,) = llm.generate([5, 6], params)

    def guess(ids):
        tokens = (want.outputs[0].token_ids + [0] * 9)[len(ids) - 2 :][:4]
        return [tokens[0], 99, *tokens[2:]] if len(ids) % 2 else tokens, [0.5] * 4

    draft = ScriptedDraft(guess, 4)
    with llm_of(HashModel(VOCAB), draft=draft, draft_schedule="fixed", async_scheduling=asynchronous) as llm:
        (got,) = llm.generate([5, 6], params)
        assert got.outputs == want.outputs and llm.stats.num_steps < 14
    assert all(g in (-1, t) for g, t in zip(golden, got.outputs[0].token_ids, strict=False))


def test_a_forced_token_the_filters_remove_is_drawn_all_the_same() -> None:
    params = SamplingParams(max_tokens=4, golden_token_ids=[3, 4, 5, 6], top_k=1, logprobs=0)
    with llm_of(HashModel(VOCAB)) as llm:
        raw, processed = llm.generate(
            [[1]] * 2, [params, SamplingParams(**{**vars(params), "logprobs_mode": "processed_logprobs"})]
        )
    assert raw.outputs[0].token_ids == processed.outputs[0].token_ids == [3, 4, 5, 6]
    assert all(entry[t].logprob > -20 for t, entry in zip([3, 4, 5, 6], raw.outputs[0].logprobs, strict=True))
    assert all(
        entry[t].logprob == -np.inf for t, entry in zip([3, 4, 5, 6], processed.outputs[0].logprobs, strict=True)
    )


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 5, 11])
def test_reasoning_ends_after_its_budget(tokenizer, budget, drafts) -> None:
    begin, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")

    def logits(ids):  # it would think for ten tokens, then say b
        row = np.zeros(VOCAB)
        thinking = ids[::-1].index(begin) < (ids[::-1].index(end) if end in ids else 99)
        row[67 if thinking else 68] = 9
        if thinking and ids[::-1].index(begin) == 10:
            row[end] = 99
        return row

    draft = {"draft": ScriptedDraft(lambda ids: ([67] * 4, [0.5] * 4), 4), "draft_schedule": "fixed"} if drafts else {}
    with llm_of(PuppetModel(VOCAB, logits), tokenizer=tokenizer, **draft) as llm:
        params = SamplingParams(temperature=0, max_tokens=14, thinking_budget=budget, logprobs=0)
        (result,) = llm.generate([5, begin], params)
        (spoken,) = llm.generate([5, begin, 67, end], params)
    spent = min(budget, 10)
    assert result.outputs[0].token_ids == [67] * spent + [end] + [68] * (13 - spent)
    assert spoken.outputs[0].token_ids == [68] * 14
    logprob = result.outputs[0].logprobs[spent][end].logprob
    assert logprob < -5 if budget < 10 else logprob > -1


def test_a_budget_needs_the_markers(pytestconfig, tokenizer) -> None:
    class NoMarkers(Tokenizer):
        def token_to_id(self, text):
            return None if "think" in text else super().token_to_id(text)

    with llm_of(HashModel(VOCAB), tokenizer=NoMarkers.from_dir(pytestconfig.rootpath / "tests" / "data")) as llm:
        (result,) = llm.generate([5], SamplingParams(thinking_budget=3))
    assert result.error.code == "unsupported_parameter" and "<think>" in result.error.message
