"""The memory plan: published sizes of the released model, and the bytes that a load really takes."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deepinfer.models.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.deepseek_v41_flash.memory_plan import MemoryPlan
from deepinfer.models.deepseek_v41_flash.weights import load_weights
from deepinfer.ops.formats import QTensor

REAL = ModelConfig.from_dict(json.loads((Path(__file__).parent / "data" / "real_config.json").read_text()))
GIB = 2**30


def loaded_bytes(node: Any) -> int:
    """Bytes of all tensors under a dataclass, list or dict."""
    if isinstance(node, Tensor):
        return node.nbytes
    if isinstance(node, QTensor):
        return node.num_bytes
    if isinstance(node, list | tuple):
        return sum(map(loaded_bytes, node))
    if isinstance(node, dict):
        return sum(map(loaded_bytes, node.values()))
    return sum(map(loaded_bytes, vars(node).values())) if hasattr(node, "__dataclass_fields__") else 0


def test_the_released_model_takes_890_bytes_of_kv_per_token() -> None:
    plan = MemoryPlan.of(REAL)
    assert plan.kv_bytes_per_token == 890
    assert plan.window_bytes_per_token == 43 * 528
    assert MemoryPlan.of(REAL, draft=False).window_bytes_per_seq() == 128 * 528 * 40
    assert plan.state_bytes_per_seq == 3 * 2 * 2 * 512 * 4


def test_float32_records_take_four_bytes_per_value() -> None:
    plan = MemoryPlan.of(REAL, kv_rounding=False, draft=False)
    assert plan.kv_bytes_per_token == Fraction(4 * (512 + 128) * 5, 2)
    assert plan.window_bytes_per_token == 40 * 4 * 512


def test_the_released_weights_add_up_to_the_published_size() -> None:
    plan = MemoryPlan.of(REAL)
    assert plan.weight_bytes["engram_tables"] == (384006168 + 384016682) * 264
    assert plan.host_bytes == plan.weight_bytes["engram_tables"]
    assert sum(plan.num_tensors.values()) == 96_085
    assert plan.total_weight_bytes == sum(plan.format_bytes.values())
    # published: 475.3 GiB of files; the loaded form adds 31 of 32 scale rows to the dense FP8 projections
    assert 475.3 * GIB < plan.total_weight_bytes < 477 * GIB


@pytest.mark.parametrize("quant", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_the_plan_equals_what_a_load_takes(tmp_path: Path, quant: bool, skip: bool) -> None:
    config = make_tiny(tmp_path / "t", quant=quant)
    checkpoint = Checkpoint.open(tmp_path / "t")
    stored = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
    weights = load_weights(checkpoint, config, draft=not skip, vision=not skip)
    plan = MemoryPlan.of(config, draft=not skip, vision=not skip, stored=stored)
    assert plan.total_weight_bytes == loaded_bytes(weights)
    tables = [layer.engram.table for layer in weights.layers if layer.engram is not None]
    assert plan.host_bytes == loaded_bytes(tables)


def test_a_request_takes_whole_blocks_and_pages() -> None:
    plan = MemoryPlan.of(REAL, draft=False)
    # a window of 128 tokens may begin anywhere in a page of 32, so it touches 5
    assert plan.window_bytes_per_seq(32) == 5 * 32 * 528 * 40
    assert plan.seq_bytes(32) == plan.window_bytes_per_seq(32) + plan.state_bytes_per_seq
    assert plan.request_bytes(1) == plan.request_bytes(128) == 890 * 128 + plan.seq_bytes(32)
    assert plan.request_bytes(129) - plan.request_bytes(128) == 890 * 128


def test_what_fits_fills_the_memory_and_not_more() -> None:
    plan = MemoryPlan.of(REAL, draft=False, vision=False)
    weights = plan.total_weight_bytes - plan.host_bytes
    memory = weights + 8 * plan.seq_bytes() + 1001 * plan.block_bytes(128)
    fit = plan.fit(memory, num_seqs=8)
    assert (fit.num_blocks, fit.num_tokens) == (1000, 128_000)  # block 0 is never allocated
    assert plan.fit(memory - 1, num_seqs=8).num_blocks == 999
    assert plan.fit(memory + plan.host_bytes, num_seqs=8, tables_elsewhere=False) == fit
    nothing = plan.fit(weights - 1)
    assert (nothing.cache_bytes, nothing.num_tokens) == (-1, 0)
