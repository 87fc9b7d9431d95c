"""The model against its golden files: logits in every way of running a prompt, and what each layer did inside.

The golden folder lies beside the repository (`../shared/golden`) or where DEEPINFER_GOLDEN says; without it these tests
skip, and the row-semantics tests on generated checkpoints still run.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer import LLM

GOLDEN = Path(os.environ.get("DEEPINFER_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden"))
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden files at {GOLDEN}")

SETS = ("plain", "quant")
WAYS = {
    "whole": {},
    "chunk 1": {"chunk_size": 1},
    "chunk 3": {"chunk_size": 3},
    "chunk 7": {"chunk_size": 7},
    "chunk 16": {"chunk_size": 16},
}


@pytest.fixture(scope="module", params=SETS)
def golden(request):
    return request.param, load_file(str(GOLDEN / request.param / "golden.safetensors"))


@pytest.fixture(scope="module")
def models(golden):
    """The set's checkpoint in float32, with cache rounding off and on."""
    name, _ = golden
    made = {
        rounding: LLM(str(GOLDEN / name), backend="cpu", dtype="float32", kv_rounding=rounding)
        for rounding in (False, True)
    }
    yield made
    for llm in made.values():
        llm.close()


def prompts(tensors):
    return sorted(key.split(".")[0] for key in tensors if key.startswith("prompt") and key.endswith(".input_ids"))


def ways(length):
    return WAYS | {"decode": {"decode_from": max(1, length // 2)}}


def test_logits_without_cache_rounding(golden, models) -> None:
    _, tensors = golden
    for prompt in prompts(tensors):
        ids = tensors[f"{prompt}.input_ids"].tolist()
        want = tensors[f"{prompt}.logits_no_cache_quant"]
        for way, options in ways(len(ids)).items():
            worst = (models[False].logits(ids, **options) - want).abs().max()
            assert worst < 1e-4, f"{prompt} {way}: off by {worst:.2e}"


def test_logits_with_cache_rounding(golden, models) -> None:
    """Calm positions within 2e-3, wild ones within ten times their own noise, the median below 1e-3."""
    _, tensors = golden
    for prompt in prompts(tensors):
        ids = tensors[f"{prompt}.input_ids"].tolist()
        noise = tensors[f"{prompt}.noise"]
        for way, options in ways(len(ids)).items():
            diff = (models[True].logits(ids, **options) - tensors[f"{prompt}.logits"]).abs().amax(-1)
            calm = noise < 1e-3
            assert diff.median() < 1e-3, (prompt, way)
            assert (diff[calm] < 2e-3).all(), (prompt, way, diff[calm].max())
            assert ((diff[~calm] > 10 * noise[~calm] + 2e-3).sum()) <= max(1, len(ids) // 100), (prompt, way)


def test_ways_of_running_give_equal_bits(golden, models) -> None:
    _, tensors = golden
    prompt = prompts(tensors)[-1]
    ids = tensors[f"{prompt}.input_ids"].tolist()
    for rounding, llm in models.items():
        whole = llm.logits(ids)
        for way, options in ways(len(ids)).items():
            assert torch.equal(llm.logits(ids, **options), whole), (rounding, way)


def observe(llm, ids):
    """Intermediates of one whole prefill, by name."""
    seen = {}
    executor = llm.engine.executor
    forward = executor.forward
    executor.forward = lambda batch, tap: forward(batch, lambda name, value: seen.__setitem__(name, value.clone()))
    try:
        llm.logits(ids)
    finally:
        executor.forward = forward
    return seen


def as_sets(rows):
    return [set(row.tolist()) - {-1} for row in rows]


def test_layers_inside(golden, models) -> None:
    """Streams, sublayer outputs, selections, routes and n-gram rows of prompt 2, cache rounding on."""
    name, tensors = golden
    ids = tensors["prompt2.input_ids"].tolist()
    seen = observe(models[True], ids)
    checked = 0
    for key, want in tensors.items():
        if not key.startswith("prompt2.layer"):
            continue
        layer, what = key.removeprefix("prompt2.layer").split(".")
        got = seen.get(f"layers.{layer}.{what}")
        if what in ("streams_in", "pre_mix_in", "attn_out", "ffn_out"):
            assert_close_rows(got, want, tensors["prompt2.noise"], key)
        elif what == "topk_indices":
            assert as_sets(got) == as_sets(want), key
        elif what == "candidates":
            assert_same_pool(seen[f"layers.{layer}.candidate_blocks"], want, models[True])
        elif what == "route_experts":
            order, want_order = got.sort(1), want.long().sort(1)
            assert torch.equal(order.values, want_order.values), key
            weights = tensors[key.replace("experts", "weights")].gather(1, want_order.indices)
            mine = seen[f"layers.{layer}.route_weights"].gather(1, order.indices)
            assert_close_rows(mine, weights, tensors["prompt2.noise"], key)
        elif what == "route_weights":
            continue  # with route_experts, in its order
        else:
            raise AssertionError(f"{key} is compared with nothing")
        checked += 1
    assert checked > 5 * (7 if name == "plain" else 9)
    assert torch.equal(seen["engram_rows"].transpose(0, 1).int(), tensors["prompt2.engram_rows"])
    assert_close_rows(seen["final_norm"], tensors["prompt2.final_norm"], tensors["prompt2.noise"], "final_norm")


def assert_close_rows(got, want, noise, what) -> None:
    """Equal but for cache codes: a value next to a rounding edge may take the neighbouring code and move its row."""
    diff = (got - want).abs().flatten(1).amax(-1)
    assert diff.median() < 2e-5, f"{what}: median {diff.median():.2e}"
    assert (diff[noise < 1e-3] < 2e-3).all(), f"{what}: {diff.max():.2e}"


def assert_same_pool(blocks, mask, llm) -> None:
    """The pool mask marks visible positions of the kept blocks."""
    size = next(b.attention.indexer.pool_block for b in llm.engine.model.layers if b.attention.indexer)
    for row, kept in enumerate(as_sets(blocks)):
        got = {b * size + i for b in kept for i in range(size) if b * size + i <= row}
        assert got == set(mask[row].nonzero().flatten().tolist()), row
