"""Names, shapes and storage types of every tensor of a DeepSeek-V4.1 checkpoint, from its configuration.

Source: DeepSeek-V4.1-Flash (model specification, sections 8.4 and 10).
"""

from collections.abc import Iterator

from deepinfer.models.checkpoint import TensorSpec
from deepinfer.models.deepseek_v41_flash.config import ModelConfig, TextConfig, VisionConfig

PARTS = ("backbone", "engram", "draft", "vision")

_PLAIN = ("BF16", "F32")
_FP32 = ("F32",)
_FP8 = ("F8_E4M3",)
_FP4 = ("I8", "U8")
_SCALE = ("F8_E8M0", "U8")

_PART_PREFIXES = {"mtp.": "draft", "vision.": "vision", "aligner.": "vision", "image_": "vision"}

Named = Iterator[tuple[str, TensorSpec]]


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint, in the order of the forward pass; 96,085 for the released configuration.

    A checkpoint without `quantization_config` has the same names without the scales.
    """
    return dict(_Expansion(config).all())


def part_of(name: str) -> str:
    """The part that a tensor name belongs to, known or not."""
    for prefix, part in _PART_PREFIXES.items():
        if name.startswith(prefix):
            return part
    return "engram" if ".engram." in name else "backbone"


def loaded_parts(config: ModelConfig, *, draft: bool, vision: bool) -> frozenset[str]:
    """The parts that a load with these choices reads."""
    parts = {"backbone", "engram"}
    if draft and config.text.has_draft:
        parts.add("draft")
    if vision and config.vision is not None:
        parts.add("vision")
    return frozenset(parts)


class _Expansion:
    def __init__(self, config: ModelConfig) -> None:
        self.text: TextConfig = config.text
        self.vision: VisionConfig | None = config.vision
        self.quantised = config.quantization is not None

    def all(self) -> Named:
        text = self.text
        yield from self._plain("embed.weight", text.vocab_size, text.hidden_size)
        for layer in range(text.num_layers):
            prefix = f"layers.{layer}."
            if layer in text.engram_layer_ids:
                yield from self._engram(prefix, text.engram_num_embeddings[text.engram_layer_ids.index(layer)])
            yield from self._block(prefix, layer, text.n_routed_experts)
        yield from self._plain("norm.weight", text.hidden_size)
        yield from self._plain("head.weight", text.vocab_size, text.hidden_size)
        yield from self._draft()
        if self.vision is not None:
            yield from self._vision(self.vision)

    def _block(self, prefix: str, layer: int, experts: int) -> Named:
        text = self.text
        hidden, heads, width = text.hidden_size, text.num_attention_heads, text.head_dim
        yield from self._plain(f"{prefix}attn_norm.weight", hidden)
        yield from self._plain(f"{prefix}ffn_norm.weight", hidden)
        for sublayer in ("attn", "ffn"):
            yield from self._fp32(f"{prefix}hc_{sublayer}_fn", text.mix_size, text.hc_mult * hidden)
            yield from self._fp32(f"{prefix}hc_{sublayer}_base", text.mix_size)
            yield from self._fp32(f"{prefix}hc_{sublayer}_scale", 3)
        attn = f"{prefix}attn."
        yield from self._dense(f"{attn}wq_a", text.q_lora_rank, hidden)
        yield from self._plain(f"{attn}q_norm.weight", text.q_lora_rank)
        yield from self._dense(f"{attn}wq_b", heads * width, text.q_lora_rank)
        yield from self._dense(f"{attn}wkv", width, hidden)
        yield from self._plain(f"{attn}kv_norm.weight", width)
        yield from self._dense(f"{attn}wo_a", text.o_groups * text.o_lora_rank, text.group_width)
        yield from self._dense(f"{attn}wo_b", hidden, text.o_groups * text.o_lora_rank)
        yield from self._fp32(f"{attn}attn_sink", heads)
        if text.is_kv_source(layer):
            yield from self._plain(f"{attn}compressor.wkv.weight", width, hidden)
            if text.ratio_of(layer) > 1:
                yield from self._plain(f"{attn}compressor.wgate.weight", width, hidden)
            yield from self._plain(f"{attn}compressor.norm.weight", width)
            yield from self._plain(f"{attn}indexer.wk.weight", text.index_head_dim, width)
            yield from self._plain(f"{attn}indexer.k_norm.weight", text.index_head_dim)
        if text.is_index_source(layer):
            yield from self._dense(f"{attn}indexer.wq_b", text.index_n_heads * text.index_head_dim, text.q_lora_rank)
            yield from self._plain(f"{attn}indexer.weights_proj.weight", text.index_n_heads, hidden)
        yield from self._experts(f"{prefix}ffn.", experts)

    def _experts(self, ffn: str, experts: int) -> Named:
        hidden, width = self.text.hidden_size, self.text.moe_intermediate_size
        yield from self._plain(f"{ffn}gate.weight", experts, hidden)
        yield from self._fp32(f"{ffn}gate.bias", experts)
        yield from self._fp32(f"{ffn}gate.bias_vl", experts)
        shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
        for matrix, shape in shapes.items():
            yield from self._dense(f"{ffn}shared_experts.{matrix}", *shape)
        for expert in range(experts):
            for matrix, (rows, columns) in shapes.items():
                name = f"{ffn}experts.{expert}.{matrix}"
                if self.quantised:
                    yield self._spec(f"{name}.weight", (rows, columns // 2), _FP4)
                    yield self._spec(f"{name}.scale", (rows, columns // 32), _SCALE)
                else:
                    yield from self._plain(f"{name}.weight", rows, columns)

    def _engram(self, prefix: str, rows: int) -> Named:
        text, engram = self.text, f"{prefix}engram."
        width = text.engram_head_dim
        if self.quantised:
            yield self._spec(f"{engram}embed.weight", (rows, width), _FP8)
            yield self._spec(f"{engram}embed.scale", (rows, width // 32), _SCALE)
        else:
            yield from self._plain(f"{engram}embed.weight", rows, width)
        yield from self._dense(f"{engram}wkv", (text.hc_mult + 1) * text.hidden_size, text.engram_columns * width)
        yield from self._plain(f"{engram}q_weight", text.hc_mult, text.hidden_size)
        yield from self._plain(f"{engram}k_weight", text.hc_mult, text.hidden_size)

    def _draft(self) -> Named:
        text = self.text
        hidden, last = text.hidden_size, text.num_nextn_predict_layers - 1
        for block in range(text.num_nextn_predict_layers):
            prefix = f"mtp.{block}."
            if block == 0:
                yield from self._dense(f"{prefix}main_proj", hidden, hidden * len(text.dspark_target_layer_ids))
                yield from self._plain(f"{prefix}main_norm.weight", hidden)
            yield from self._block(prefix, text.num_layers + block, text.dspark_n_routed_experts)
            if block == last:
                yield from self._plain(f"{prefix}norm.weight", hidden)
                yield from self._plain(f"{prefix}markov_head.embed.weight", text.vocab_size, text.dspark_markov_rank)
                yield from self._plain(f"{prefix}markov_head.head.weight", text.vocab_size, text.dspark_markov_rank)
                yield from self._plain(f"{prefix}confidence_head.proj.weight", 1, hidden + text.dspark_markov_rank)

    def _vision(self, vision: VisionConfig) -> Named:
        hidden, width, mlp = self.text.hidden_size, vision.hidden_size, vision.intermediate_size
        for token in ("image_start", "image_end", "image_newline"):
            yield from self._plain(token, hidden)
        yield from self._affine("vision.patch_embed.proj", width, 3 * vision.patch_size**2)
        for block in range(vision.num_hidden_layers):
            prefix = f"vision.blocks.{block}."
            yield from self._plain(f"{prefix}norm1.weight", width)
            yield from self._affine(f"{prefix}attn.wqkv", 3 * width, width)
            yield from self._affine(f"{prefix}attn.wo", width, width)
            yield from self._plain(f"{prefix}norm2.weight", width)
            yield from self._plain(f"{prefix}mlp.w1.weight", 2 * mlp, width)
            yield from self._plain(f"{prefix}mlp.w2.weight", width, mlp)
        yield from self._plain("vision.norm.weight", width)
        yield from self._affine("aligner.w1", hidden, width * vision.downsample_ratio**2)
        yield from self._affine("aligner.w2", hidden, hidden)

    def _dense(self, name: str, rows: int, columns: int) -> Named:
        if self.quantised:
            yield self._spec(f"{name}.weight", (rows, columns), _FP8)
            yield self._spec(f"{name}.scale", (-(-rows // 32), -(-columns // 32)), _SCALE)
        else:
            yield from self._plain(f"{name}.weight", rows, columns)

    def _affine(self, name: str, rows: int, columns: int) -> Named:
        yield from self._plain(f"{name}.weight", rows, columns)
        yield from self._plain(f"{name}.bias", rows)

    def _plain(self, name: str, *shape: int) -> Named:
        yield self._spec(name, shape, _PLAIN)

    def _fp32(self, name: str, *shape: int) -> Named:
        yield self._spec(name, shape, _FP32)

    def _spec(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> tuple[str, TensorSpec]:
        return name, TensorSpec(shape, dtypes, part_of(name))
