"""Names and formats of everything V4.1 keeps between steps."""

from __future__ import annotations

from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.interface import CacheSpec, RecordSpec, ReplaySpec, StateSpec
from deepinfer.ops.formats import CacheFormat, CacheKind


def window_name(layer: int) -> str:
    """Window records of a layer."""
    return f"layers.{layer}.window"


def draft_window_name(block: int) -> str:
    """Window records of a draft block: keys made of the target's features."""
    return f"mtp.{block}.window"


def kv_name(source: int) -> str:
    """Compressed records of a KV source layer."""
    return f"layers.{source}.kv"


def index_name(source: int) -> str:
    """Index keys of a KV source layer."""
    return f"layers.{source}.index_k"


def state_name(source: int) -> str:
    """Open group of a KV source layer with ratio above 1."""
    return f"layers.{source}.open_group"


def cache_spec(config: TextConfig, kv_rounding: bool, draft: bool = False) -> CacheSpec:
    """What the model stores, in quantised records or (kv_rounding off) in float32.

    Args:
        config: of the model.
        kv_rounding: quantised records.
        draft: the draft blocks are loaded. Their context is the whole window before the newest token, so that token
            sees one position more than a row of the backbone does.
    """

    def record(kind: CacheKind, dim: int) -> CacheFormat:
        return CacheFormat(kind if kv_rounding else "f32", dim)

    blocks, states = [], []
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        blocks.append(RecordSpec(kv_name(source), record("fp4", config.head_dim), ratio))
        blocks.append(RecordSpec(index_name(source), record("index", config.index_head_dim), ratio))
        if ratio > 1:
            states.append(StateSpec(state_name(source), ratio, config.head_dim))
    names = [window_name(layer) for layer in range(config.num_hidden_layers)]
    if draft:
        names += [draft_window_name(block) for block in range(config.num_nextn_predict_layers)]
    window = config.sliding_window
    return CacheSpec(
        block_records=tuple(blocks),
        window_records=tuple(RecordSpec(name, record("fp8", config.head_dim)) for name in names),
        states=tuple(states),
        window=window + (1 if draft else 0),
        ngram=config.engram_max_ngram_size if config.engram_layer_ids else 1,
        replay=ReplaySpec(window, window + 2 * (config.dspark_block_size + 1)) if config.splits_prompts else None,
    )
