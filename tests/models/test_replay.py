"""Bounded replay: its golden logits, and bit for bit what a request gets alone, whatever else runs, or how.

The oracle for a request is `LLM.logits` of its whole text with the same first decoder row: it runs no decode step.
"""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer import LLM, SamplingParams
from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.testing import PuppetModel

GOLDEN = Path(os.environ.get("DEEPINFER_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))
SETTINGS = {"backend": "cpu", "block_size": 8, "window_page": 4, "max_model_len": 384}
WAYS = ({}, {"chunk_size": 1}, {"chunk_size": 7}, {"chunk_size": 16}, {"decode_from": 5})


@pytest.fixture(scope="module", params=[(s, r) for s in ("plain", "quant") for r in (False, True)], ids=str)
def golden(request):
    """A set's tensors with and without cache rounding, and its checkpoint with compact and with masked rows."""
    name, rounding = request.param
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden files at {GOLDEN}")
    tensors = load_file(str(GOLDEN / name / "golden.safetensors"))
    settings = {"backend": "cpu", "dtype": "float32", "kv_rounding": rounding}
    made = {form: LLM(str(GOLDEN / name), replay_form=form, **settings) for form in ("compact", "mask")}
    suffix = "" if rounding else "_no_cache_quant"
    cases = [
        (tensors[f"prompt{i}.input_ids"].tolist(), tensors[key], tensors[f"prompt{i}.noise{suffix}"])
        for i in range(9)
        if (key := f"prompt{i}.replay_logits_last_window{suffix}") in tensors
    ]
    yield rounding, cases, made
    for llm in made.values():
        llm.close()


def test_golden_logits(golden) -> None:
    """Without rounding within 1e-4; with it, as for exact logits, by how wild each position is."""
    rounding, cases, made = golden
    assert len(cases) >= 2
    for ids, want, noise in cases:
        window = len(want)
        got = made["compact"].logits(ids, replay="decoder", keep_tokens=window)
        assert got.shape[0] == len(ids)
        assert got[:-window].isnan().all()
        diff, noise = (got[-window:] - want).abs().amax(-1), noise[-window:]
        assert (diff <= (10 * noise + 2e-3 if rounding else 1e-4)).all(), diff
        assert (diff[noise < 1e-3] < 2e-3).all(), diff
        for form, llm in made.items():
            for way in WAYS:
                same = llm.logits(ids, replay="decoder", keep_tokens=window, **way)
                assert torch.equal(same[-window:], got[-window:]), (form, way)


@pytest.fixture(scope="module", params=[True, False], ids=["quant", "plain"])
def tiny(request, tmp_path_factory):
    """A checkpoint, the window, and the rows that its encoder layers need before a row to give it its exact bits."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = make_tiny(folder, seed=17, quant=request.param).text
    return str(folder), config.sliding_window, config.first_decoder_layer * (config.sliding_window - 1)


def text(length, seed=3):
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def facts(output):
    assert output.error is None, output.error
    completion = output.outputs[0]
    probs = [{t: (e.logprob, e.rank) for t, e in entry.items()} for entry in completion.logprobs]
    return completion.token_ids, probs, output.approximate


def workload(window):
    """Prompts around the number of rows that are kept, some alike, and how to continue them."""
    keep = window + 12
    lengths = [1, window, keep - 1, keep, keep + 1, keep + 8, 2 * keep + 3, 3 * keep]
    prompts = [text(length, seed=length) for length in lengths]
    shared = text(3 * keep, seed=99)
    prompts += [shared[:end] + text(3, seed=end) for end in (8, keep, 2 * keep, 3 * keep)] + [shared, shared[:-2]]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=3 + i % 3 * 12, logprobs=2, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(tiny):
    """Each request alone and new to its engine."""
    folder, window, _ = tiny
    prompts, params = workload(window)
    with LLM(folder, replay="decoder", prefix_caching=False, **SETTINGS) as llm:
        return [facts(llm.generate([prompt], [p])[0]) for prompt, p in zip(prompts, params, strict=True)]


RUNS = {
    "together": {},
    "budget of 8": {"max_num_batched_tokens": 8},
    "budget of 33, three places": {"max_num_batched_tokens": 33, "max_num_seqs": 3},
    "masked": {"replay_form": "mask", "max_num_batched_tokens": 40},
    "asynchronous": {"async_scheduling": True, "max_num_batched_tokens": 50},
    "speculation": {"speculation": "coupled", "draft_schedule": "fixed"},
    "masked speculation": {"speculation": "coupled", "draft_schedule": "fixed", "replay_form": "mask"},
    "preempted": {"max_num_batched_tokens": 64},
    "no prefixes": {"prefix_caching": False, "max_num_batched_tokens": 64},
}


@pytest.mark.parametrize("run", RUNS)
def test_any_run_equals_alone(tiny, alone, run) -> None:
    folder, window, _ = tiny
    prompts, params = workload(window)
    settings = SETTINGS | RUNS[run]
    if run == "preempted":
        settings["num_kv_blocks"] = (3 * (window + 12) + 3 + 27) // 8 + 2
    with LLM(folder, replay="decoder", **settings) as llm:
        for turn in ("new", "stored"):
            outputs = llm.generate(prompts, params)
            assert [facts(o) for o in outputs] == alone, turn
        assert (llm.stats.num_preemptions > 0) == (run == "preempted")
        if run != "no prefixes":
            assert llm.stats.prefix_hit_tokens > 0
            assert max(o.num_cached_tokens for o in outputs) > window
        assert llm.stats.num_free_blocks == llm.stats.num_blocks


def test_decoding_continues_the_rows_that_were_kept(tiny, alone) -> None:
    """The logprobs of an answer are those of its text, run as one prompt that keeps as many rows more."""
    folder, window, _ = tiny
    prompts, params = workload(window)
    with LLM(folder, **SETTINGS) as llm:
        for prompt, (answer, probs, _) in zip(prompts, alone, strict=True):
            whole, start = prompt + answer, max(0, len(prompt) - window - 12)
            logits = llm.logits(whole, replay="decoder", keep_tokens=max(window, len(whole) - start))
            rows = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
            for row, token, entry in zip(rows, answer, probs, strict=True):
                assert row[token].item() == pytest.approx(entry[token][0], abs=1e-5)
    assert params


def test_short_prompts_and_scored_ones_are_exact(tiny) -> None:
    folder, window, _ = tiny
    keep = window + 12
    short, long = text(keep), text(2 * keep)
    sampling = {"max_tokens": 4, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
    with LLM(folder, **SETTINGS) as exact, LLM(folder, replay="decoder", **SETTINGS) as replay:
        for prompt, params in (
            (short, SamplingParams(**sampling)),
            (long, SamplingParams(**sampling, prompt_logprobs=1)),
            (long, SamplingParams(max_tokens=0, prompt_logprobs=1)),
        ):
            want, got = (llm.generate([prompt], [params])[0] for llm in (exact, replay))
            assert got.outputs == want.outputs
            assert got.prompt_logprobs == want.prompt_logprobs
            assert not got.approximate
        assert torch.equal(replay.logits(long), exact.logits(long))
        assert torch.equal(exact.logits(short, replay="decoder"), exact.logits(short))
        kept = replay.logits(long, replay="decoder")
        assert torch.equal(kept.isnan().all(-1), torch.arange(2 * keep) < keep)
        assert not torch.equal(kept[keep:], exact.logits(long)[keep:])
        assert replay.generate([long], [SamplingParams(**sampling)])[0].approximate
        assert not exact.generate([long], [SamplingParams(**sampling)])[0].approximate
        assert not replay.generate([long], [SamplingParams(max_tokens=0)])[0].approximate


def test_dropped_rows_do_not_run_in_decoder_layers(tiny) -> None:
    folder, window, _ = tiny
    with LLM(folder, load_draft=True, max_num_batched_tokens=window, replay="decoder", **SETTINGS) as llm:
        executor, last = llm.engine.executor, llm.engine.model.layers[-1].name
        forward, rows = executor.forward, {f"{last}.attn_out": 0, "draft.features": 0, "layers.0.attn_out": 0}

        def count(name, value):
            if name in rows:
                rows[name] += value.shape[0]

        executor.forward = lambda batch, tap: forward(batch, count)
        llm.generate([text(10 * window)], [SamplingParams(max_tokens=1)])
        assert rows == {
            f"{last}.attn_out": window + 12,
            "draft.features": window + 12,
            "layers.0.attn_out": 10 * window,
        }


def serve(engine, ids, chunk_size=None):
    """One request to its end."""
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, ignore_eos=True)
    engine.add_request("r", ids, params, chunk_size=chunk_size)
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                engine.blocks.pool.check()
                return output
    raise AssertionError("it never ended")


def full_engine(folder, keep):
    """An engine that has stored a long text, and no window pages but the last."""
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "prefix_window_pages": 0}
    llm = LLM(folder, replay="full", replay_keep_tokens=keep, **SETTINGS | settings)
    serve(llm.engine, text(320))
    return llm


def test_full_replay_with_enough_rows_gives_exact_records(tiny) -> None:
    """Window records are exact where all that they depend on ran again, so the answer is that of decoder replay."""
    folder, _, reach = tiny
    keep = reach + 2
    hit = -(-2 * keep // 8) * 8
    prompt = text(320)[:hit] + text(reach + 8, seed=4)
    assert len(prompt) < 384
    with LLM(folder, replay="decoder", replay_keep_tokens=keep, **SETTINGS) as llm:
        want = serve(llm.engine, prompt)
    for chunk_size in (None, 5):
        with full_engine(folder, keep) as llm:
            got = serve(llm.engine, prompt, chunk_size)
            assert 0 < got.num_cached_tokens <= hit - keep < hit
            assert hit - keep - got.num_cached_tokens < 4
            assert facts(got) == facts(want)
            assert got.approximate


def test_full_replay_does_not_depend_on_chunks_and_stores_nothing(tiny) -> None:
    folder, window, _ = tiny
    keep, prompt = window, [*text(320)[:200], 7, 8, 9]
    answers = []
    for chunk_size in (None, 1, 3, window + 1):
        with full_engine(folder, keep) as llm:
            before = llm.engine.blocks.pool.prefix_stats()["held_blocks"]
            answers.append(serve(llm.engine, prompt, chunk_size))
            assert answers[-1].approximate
            assert answers[-1].num_cached_tokens == (200 - keep) // 4 * 4
            assert llm.engine.blocks.pool.prefix_stats()["held_blocks"] == before
            assert llm.stats.num_free_blocks == llm.stats.num_blocks
    assert [facts(a) for a in answers] == [facts(answers[0])] * len(answers)


def test_full_replay_takes_an_exact_hit_where_it_saves_no_rows(tiny) -> None:
    folder, window, _ = tiny
    keep = window + 12
    with LLM(folder, replay="full", **SETTINGS) as llm:
        serve(llm.engine, text(100))
        got = serve(llm.engine, text(100) + text(2, seed=5))
        assert got.num_cached_tokens == (102 - keep) // 8 * 8
    with LLM(folder, replay="decoder", **SETTINGS) as llm:
        assert facts(serve(llm.engine, text(100) + text(2, seed=5))) == facts(got)


def test_exact_requests_and_cut_ones_do_not_share_pages(tiny) -> None:
    """One engine, the same prompt exact, cut and exact again."""
    folder, window, _ = tiny
    prompt = text(3 * window + 12)
    with LLM(folder, **SETTINGS) as llm:
        for replay in ("decoder", "off", "decoder"):
            params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, ignore_eos=True)
            llm.engine.add_request("r", prompt, params, replay=replay)
            while llm.engine.has_unfinished():
                outputs = llm.engine.step()
            assert outputs[0].num_cached_tokens == 0
            assert outputs[0].approximate == (replay == "decoder")


def test_what_cannot_be_replayed_is_refused(tiny) -> None:
    folder, window, _ = tiny
    puppet = PuppetModel(4, lambda ids: [0.0] * 4)
    with pytest.raises(ConfigError, match="needs decoder layers"):
        LLM(puppet, backend="cpu", num_kv_blocks=4, replay="decoder")
    with pytest.raises(ConfigError, match=f"replay_keep_tokens is {window - 1}; use the window, {window}, or more"):
        LLM(folder, replay="full", replay_keep_tokens=window - 1, **SETTINGS)
    with LLM(puppet, backend="cpu", num_kv_blocks=4) as llm, pytest.raises(RequestError, match="all layers"):
        llm.logits([1, 2], replay="decoder")
    with LLM(folder, **SETTINGS) as llm:
        with pytest.raises(RequestError, match="keep_tokens is 1"):
            llm.logits([1, 2], replay="decoder", keep_tokens=1)
        with pytest.raises(RequestError, match="prompt logprobs need all rows"):
            llm.engine.add_request("r", [1, 2], SamplingParams(prompt_logprobs=1), replay="decoder")
