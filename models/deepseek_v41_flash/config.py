"""The configuration of a DeepSeek-V4.1 checkpoint: typed, complete, and checked before anything is allocated.

Field names are those of `config.json`. Which layer owns, shares or re-chooses compressed KV is answered here, so the
forward pass holds no schedule arithmetic. Sizes of caches and memory are `memory_plan.py`'s.

Source: DeepSeek-V4.1-Flash `config.json` (model specification, sections 2, 6.7 and 15).
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deepinfer.models.config_file import CONFIG_FILE, read_config
from deepinfer.models.deepseek_v41_flash.config_checks import MODEL_CHECKS, QUANT_CHECKS, TEXT_CHECKS, VISION_CHECKS
from deepinfer.models.deepseek_v41_flash.config_fields import (
    Problem,
    count,
    ids,
    only,
    read_section,
    real,
    run_checks,
    show,
    unused,
)
from deepinfer.models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN without a magnitude factor; used with `compress_rope_theta` only."""

    rope_type: str = only("yarn")
    factor: float = real()
    beta_fast: float = real()
    beta_slow: float = real()
    original_max_position_embeddings: int = count()


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The backbone, its Engram layers and its draft blocks."""

    model_type: str = only("deepseek_v41_text")
    vocab_size: int = count()
    hidden_size: int = count()
    num_hidden_layers: int = count(high=4096)
    num_attention_heads: int = count()
    num_key_value_heads: int = only(1)
    head_dim: int = count()
    qk_rope_head_dim: int = count(low=2)
    q_lora_rank: int = count()
    o_groups: int = count()
    o_lora_rank: int = count()
    sliding_window: int = count()
    rope_theta: float = real()
    compress_rope_theta: float = real()
    rope_scaling: YarnScaling
    max_position_embeddings: int = count()

    compress_ratios: tuple[int, ...] = ids()
    kv_source_layer_ids: tuple[int, ...] = ids()
    index_source_layer_ids: tuple[int, ...] = ids()
    index_k_source_layer_ids: tuple[int, ...] | None = ids(default=None)
    index_n_heads: int = count()
    index_head_dim: int = count()
    index_topk: int = count()
    candidate_source_layer_id: int = count(low=-1, default=-1)
    candidate_topk_blocks: int = count(low=0, default=0)
    candidate_block_size: int = count(low=0, default=0)
    use_fp4_sparse_kv: bool = only(True)

    hc_mult: int = count(high=16, default=4)
    hc_sinkhorn_iters: int = count(high=1000, default=20)
    hc_eps: float = real(default=1e-6)
    hc_shifted: bool = only(True)
    rms_norm_eps: float = real(default=1e-20)
    hidden_act: str = only("silu")
    attention_bias: bool = only(False)
    attention_dropout: float = only(0.0, 0)
    tie_word_embeddings: bool = only(False)

    swiglu_limit: float = real()
    moe_intermediate_size: int = count()
    n_routed_experts: int = count(high=65536)
    num_experts_per_tok: int = count()
    n_shared_experts: int = only(1)
    scoring_func: str = only("sqrtsoftplus")
    topk_method: str = only("noaux_tc")
    norm_topk_prob: bool = only(True)
    routed_scaling_factor: float = real()

    engram_layer_ids: tuple[int, ...] = ids(default=())
    engram_num_embeddings: tuple[int, ...] = ids(default=())
    engram_max_ngram_size: int = count(low=0, high=16, default=0)
    engram_vocab_size: int = count(low=0, default=0)
    engram_n_heads: int = count(low=0, high=256, default=0)
    engram_head_dim: int = count(low=0, default=0)
    engram_pad_token_id: int = count(low=0, default=2)
    engram_compressed_vocab_size: int = count(low=0, default=0)

    num_nextn_predict_layers: int = count(low=0, high=64, default=0)
    dspark_block_size: int = count(low=0, high=1024, default=0)
    dspark_noise_token_id: int = count(low=0, default=0)
    dspark_target_layer_ids: tuple[int, ...] = ids(default=())
    dspark_target_attn_input: bool = only(True)
    dspark_markov_rank: int = count(low=0, default=0)
    dspark_n_routed_experts: int = count(low=0, high=65536, default=0)
    dspark_num_experts_per_tok: int = count(low=0, default=0)

    initializer_range: float | None = unused()
    use_cache: bool | None = unused()

    @property
    def num_layers(self) -> int:
        """Backbone layers, draft blocks not counted."""
        return self.num_hidden_layers

    @property
    def has_draft(self) -> bool:
        """Whether the configuration has draft blocks."""
        return self.num_nextn_predict_layers > 0

    @property
    def first_decoder_layer(self) -> int:
        """The first layer with ratio 1, from which on a prompt needs its last window only; `num_layers` without one."""
        ratios = self.compress_ratios[: self.num_layers]
        return ratios.index(1) if 1 in ratios else self.num_layers

    @property
    def splits_prompts(self) -> bool:
        """Whether the layers from `first_decoder_layer` on read nothing of early rows but what that layer stores.

        They must not have Engram or compressed KV of their own.
        """
        first = self.first_decoder_layer
        sources = [*self.kv_source_layer_ids, *(layer + 1 for layer in self.engram_layer_ids)]
        return first < self.num_layers and max(sources, default=0) <= first

    @property
    def ratios(self) -> tuple[int, ...]:
        """Distinct compress ratios above 0, ascending."""
        return tuple(sorted({r for r in self.compress_ratios if r}))

    @property
    def group_width(self) -> int:
        """Columns of one group of the output projection's first half."""
        return self.num_attention_heads * self.head_dim // self.o_groups

    @property
    def mix_size(self) -> int:
        """Coefficients that one hyper-connection computes: read, write and stream-to-stream weights."""
        return self.hc_mult * (2 + self.hc_mult)

    @property
    def engram_columns(self) -> int:
        """Table rows per token and Engram layer."""
        return max(self.engram_max_ngram_size - 1, 0) * self.engram_n_heads

    def ratio_of(self, layer: int) -> int:
        """Tokens per compressed entry that a layer reads; 0 for a window-only layer."""
        return self.compress_ratios[layer]

    def kv_source_of(self, layer: int) -> int:
        """The layer whose compressed KV and index keys a layer reads.

        Raises:
            ValueError: the layer is window-only (its ratio is 0).
        """
        return self._source(self.kv_source_layer_ids, layer)

    def index_source_of(self, layer: int) -> int:
        """The layer whose selection of entries a layer uses.

        Raises:
            ValueError: the layer is window-only (its ratio is 0).
        """
        return self._source(self.index_source_layer_ids, layer)

    def is_kv_source(self, layer: int) -> bool:
        """Whether a layer owns a compressor and index keys."""
        return layer in self.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        """Whether a layer owns an indexer."""
        return layer in self.index_source_layer_ids

    def uses_candidates(self, layer: int) -> bool:
        """Whether a layer chooses within the candidate pool; the layer that makes the pool does not."""
        return self.is_index_source(layer) and 0 <= self.candidate_source_layer_id < layer

    def _source(self, sources: tuple[int, ...], layer: int) -> int:
        if self.compress_ratios[layer] == 0:
            raise ValueError(f"layer {layer} sees its window only; it reads no compressed KV")
        return sources[bisect_right(sources, layer) - 1]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The image tower and its aligner."""

    model_type: str = only("deepseek_v41_vision")
    num_hidden_layers: int = count(high=4096)
    hidden_size: int = count()
    num_attention_heads: int = count()
    intermediate_size: int = count()
    patch_size: int = count()
    rope_theta: float = real()
    downsample_ratio: int = count()
    max_image_tokens: int = count()
    min_pixels: int = count()
    max_wh_ratio: float | None = real(default=None)


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """How weights are stored; the one scheme of the released checkpoint."""

    quant_method: str = only("fp8")
    activation_scheme: str = only("dynamic")
    weight_block_size: tuple[int, int] = only((32, 32))
    scale_fmt: str = only("ue8m0")
    expert_dtype: str = only("fp4")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole `config.json`.

    Attributes:
        text: the backbone.
        vision: the image tower; None for a checkpoint without one.
        quantization: how weights are stored; None for plain bf16 and fp32.
        eos_token_ids: from an integer or a list.
        unknown_fields: fields nobody here reads, with their section's name; shown by `deepinfer inspect`.
    """

    text: TextConfig
    vision: VisionConfig | None
    quantization: QuantConfig | None
    architectures: tuple[str, ...] = ("DeepseekV41ForCausalLM",)
    model_type: str = only("deepseek_v41")
    dtype: str = only("bfloat16", "float32")
    bos_token_id: int = count(low=0)
    eos_token_ids: tuple[int, ...]
    pad_token_id: int = count(low=0)
    image_token_id: int | None = count(low=0, default=None)
    tie_word_embeddings: bool = only(False)
    unknown_fields: tuple[str, ...] = ()

    @property
    def eos_token_id(self) -> int:
        """The first of `eos_token_ids`."""
        return self.eos_token_ids[0]

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Read and check the `config.json` of a checkpoint folder.

        Raises:
            ConfigError: the file is absent, is not JSON, or some fields are broken; all of them are named.
        """
        return cls.from_dict(read_config(path), where=str(Path(path) / CONFIG_FILE))

    @classmethod
    def from_dict(cls, data: Any, *, where: str = CONFIG_FILE) -> "ModelConfig":
        """Check a parsed `config.json`.

        Args:
            data: the JSON object.
            where: what messages call it.

        Raises:
            ConfigError: some fields are broken; all of them are named.
        """
        problems: list[Problem] = []
        values = read_section(cls, data, "", problems)
        if not isinstance(data, Mapping):
            raise ConfigError(where, [f"the file holds {show(data)}; it must hold a JSON object"])
        values["architectures"] = _architectures(data.get("architectures"), problems)
        values["eos_token_ids"] = _eos(data.get("eos_token_id"), problems)
        quant = _section(QuantConfig, data, "quantization_config", problems)
        text = _text(data.get("text_config"), problems)
        run_checks(TEXT_CHECKS if quant is None else TEXT_CHECKS + QUANT_CHECKS, text, "text_config.", problems)
        vision = _section(VisionConfig, data, "vision_config", problems)
        if vision is not None:
            run_checks(VISION_CHECKS, vision, "vision_config.", problems)
        known = {
            name: value for name, value in {**values, "vocab_size": text.get("vocab_size")}.items() if value is not None
        }
        run_checks(MODEL_CHECKS, known, "", problems)
        if vision is not None and values.get("image_token_id") is None and "image_token_id" not in dict(problems):
            problems.append(("image_token_id", "is absent; a checkpoint with a vision_config needs it"))
        if problems:
            raise ConfigError(where, [f"{name}: {what}" for name, what in problems])
        return cls(
            text=TextConfig(**text),
            vision=None if vision is None else VisionConfig(**vision),
            quantization=None if quant is None else QuantConfig(**quant),
            unknown_fields=_unknown(data),
            **values,
        )


def _text(raw: Any, problems: list[Problem]) -> dict[str, Any]:
    if raw is None:
        problems.append(("text_config", "is absent; it must be a JSON object"))
        return {}
    text = read_section(TextConfig, raw, "text_config.", problems)
    if isinstance(raw, Mapping):
        found = len(problems)
        scaling = read_section(YarnScaling, raw.get("rope_scaling"), "text_config.rope_scaling.", problems)
        if len(problems) == found:
            text["rope_scaling"] = YarnScaling(**scaling)
    return text


def _section(cls: type, data: Mapping[str, Any], name: str, problems: list[Problem]) -> dict[str, Any] | None:
    raw = data.get(name)
    return None if raw is None else read_section(cls, raw, f"{name}.", problems)


def _architectures(value: Any, problems: list[Problem]) -> tuple[str, ...]:
    want = "DeepseekV41ForCausalLM"
    if not isinstance(value, list) or value != [want]:
        problems.append(("architectures", f'{show(value)} is another model; it must be ["{want}"]'))
        return ()
    return (want,)


def _eos(value: Any, problems: list[Problem]) -> tuple[int, ...] | None:
    listed = value if isinstance(value, list) else [value]
    if not listed or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in listed):
        problems.append(("eos_token_id", f"{show(value)} is not allowed; it must be a token id or a list of them"))
        return None
    return tuple(listed)


def _unknown(data: Mapping[str, Any]) -> tuple[str, ...]:
    sections = {"text_config": TextConfig, "vision_config": VisionConfig, "quantization_config": QuantConfig}
    top = {"eos_token_id", "torch_dtype", "transformers_version", *sections, *(f.name for f in fields(ModelConfig))}
    found = [name for name in data if name not in top]
    for section, cls in sections.items():
        names = data.get(section)
        found += [f"{section}.{name}" for name in names or () if name not in {f.name for f in fields(cls)}]
    return tuple(found)
