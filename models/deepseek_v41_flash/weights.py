"""Weights as the forward pass wants them: storage formats turned into canonical tensors, fused and stacked.

FP8 blocks of 32x32 become mxfp8 (one scale per row and 32 columns: the same values), routed experts one stacked mxfp4
tensor per matrix, gate and up projections one matrix. Plain weights keep their stored type. Everything is copied once
into memory of its own, layer by layer, so that neither alignment nor a changed file can alter results; Engram tables
may stay in their file.

Source: DeepSeek-V4.1-Flash (model specification, sections 8.1, 8.4 and 10).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deepinfer.models.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41_flash.config import ModelConfig, TextConfig
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors, loaded_parts, part_of
from deepinfer.ops.formats import QTensor

Weight = Tensor | QTensor
Progress = Callable[[int, int], None]
"""Called with the number of tensors read so far, and of all that will be."""


@dataclass(frozen=True)
class HyperConnection:
    """Coefficients of one sublayer: fn [mix, M * H], base [mix], scale [3]; float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """The attention set that every block has; `wo_a` is [groups, rank, group width]."""

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    wo_a: Weight
    wo_b: Weight
    attn_sink: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """A KV source's compressor; `wgate` is None at ratio 1."""

    wkv: Tensor
    wgate: Tensor | None
    norm: Tensor


@dataclass(frozen=True)
class IndexKeyWeights:
    """A KV source's index keys."""

    wk: Tensor
    k_norm: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """An index source's queries and head weights."""

    wq_b: Weight
    weights_proj: Tensor


@dataclass(frozen=True)
class MoEWeights:
    """Router and experts: `w13` [E, 2I, K] is gate rows above up rows, `w2` [E, H, I]; the shared expert alike."""

    gate: Tensor
    bias: Tensor
    bias_vl: Tensor
    w13: Weight
    w2: Weight
    shared_w13: Weight
    shared_w2: Weight


@dataclass(frozen=True)
class EngramWeights:
    """An Engram layer; `table` [R, W] is on the CPU and may lie in its file."""

    table: Weight
    wkv: Weight
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One block of the backbone or of the draft."""

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn: AttentionWeights
    compressor: CompressorWeights | None
    index_keys: IndexKeyWeights | None
    indexer: IndexerWeights | None
    ffn: MoEWeights
    engram: EngramWeights | None


@dataclass(frozen=True)
class DraftWeights:
    """The draft blocks and their heads."""

    layers: list[LayerWeights]
    main_proj: Weight
    main_norm: Tensor
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence_proj: Tensor


@dataclass(frozen=True)
class ModelWeights:
    """A whole model.

    Attributes:
        vision: the image tower, aligner and `image_start`, `image_end`, `image_newline` by their names in the
            checkpoint; None when skipped or absent. `draft` alike.
    """

    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: list[LayerWeights]
    draft: DraftWeights | None = None
    vision: dict[str, Tensor] | None = None


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    draft: bool = True,
    vision: bool = True,
    engram: Literal["memory", "mmap"] = "memory",
    progress: Progress | None = None,
) -> ModelWeights:
    """Check a checkpoint against its configuration, then read it.

    Args:
        checkpoint: an opened folder.
        config: its configuration.
        device: where weights go. Engram tables stay on the CPU.
        dtype: type of activations. With float32, plain weights are widened once (exactly) instead of in every product;
            otherwise they keep their stored type, and are never narrowed.
        draft: read the draft blocks, if the model has any.
        vision: read the image tower, if the model has one.
        engram: "mmap" leaves Engram tables in their files.
        progress: told how many tensors are read, once per block.

    Raises:
        CheckpointError: tensors are missing, unexpected, mis-shaped or of the wrong dtype; nothing was read.
    """
    expected = expected_tensors(config)
    parts = loaded_parts(config, draft=draft, vision=vision)
    checkpoint.validate(expected, parts, skipped=lambda name: part_of(name) not in parts)
    total = sum(spec.part in parts for spec in expected.values())
    widen = torch.float32 if dtype == torch.float32 else None
    loader = _Loader(checkpoint, config.text, torch.device(device), widen, engram == "mmap", progress, total)
    text = config.text
    embed = loader.plain("embed.weight")
    layers = [loader.layer(f"layers.{i}.", i) for i in range(text.num_layers)]
    norm, head = loader.plain("norm.weight"), loader.plain("head.weight")
    drafted = loader.draft() if "draft" in parts else None
    names = [name for name, spec in expected.items() if spec.part == "vision"]
    images = {name: loader.plain(name) for name in names} if "vision" in parts else None
    loader.finish_block()
    return ModelWeights(embed, head, norm, layers, drafted, images)


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        text: TextConfig,
        device: torch.device,
        widen: torch.dtype | None,
        mmap_tables: bool,
        progress: Progress | None,
        total: int,
    ) -> None:
        self.checkpoint = checkpoint
        self.text = text
        self.device = device
        self.widen = widen
        self.mmap_tables = mmap_tables
        self.progress = progress
        self.total = total
        self.done = 0

    def layer(self, prefix: str, layer: int) -> LayerWeights:
        text = self.text
        attn, source, chooser = f"{prefix}attn.", text.is_kv_source(layer), text.is_index_source(layer)
        weights = LayerWeights(
            attn_norm=self.plain(f"{prefix}attn_norm.weight"),
            ffn_norm=self.plain(f"{prefix}ffn_norm.weight"),
            hc_attn=self._hyper(f"{prefix}hc_attn_"),
            hc_ffn=self._hyper(f"{prefix}hc_ffn_"),
            attn=self._attention(attn),
            compressor=self._compressor(f"{attn}compressor.", text.ratio_of(layer) > 1) if source else None,
            index_keys=IndexKeyWeights(
                self.plain(f"{attn}indexer.wk.weight"), self.plain(f"{attn}indexer.k_norm.weight")
            )
            if source
            else None,
            indexer=IndexerWeights(self.dense(f"{attn}indexer.wq_b"), self.plain(f"{attn}indexer.weights_proj.weight"))
            if chooser
            else None,
            ffn=self._moe(f"{prefix}ffn."),
            engram=self._engram(f"{prefix}engram.") if layer in text.engram_layer_ids else None,
        )
        self.finish_block()
        return weights

    def draft(self) -> DraftWeights:
        count = self.text.num_nextn_predict_layers
        first, last = "mtp.0.", f"mtp.{count - 1}."
        return DraftWeights(
            layers=[self.layer(f"mtp.{i}.", self.text.num_layers + i) for i in range(count)],
            main_proj=self.dense(f"{first}main_proj"),
            main_norm=self.plain(f"{first}main_norm.weight"),
            norm=self.plain(f"{last}norm.weight"),
            markov_embed=self.plain(f"{last}markov_head.embed.weight"),
            markov_head=self.plain(f"{last}markov_head.head.weight"),
            confidence_proj=self.plain(f"{last}confidence_head.proj.weight"),
        )

    def plain(self, name: str) -> Tensor:
        """A tensor that is not quantised, in its stored type or widened."""
        return self._read(name).to(device=self.device, dtype=self.widen, copy=True)

    def fp32(self, name: str) -> Tensor:
        return self._read(name).to(device=self.device, dtype=torch.float32, copy=True)

    def dense(self, name: str) -> Weight:
        """A projection: [N, K] mxfp8 of its 32x32 blocks, or plain."""
        if f"{name}.scale" not in self.checkpoint:
            return self.plain(f"{name}.weight")
        rows = self.checkpoint.tensors[f"{name}.weight"].shape[0]
        codes = self._bytes(f"{name}.weight").to(self.device, copy=True)
        scale = self._bytes(f"{name}.scale").to(self.device, copy=True)
        return QTensor(codes, scale.repeat_interleave(32, dim=0)[:rows].contiguous(), "mxfp8")

    def finish_block(self) -> None:
        """Give file pages back and report how far the load is."""
        self.checkpoint.release()
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _attention(self, attn: str) -> AttentionWeights:
        wo_a = self.dense(f"{attn}wo_a")
        shape = (self.text.o_groups, self.text.o_lora_rank, -1)
        if isinstance(wo_a, QTensor):
            wo_a = QTensor(wo_a.data.view(shape), wo_a.scale.view(shape), wo_a.fmt)
        else:
            wo_a = wo_a.view(shape)
        return AttentionWeights(
            wq_a=self.dense(f"{attn}wq_a"),
            q_norm=self.plain(f"{attn}q_norm.weight"),
            wq_b=self.dense(f"{attn}wq_b"),
            wkv=self.dense(f"{attn}wkv"),
            kv_norm=self.plain(f"{attn}kv_norm.weight"),
            wo_a=wo_a,
            wo_b=self.dense(f"{attn}wo_b"),
            attn_sink=self.fp32(f"{attn}attn_sink"),
        )

    def _hyper(self, prefix: str) -> HyperConnection:
        return HyperConnection(self.fp32(f"{prefix}fn"), self.fp32(f"{prefix}base"), self.fp32(f"{prefix}scale"))

    def _compressor(self, prefix: str, gated: bool) -> CompressorWeights:
        return CompressorWeights(
            wkv=self.plain(f"{prefix}wkv.weight"),
            wgate=self.plain(f"{prefix}wgate.weight") if gated else None,
            norm=self.plain(f"{prefix}norm.weight"),
        )

    def _engram(self, prefix: str) -> EngramWeights:
        return EngramWeights(
            table=self._table(f"{prefix}embed"),
            wkv=self.dense(f"{prefix}wkv"),
            q_weight=self.plain(f"{prefix}q_weight"),
            k_weight=self.plain(f"{prefix}k_weight"),
        )

    def _table(self, name: str) -> Weight:
        copy = not self.mmap_tables
        if f"{name}.scale" not in self.checkpoint:
            return self._read(f"{name}.weight").clone() if copy else self._read(f"{name}.weight")
        codes, scale = self._bytes(f"{name}.weight"), self._bytes(f"{name}.scale")
        return QTensor(codes.clone(), scale.clone(), "mxfp8") if copy else QTensor(codes, scale, "mxfp8")

    def _moe(self, ffn: str) -> MoEWeights:
        gate = self.plain(f"{ffn}gate.weight")
        experts = [f"{ffn}experts.{e}." for e in range(gate.shape[0])]
        shared = f"{ffn}shared_experts."
        shared_gate, shared_up = self.dense(f"{shared}w1"), self.dense(f"{shared}w3")
        return MoEWeights(
            gate=gate,
            bias=self.fp32(f"{ffn}gate.bias"),
            bias_vl=self.fp32(f"{ffn}gate.bias_vl"),
            w13=self._stack(experts, ("w1", "w3")),
            w2=self._stack(experts, ("w2",)),
            shared_w13=_above(shared_gate, shared_up),
            shared_w2=self.dense(f"{shared}w2"),
        )

    def _stack(self, experts: list[str], matrices: tuple[str, ...]) -> Weight:
        """[E, rows of all `matrices`, K] of the experts' matrices, filled in place so that nothing is held twice."""
        sample = f"{experts[0]}{matrices[0]}"
        if f"{sample}.scale" not in self.checkpoint:
            return self._fill(experts, matrices, "weight", self._read, self.widen)
        codes = self._fill(experts, matrices, "weight", self._bytes, None)
        return QTensor(codes, self._fill(experts, matrices, "scale", self._bytes, None), "mxfp4")

    def _fill(
        self,
        experts: list[str],
        matrices: tuple[str, ...],
        suffix: str,
        read: Callable[[str], Tensor],
        dtype: torch.dtype | None,
    ) -> Tensor:
        out: Tensor | None = None
        for e, expert in enumerate(experts):
            for m, matrix in enumerate(matrices):
                piece = read(f"{expert}{matrix}.{suffix}")
                rows, columns = piece.shape
                if out is None:
                    shape = (len(experts), rows * len(matrices), columns)
                    out = torch.empty(shape, dtype=dtype or piece.dtype, device=self.device)
                out[e, m * rows : (m + 1) * rows].copy_(piece)
        assert out is not None
        return out

    def _bytes(self, name: str) -> Tensor:
        return self._read(name).view(torch.uint8)

    def _read(self, name: str) -> Tensor:
        self.done += 1
        return self.checkpoint.get(name)


def _above(upper: Weight, lower: Weight) -> Weight:
    if isinstance(upper, QTensor) and isinstance(lower, QTensor):
        data, scale = torch.cat((upper.data, lower.data)), torch.cat((upper.scale, lower.scale))
        return QTensor(data, scale, upper.fmt)
    assert isinstance(upper, Tensor) and isinstance(lower, Tensor)
    return torch.cat((upper, lower))
