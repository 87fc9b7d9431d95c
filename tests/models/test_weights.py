"""Weights: every storage format becomes a canonical tensor of exactly the same values."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.models.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors
from deepinfer.models.deepseek_v41_flash.weights import ModelWeights, Weight, load_weights
from deepinfer.ops.formats import QTensor
from deepinfer.ops.quant import dequantize

MAPS = Path("/proc/self/maps")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture(scope="module", params=[True, False], ids=["quant", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_tiny(path, seed=5, quant=request.param)
    return path


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return ModelConfig.from_dir(folder)


@pytest.fixture(scope="module")
def weights(checkpoint: Checkpoint, config: ModelConfig) -> ModelWeights:
    return load_weights(checkpoint, config)


def values(weight: Weight) -> Tensor:
    return dequantize(weight, torch.float64) if isinstance(weight, QTensor) else weight.double()


def stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """Values of a projection by the formulas of the specification, from the stored bytes alone."""
    weight = checkpoint.get(f"{name}.weight")
    if f"{name}.scale" not in checkpoint:
        return weight.double()
    scale = 2.0 ** (checkpoint.get(f"{name}.scale").view(torch.uint8).double() - 127)
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8)
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        return torch.tensor(E2M1, dtype=torch.float64)[pairs.long()] * scale.repeat_interleave(32, 1)
    wide = scale.repeat_interleave(32, 1)[:, : weight.shape[1]]
    if scale.shape[0] != weight.shape[0]:
        wide = wide.repeat_interleave(32, 0)[: weight.shape[0]]
    return weight.double() * wide


def test_projections_have_the_stored_values(checkpoint: Checkpoint, weights: ModelWeights) -> None:
    layer = weights.layers[2]
    for name in ("wq_a", "wq_b", "wkv", "wo_b"):
        assert torch.equal(values(getattr(layer.attn, name)), stored(checkpoint, f"layers.2.attn.{name}")), name
    assert layer.indexer is not None
    assert torch.equal(values(layer.indexer.wq_b), stored(checkpoint, "layers.2.attn.indexer.wq_b"))
    assert torch.equal(values(layer.ffn.shared_w2), stored(checkpoint, "layers.2.ffn.shared_experts.w2"))


def test_the_grouped_output_projection_is_cut_by_group(
    checkpoint: Checkpoint, config: ModelConfig, weights: ModelWeights
) -> None:
    text = config.text
    shape = (text.o_groups, text.o_lora_rank, text.group_width)
    wo_a = weights.layers[0].attn.wo_a
    assert tuple(wo_a.shape) == shape
    assert torch.equal(values(wo_a), stored(checkpoint, "layers.0.attn.wo_a").reshape(shape))


def test_experts_are_stacked_with_gate_rows_above_up_rows(
    checkpoint: Checkpoint, config: ModelConfig, weights: ModelWeights
) -> None:
    width, hidden = config.text.moe_intermediate_size, config.text.hidden_size
    ffn = weights.layers[3].ffn
    assert tuple(ffn.w13.shape) == (config.text.n_routed_experts, 2 * width, hidden)
    assert tuple(ffn.w2.shape) == (config.text.n_routed_experts, hidden, width)
    for expert in range(config.text.n_routed_experts):
        name = f"layers.3.ffn.experts.{expert}"
        assert torch.equal(values(ffn.w13)[expert, :width], stored(checkpoint, f"{name}.w1"))
        assert torch.equal(values(ffn.w13)[expert, width:], stored(checkpoint, f"{name}.w3"))
        assert torch.equal(values(ffn.w2)[expert], stored(checkpoint, f"{name}.w2"))
    assert torch.equal(values(ffn.shared_w13)[:width], stored(checkpoint, "layers.3.ffn.shared_experts.w1"))
    assert torch.equal(values(ffn.shared_w13)[width:], stored(checkpoint, "layers.3.ffn.shared_experts.w3"))
    if isinstance(ffn.w13, QTensor):
        assert ffn.w13.fmt == "mxfp4"
        assert ffn.w13.scale.shape == (config.text.n_routed_experts, 2 * width, hidden // 32)


def test_only_layers_that_own_something_have_it(config: ModelConfig, weights: ModelWeights) -> None:
    text = config.text
    for i, layer in enumerate(weights.layers):
        assert (layer.compressor is not None) == (layer.index_keys is not None) == text.is_kv_source(i)
        assert (layer.indexer is not None) == text.is_index_source(i)
        assert (layer.engram is not None) == (i in text.engram_layer_ids)
        if layer.compressor is not None:
            assert (layer.compressor.wgate is not None) == (text.ratio_of(i) > 1)


def test_small_statistics_are_float32_and_plain_weights_keep_their_type(weights: ModelWeights) -> None:
    layer = weights.layers[0]
    for tensor in (layer.hc_attn.fn, layer.hc_ffn.base, layer.hc_ffn.scale, layer.attn.attn_sink, layer.ffn.bias):
        assert tensor.dtype == torch.float32
    assert weights.embed.dtype == layer.attn_norm.dtype == layer.ffn.gate.dtype == torch.bfloat16
    assert weights.vision is not None
    assert weights.vision["vision.norm.weight"].dtype == torch.float32


def test_float32_activations_widen_plain_weights_exactly(
    checkpoint: Checkpoint, config: ModelConfig, weights: ModelWeights
) -> None:
    wide = load_weights(checkpoint, config, dtype=torch.float32)
    assert wide.embed.dtype == torch.float32
    assert torch.equal(wide.embed, weights.embed.float())
    assert torch.equal(values(wide.layers[0].ffn.w13), values(weights.layers[0].ffn.w13))


def test_draft_blocks_are_ordinary_layers_with_heads(
    checkpoint: Checkpoint, config: ModelConfig, weights: ModelWeights
) -> None:
    draft, text = weights.draft, config.text
    assert draft is not None
    assert len(draft.layers) == text.num_nextn_predict_layers
    assert draft.layers[0].ffn.gate.shape[0] == text.dspark_n_routed_experts
    assert draft.layers[0].compressor is None
    assert torch.equal(values(draft.main_proj), stored(checkpoint, "mtp.0.main_proj"))
    assert draft.markov_embed.shape == draft.markov_head.shape == (text.vocab_size, text.dspark_markov_rank)
    assert draft.confidence_proj.shape == (1, text.hidden_size + text.dspark_markov_rank)


def test_draft_and_vision_are_skipped_by_choice(checkpoint: Checkpoint, config: ModelConfig) -> None:
    weights = load_weights(checkpoint, config, draft=False, vision=False)
    assert weights.draft is None
    assert weights.vision is None


def test_all_image_tensors_are_loaded_by_name(config: ModelConfig, weights: ModelWeights) -> None:
    assert weights.vision is not None
    names = [name for name, spec in expected_tensors(config).items() if spec.part == "vision"]
    assert list(weights.vision) == names
    assert {"image_start", "image_end", "image_newline", "aligner.w2.bias"} <= set(names)


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc/self/maps to see what is mapped")
def test_an_engram_table_may_stay_in_its_file(
    checkpoint: Checkpoint, config: ModelConfig, weights: ModelWeights
) -> None:
    mapped = load_weights(checkpoint, config, engram="mmap").layers[1].engram
    copied = weights.layers[1].engram
    assert mapped is not None and copied is not None
    assert torch.equal(values(mapped.table), stored(checkpoint, "layers.1.engram.embed"))
    assert torch.equal(values(mapped.table), values(copied.table))
    data = mapped.table.data if isinstance(mapped.table, QTensor) else mapped.table
    maps = [line.split() for line in MAPS.read_text().splitlines()]
    spans = {tuple(int(end, 16) for end in m[0].split("-")): m[-1] for m in maps if m[-1].endswith(".safetensors")}
    assert any(low <= data.data_ptr() < high for low, high in spans)


def test_progress_counts_every_tensor_that_is_loaded(checkpoint: Checkpoint, config: ModelConfig) -> None:
    seen: list[tuple[int, int]] = []
    load_weights(checkpoint, config, draft=False, progress=lambda done, total: seen.append((done, total)))
    want = sum(spec.part != "draft" for spec in expected_tensors(config).values())
    assert seen[-1] == (want, want)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == config.text.num_layers + 1


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc/self/maps to see what is mapped")
def test_no_file_stays_mapped_after_a_load(checkpoint: Checkpoint, config: ModelConfig) -> None:
    weights = load_weights(checkpoint, config)
    assert str(checkpoint.path) not in MAPS.read_text()
    assert weights.embed.isfinite().all()
