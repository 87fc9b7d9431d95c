"""What a step of whole layers must move and compute at least, from the configuration alone.

Decode: every matrix that the step uses once, of experts those that so many rows hit on average, and of caches the
records that are read; rows of one sequence share what they read. Prefill: the products of all rows, attention and index
scores. A step takes at best the longer of its bytes over the copy and its operations over the bf16 product that were
measured in the same run. Activations, logits, norms and codes are left out: an ideal step keeps them on the chip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.models.deepseek_v41_flash.caches import cache_spec, draft_window_name, index_name, kv_name, window_name
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Demand:
    """What something costs at least.

    Attributes:
        num_bytes: read from memory.
        flops: operations of products.
    """

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def us(self, copy_gbs: float, product_tflops: float) -> float:
        """Microseconds at those rates; 0 where neither is known."""
        by_bytes = self.num_bytes / copy_gbs / 1e3 if copy_gbs else 0.0
        by_flops = self.flops / product_tflops / 1e6 if product_tflops else 0.0
        return max(by_bytes, by_flops)

    def bound(self, copy_gbs: float, product_tflops: float) -> str:
        """Which of the two takes longer: "memory" or "arithmetic"."""
        at_memory = self.num_bytes * product_tflops * 1e3 >= self.flops * copy_gbs
        return "memory" if at_memory else "arithmetic"


@dataclass
class _Weights:
    """Matrices of one part: all but routed experts, and one routed expert of a layer."""

    num_bytes: float = 0.0
    values: float = 0.0
    expert_bytes: float = 0.0
    expert_values: float = 0.0


class LayerRoofs:
    """Least costs of a model's steps.

    Args:
        config: of the model.
        draft: its draft blocks are loaded.
    """

    def __init__(self, config: ModelConfig, *, draft: bool) -> None:
        self._text = text = config.text
        self._draft = draft and text.has_draft
        self._head_bytes = self._markov_bytes = 0
        self._parts = {"backbone": _Weights(), "draft": _Weights()}
        self._read(config)
        records = cache_spec(text, True, draft=self._draft)
        kinds = (*records.block_records, *records.window_records)
        self._record_bytes = {record.name: record.format.record_bytes for record in kinds}

    def decode(self, batch: int, context: int, num_drafts: int = 0) -> Demand:
        """A step of `batch` sequences behind `context` tokens each, `num_drafts` drafts judged and as many proposed."""
        rows = batch * (1 + num_drafts)
        cost = self._products("backbone", rows, rows) + self._head(rows)
        for layer in range(self._text.num_layers):
            cost += self._attention(layer, batch, context, rows * self._keys(layer, context))
            cost += self._scores(layer, batch, context, rows * self._scored(layer, context))
        return cost + self._drafting(batch, rows, context) if self._draft and num_drafts else cost

    def prefill(self, count: int, context: int, max_rows: int) -> Demand:
        """Prompts of `context` tokens, `count` of them, in steps of at most `max_rows` rows."""
        rows, steps = count * context, -(-count * context // max_rows)
        each = self._products("backbone", rows, min(rows, max_rows))
        cost = Demand(steps * each.num_bytes, each.flops) + self._head(count)
        for layer in range(self._text.num_layers):
            keys, scored = (_over_prompt(of, layer, context) for of in (self._keys, self._scored))
            cost += self._attention(layer, count, context, count * keys)
            cost += self._scores(layer, count, context, count * scored)
        return cost

    def _read(self, config: ModelConfig) -> None:
        """Sum up the tensors as they are once loaded, where scales have the rows of their matrix."""
        rows = 0
        for name, spec in expected_tensors(config).items():
            kind, is_scale = spec.dtypes[0], name.endswith(".scale")
            shape = (rows, *spec.shape[1:]) if is_scale else spec.shape
            rows = shape[0]
            size = math.prod(shape) * _BYTES[kind]
            values = math.prod(shape) * (2 if kind == "I8" else 1) if len(shape) == 2 and not is_scale else 0
            if name == "head.weight":
                self._head_bytes = size
            elif name.endswith("markov_head.head.weight"):
                self._markov_bytes = size
            elif spec.part not in self._parts or "embed" in name:
                continue  # of embeddings a step reads a few rows
            elif ".experts." in name:
                count = self._num_experts(spec.part) * self._num_blocks(spec.part)
                self._parts[spec.part].expert_bytes += size / count
                self._parts[spec.part].expert_values += values / count
            else:
                self._parts[spec.part].num_bytes += size
                self._parts[spec.part].values += values

    def _num_experts(self, part: str) -> int:
        return self._text.n_routed_experts if part == "backbone" else self._text.dspark_n_routed_experts

    def _num_blocks(self, part: str) -> int:
        return self._text.num_layers if part == "backbone" else self._text.num_nextn_predict_layers

    def _products(self, part: str, rows: int, at_once: int) -> Demand:
        """All products of a part but those over the vocabulary: bytes of one step, operations of all rows."""
        weights, experts, blocks = self._parts[part], self._num_experts(part), self._num_blocks(part)
        per_token = self._text.num_experts_per_tok if part == "backbone" else self._text.dspark_num_experts_per_tok
        hit = experts * (1 - (1 - per_token / experts) ** at_once)
        return Demand(
            weights.num_bytes + blocks * hit * weights.expert_bytes,
            2 * rows * (weights.values + blocks * per_token * weights.expert_values),
        )

    def _head(self, rows: int) -> Demand:
        return Demand(self._head_bytes, 2 * rows * self._text.vocab_size * self._text.hidden_size)

    def _keys(self, layer: int, context: int) -> int:
        """Records that a row attends to."""
        ratio = self._text.ratio_of(layer)
        chosen = min(self._text.index_topk, context // ratio) if ratio else 0
        return min(self._text.sliding_window, context) + chosen

    def _scored(self, layer: int, context: int) -> int:
        """Index keys that a row is scored against."""
        text = self._text
        if not text.is_index_source(layer):
            return 0
        columns = context // text.ratio_of(layer)
        if text.uses_candidates(layer):
            return min(columns, text.candidate_topk_blocks * text.candidate_block_size)
        return columns

    def _attention(self, layer: int, num_seqs: int, context: int, keys: float) -> Demand:
        text = self._text
        window = min(text.sliding_window, context)
        size = window * self._record_bytes[window_name(layer)]
        if text.ratio_of(layer):
            others = self._keys(layer, context) - window
            size += others * self._record_bytes[kv_name(text.kv_source_of(layer))]
        return Demand(num_seqs * size, 4 * text.num_attention_heads * text.head_dim * keys)

    def _scores(self, layer: int, num_seqs: int, context: int, scored: float) -> Demand:
        text = self._text
        if not text.is_index_source(layer):
            return Demand()
        size = self._scored(layer, context) * self._record_bytes[index_name(text.kv_source_of(layer))]
        return Demand(num_seqs * size, 2 * text.index_n_heads * text.index_head_dim * scored)

    def _drafting(self, batch: int, rows: int, context: int) -> Demand:
        """A block of tokens behind each sequence; `rows` of the step give features."""
        text, block = self._text, self._text.dspark_block_size
        drafted = batch * block
        cost = self._products("draft", drafted, drafted) + self._head(drafted)
        features = text.hidden_size * text.hidden_size * len(text.dspark_target_layer_ids)
        cost += Demand(0.0, 2 * (rows - drafted) * features)  # counted with the block's rows above
        cost += Demand(block * self._markov_bytes, 2 * drafted * text.vocab_size * text.dspark_markov_rank)
        window = min(text.sliding_window, context)
        for number in range(text.num_nextn_predict_layers):
            size = batch * window * self._record_bytes[draft_window_name(number)]
            cost += Demand(size, 4 * text.num_attention_heads * text.head_dim * drafted * (window + block))
        return cost


def _over_prompt(of: Callable[[int, int], int], layer: int, context: int) -> float:
    """Sum over the positions of a prompt of what the row there reads."""
    samples = 64
    places = [round((i + 0.5) * context / samples) for i in range(samples)]
    return context * sum(of(layer, place) for place in places) / samples
