"""Conditions between the fields of a DeepSeek-V4.1 configuration.

Each check names the fields it reads as its parameters and yields (field, what it is and what would be right). A check
is skipped while a field it reads is already broken, so one fault gives one line.

Source: DeepSeek-V4.1-Flash (model specification, sections 2, 6.7, 11.2 and 15).
"""

from collections.abc import Iterator

from deepinfer.models.deepseek_v41_flash.config_fields import Check, Problem, show
from deepinfer.models.deepseek_v41_flash.engram_tables import engram_primes

_INT32_MAX = 2**31 - 1


def _ratios(
    compress_ratios: tuple[int, ...], num_hidden_layers: int, num_nextn_predict_layers: int
) -> Iterator[Problem]:
    want = num_hidden_layers + num_nextn_predict_layers
    if len(compress_ratios) != want:
        yield (
            "compress_ratios",
            f"has {len(compress_ratios)} entries; it needs one for each of {num_hidden_layers} layers and "
            f"{num_nextn_predict_layers} draft layers, {want} in all",
        )
    elif any(compress_ratios[num_hidden_layers:]):
        yield (
            "compress_ratios",
            f"draft layers have ratios {show(compress_ratios[num_hidden_layers:])}; they see their window only, so 0",
        )


def _ascending(name: str, ids: tuple[int, ...], limit: int) -> Iterator[Problem]:
    if list(ids) != sorted(set(ids)):
        yield name, f"{show(ids)} is not in ascending order without repeats; write {show(sorted(set(ids)))}"
    elif ids and ids[-1] >= limit:
        yield name, f"{show(ids)} names layer {ids[-1]}; layers run from 0 to {limit - 1}"


def _kv_order(kv_source_layer_ids: tuple[int, ...], num_hidden_layers: int) -> Iterator[Problem]:
    yield from _ascending("kv_source_layer_ids", kv_source_layer_ids, num_hidden_layers)


def _index_order(index_source_layer_ids: tuple[int, ...], num_hidden_layers: int) -> Iterator[Problem]:
    yield from _ascending("index_source_layer_ids", index_source_layer_ids, num_hidden_layers)


def _engram_order(engram_layer_ids: tuple[int, ...], num_hidden_layers: int) -> Iterator[Problem]:
    yield from _ascending("engram_layer_ids", engram_layer_ids, num_hidden_layers)


def _sources(name: str, sources: tuple[int, ...], ratios: tuple[int, ...]) -> Iterator[Problem]:
    idle = [layer for layer in sources if ratios[layer] == 0]
    if idle:
        yield name, f"{show(sources)} names window-only layers {show(idle)} (compress ratio 0); take them out"
        return
    first = next((layer for layer, ratio in enumerate(ratios) if ratio), None)
    if first is not None and first not in sources:
        yield (
            name,
            f"{show(sources)} leaves layer {first} without a source; it is the first layer with a compress ratio "
            f"above 0, so it must be in the list",
        )


def _kv_sources(kv_source_layer_ids: tuple[int, ...], compress_ratios: tuple[int, ...]) -> Iterator[Problem]:
    yield from _sources("kv_source_layer_ids", kv_source_layer_ids, compress_ratios)


def _index_sources(index_source_layer_ids: tuple[int, ...], compress_ratios: tuple[int, ...]) -> Iterator[Problem]:
    yield from _sources("index_source_layer_ids", index_source_layer_ids, compress_ratios)


def _kv_sources_choose(
    kv_source_layer_ids: tuple[int, ...], index_source_layer_ids: tuple[int, ...]
) -> Iterator[Problem]:
    blind = [layer for layer in kv_source_layer_ids if layer not in index_source_layer_ids]
    if blind:
        yield (
            "index_source_layer_ids",
            f"{show(index_source_layer_ids)} lacks KV sources {show(blind)}; a choice made over another source's "
            "entries means nothing there, so every KV source must be an index source",
        )


def _shared_ratio(kv_source_layer_ids: tuple[int, ...], compress_ratios: tuple[int, ...]) -> Iterator[Problem]:
    for layer, ratio in enumerate(compress_ratios):
        source = max((s for s in kv_source_layer_ids if s <= layer), default=None)
        if ratio and source is not None and ratio != compress_ratios[source]:
            yield (
                "compress_ratios",
                f"layer {layer} has ratio {ratio} but reads the compressed KV of layer {source}, whose ratio is "
                f"{compress_ratios[source]}; give it that ratio, or make it a KV source",
            )
            return


def _index_keys(
    index_k_source_layer_ids: tuple[int, ...] | None, kv_source_layer_ids: tuple[int, ...]
) -> Iterator[Problem]:
    if index_k_source_layer_ids is not None and index_k_source_layer_ids != kv_source_layer_ids:
        yield (
            "index_k_source_layer_ids",
            f"{show(index_k_source_layer_ids)} differs from kv_source_layer_ids {show(kv_source_layer_ids)}; index "
            "keys are made from a source's own latent, so the lists must be equal",
        )


def _candidates(
    candidate_source_layer_id: int,
    candidate_topk_blocks: int,
    candidate_block_size: int,
    index_topk: int,
    index_source_layer_ids: tuple[int, ...],
    kv_source_layer_ids: tuple[int, ...],
) -> Iterator[Problem]:
    if candidate_source_layer_id < 0:
        return
    if candidate_source_layer_id not in index_source_layer_ids:
        yield (
            "candidate_source_layer_id",
            f"{candidate_source_layer_id} is not an index source; it must be one of {show(index_source_layer_ids)}, "
            "or -1 for no pool",
        )
        return
    later = [layer for layer in kv_source_layer_ids if layer > candidate_source_layer_id]
    if later:
        yield (
            "candidate_source_layer_id",
            f"layer {candidate_source_layer_id} makes a pool of its own source's positions, but layers {show(later)} "
            f"start new sources after it; it must be {kv_source_layer_ids[-1]} or later",
        )
    pool = candidate_topk_blocks * candidate_block_size
    if pool <= index_topk:
        yield (
            "candidate_topk_blocks",
            f"{candidate_topk_blocks} blocks of {candidate_block_size} (candidate_block_size) hold {pool} positions; "
            f"a choice of {index_topk} (index_topk) needs more than that",
        )


def _groups(num_attention_heads: int, o_groups: int) -> Iterator[Problem]:
    if num_attention_heads % o_groups:
        yield "o_groups", f"{o_groups} does not divide num_attention_heads, {num_attention_heads}; it must"


def _head_dim(head_dim: int) -> Iterator[Problem]:
    if head_dim % 32:
        yield "head_dim", f"{head_dim} is not a multiple of 32, which window KV is quantised by"


def _index_head_dim(index_head_dim: int) -> Iterator[Problem]:
    if index_head_dim % 32:
        yield "index_head_dim", f"{index_head_dim} is not a multiple of 32, which index keys are quantised by"


def _rotated(qk_rope_head_dim: int, head_dim: int, index_head_dim: int) -> Iterator[Problem]:
    if qk_rope_head_dim % 2:
        yield "qk_rope_head_dim", f"{qk_rope_head_dim} is odd; channels are rotated in pairs"
    elif qk_rope_head_dim > min(head_dim, index_head_dim):
        yield (
            "qk_rope_head_dim",
            f"{qk_rope_head_dim} channels are rotated, more than head_dim ({head_dim}) or index_head_dim "
            f"({index_head_dim}) has; it must be at most the smaller",
        )


def _experts(num_experts_per_tok: int, n_routed_experts: int) -> Iterator[Problem]:
    if num_experts_per_tok > n_routed_experts:
        yield "num_experts_per_tok", f"{num_experts_per_tok} is more than n_routed_experts, {n_routed_experts}"


def _engram_sizes(
    engram_layer_ids: tuple[int, ...],
    engram_max_ngram_size: int,
    engram_vocab_size: int,
    engram_n_heads: int,
    engram_head_dim: int,
    engram_compressed_vocab_size: int,
    vocab_size: int,
) -> Iterator[Problem]:
    if not engram_layer_ids:
        return
    sizes = {
        "engram_max_ngram_size": (engram_max_ngram_size, 2),
        "engram_vocab_size": (engram_vocab_size, 2),
        "engram_n_heads": (engram_n_heads, 1),
        "engram_head_dim": (engram_head_dim, 1),
        "engram_compressed_vocab_size": (engram_compressed_vocab_size, 1),
    }
    for name, (value, low) in sizes.items():
        if value < low:
            yield name, f"is {value}; with engram_layer_ids {show(engram_layer_ids)} it must be at least {low}"
    if engram_compressed_vocab_size > vocab_size:
        yield "engram_compressed_vocab_size", f"{engram_compressed_vocab_size} is more than vocab_size, {vocab_size}"


def _engram_rows(
    engram_layer_ids: tuple[int, ...],
    engram_num_embeddings: tuple[int, ...],
    engram_max_ngram_size: int,
    engram_vocab_size: int,
    engram_n_heads: int,
) -> Iterator[Problem]:
    name = "engram_num_embeddings"
    if len(engram_num_embeddings) != len(engram_layer_ids):
        yield (
            name,
            f"has {len(engram_num_embeddings)} entries; engram_layer_ids has {len(engram_layer_ids)}, one for each",
        )
        return
    primes = engram_primes(len(engram_layer_ids), engram_vocab_size, engram_max_ngram_size, engram_n_heads)
    rows = [sum(layer) for layer in primes]
    if list(engram_num_embeddings) != rows:
        yield (
            name,
            f"{show(engram_num_embeddings)} is not the sum of each table's primes; from engram_vocab_size "
            f"{engram_vocab_size}, engram_max_ngram_size {engram_max_ngram_size} and engram_n_heads {engram_n_heads} "
            f"it must be {show(rows)}",
        )
    elif max(rows, default=0) > _INT32_MAX:
        yield name, f"{show(engram_num_embeddings)} has a table of more than {_INT32_MAX} rows, too many for int32"


def _engram_pad(engram_pad_token_id: int, vocab_size: int) -> Iterator[Problem]:
    if engram_pad_token_id >= vocab_size:
        yield "engram_pad_token_id", f"{engram_pad_token_id} is outside the vocabulary; ids run to {vocab_size - 1}"


def _draft_sizes(
    num_nextn_predict_layers: int, dspark_block_size: int, dspark_markov_rank: int, dspark_n_routed_experts: int
) -> Iterator[Problem]:
    if not num_nextn_predict_layers:
        return
    sizes = {
        "dspark_block_size": dspark_block_size,
        "dspark_markov_rank": dspark_markov_rank,
        "dspark_n_routed_experts": dspark_n_routed_experts,
    }
    for name, value in sizes.items():
        if value < 1:
            yield name, f"is {value}; with {num_nextn_predict_layers} draft layers it must be at least 1"


def _draft_experts(
    num_nextn_predict_layers: int, dspark_num_experts_per_tok: int, dspark_n_routed_experts: int
) -> Iterator[Problem]:
    if num_nextn_predict_layers and not 1 <= dspark_num_experts_per_tok <= dspark_n_routed_experts:
        yield (
            "dspark_num_experts_per_tok",
            f"{dspark_num_experts_per_tok} is not between 1 and dspark_n_routed_experts, {dspark_n_routed_experts}",
        )


def _draft_targets(
    num_nextn_predict_layers: int, dspark_target_layer_ids: tuple[int, ...], num_hidden_layers: int
) -> Iterator[Problem]:
    if num_nextn_predict_layers and not dspark_target_layer_ids:
        yield "dspark_target_layer_ids", "is empty; the draft needs the features of at least one layer"
    yield from _ascending("dspark_target_layer_ids", dspark_target_layer_ids, num_hidden_layers)


def _draft_noise(dspark_noise_token_id: int, vocab_size: int) -> Iterator[Problem]:
    if dspark_noise_token_id >= vocab_size:
        yield "dspark_noise_token_id", f"{dspark_noise_token_id} is outside the vocabulary; ids run to {vocab_size - 1}"


TEXT_CHECKS: tuple[Check, ...] = (
    _ratios, _kv_order, _index_order, _engram_order, _kv_sources, _index_sources, _shared_ratio, _kv_sources_choose,
    _index_keys, _candidates, _groups, _head_dim, _index_head_dim, _rotated, _experts, _engram_sizes, _engram_rows,
    _engram_pad, _draft_sizes, _draft_experts, _draft_targets, _draft_noise,
)  # fmt: skip


def _inner_widths(
    hidden_size: int,
    q_lora_rank: int,
    moe_intermediate_size: int,
    engram_layer_ids: tuple[int, ...],
    engram_head_dim: int,
) -> Iterator[Problem]:
    inner = {"hidden_size": hidden_size, "q_lora_rank": q_lora_rank, "moe_intermediate_size": moe_intermediate_size}
    if engram_layer_ids:
        inner["engram_head_dim"] = engram_head_dim
    for name, value in inner.items():
        if value % 32:
            yield name, f"{value} is not a multiple of 32, which quantised weights are cut by"


def _output_widths(o_groups: int, o_lora_rank: int) -> Iterator[Problem]:
    if o_groups * o_lora_rank % 32:
        yield (
            "o_lora_rank",
            f"{o_groups} groups (o_groups) of rank {o_lora_rank} make {o_groups * o_lora_rank} columns, not a "
            "multiple of 32, which quantised weights are cut by",
        )


QUANT_CHECKS: tuple[Check, ...] = (_inner_widths, _output_widths)
"""Of a quantised checkpoint only: each matrix is cut in groups of 32 along its inner axis."""


def _vision_heads(hidden_size: int, num_attention_heads: int) -> Iterator[Problem]:
    if hidden_size % num_attention_heads or hidden_size // num_attention_heads % 4:
        yield (
            "num_attention_heads",
            f"{num_attention_heads} heads do not cut hidden_size {hidden_size} into widths that are a multiple of 4, "
            "as rows and columns rotate half of the channels each, in pairs",
        )


VISION_CHECKS: tuple[Check, ...] = (_vision_heads,)


def _token(name: str, token_id: int, vocab_size: int) -> Iterator[Problem]:
    if token_id >= vocab_size:
        yield name, f"{token_id} is outside the vocabulary; ids run from 0 to {vocab_size - 1} (text_config.vocab_size)"


def _bos(bos_token_id: int, vocab_size: int) -> Iterator[Problem]:
    yield from _token("bos_token_id", bos_token_id, vocab_size)


def _pad(pad_token_id: int, vocab_size: int) -> Iterator[Problem]:
    yield from _token("pad_token_id", pad_token_id, vocab_size)


def _image(image_token_id: int, vocab_size: int) -> Iterator[Problem]:
    yield from _token("image_token_id", image_token_id, vocab_size)


def _eos(eos_token_ids: tuple[int, ...], vocab_size: int) -> Iterator[Problem]:
    yield from _token("eos_token_id", max(eos_token_ids), vocab_size)


MODEL_CHECKS: tuple[Check, ...] = (_bos, _pad, _image, _eos)
