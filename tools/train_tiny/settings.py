"""Sizes of the model, and the plan of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import compress_vocabulary, engram_primes
from deepinfer.models.interface import Vocabulary

ALIGNMENT = 8
"""Documents of a packed row begin at multiples of it: a multiple of every ratio and of the candidate block."""


@dataclass(frozen=True)
class Phase:
    """What a step trains and rounds.

    Attributes:
        caches: round window KV, compressed KV and index rows as the caches store them.
        weights: round weights as the checkpoint stores them.
        sparse: attend to the indexer's selection; otherwise to everything visible.
        index: train the indexer on the attention's own distribution.
        draft: train the draft.
        draft_gradient: share of the draft's gradient that reaches the backbone.
        activations: round what weights with codes are multiplied with, as engines do in bfloat16.
    """

    caches: bool = True
    weights: bool = False
    activations: bool = False
    sparse: bool = False
    index: bool = False
    draft: bool = False
    draft_gradient: float = 0.0


EXPORTED = Phase(weights=True, sparse=True)
"""What an engine computes with the exported checkpoint in float32."""


@dataclass(frozen=True)
class Plan:
    """A training run. Shares are of all steps.

    Attributes:
        seed: of weights and data.
        steps: of the whole run; fixed from the start, since schedules and data follow from it.
        tokens: of a step; below 65,536, the largest batch of small products that every library takes.
        row: length of packed rows in ordinary steps.
        long_every: one step of so many takes long rows, for tool calls and pass keys; 0 for none.
        long_rows: their lengths, reached one after another.
        anchors: draft blocks trained per row, for every 512 tokens.
        index_from: share after which the indexer is trained.
        draft_from: share after which the draft is.
        draft_gradient: share of its gradient that reaches the backbone, which learns to think ahead.
        sparse_from: share after which attention is sparse.
        weights_from: share after which weights are rounded, and what they are multiplied with.
        long_from: share after which long rows come.
        matrix_lr: of matrices (Muon).
        other_lr: of everything else (AdamW), but
        table_lr: of embeddings.
        warmup: share of steps in which rates rise.
        decay_from: share after which they fall to a twentieth.
    """

    seed: int = 1
    steps: int = 5600
    tokens: int = 20480
    row: int = 512
    long_every: int = 4
    long_rows: tuple[int, ...] = (1024, 2048, 1024, 4096, 1024, 8192)
    anchors: int = 32
    index_from: float = 0.25
    draft_from: float = 0.25
    draft_gradient: float = 0.3
    sparse_from: float = 0.50
    weights_from: float = 2 / 3
    long_from: float = 0.03
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    table_lr: float = 0.012
    warmup: float = 0.01
    decay_from: float = 0.60

    def phase(self, step: int) -> Phase:
        """What step `step` trains and rounds."""
        share = step / self.steps
        return Phase(
            weights=share >= self.weights_from,
            activations=share >= self.weights_from,
            sparse=share >= self.sparse_from,
            index=share >= self.index_from,
            draft=share >= self.draft_from,
            draft_gradient=self.draft_gradient,
        )

    def row_length(self, step: int) -> int:
        """Tokens of the rows of step `step`; long lengths come one after another, all before attention is sparse."""
        share = step / self.steps
        if not self.long_every or share < self.long_from or step % self.long_every:
            return self.row
        reached = int((share - self.long_from) / (self.sparse_from - self.long_from) * (len(self.long_rows) + 1)) + 1
        usable = self.long_rows[:reached]
        return usable[step // self.long_every % len(usable)]

    def rate(self, step: int) -> float:
        """Share of the full learning rate in step `step`."""
        share = (step + 1) / self.steps
        if share < self.warmup:
            return share / self.warmup
        if share < self.decay_from:
            return 1.0
        return 1 - 0.95 * (share - self.decay_from) / (1 - self.decay_from)


def model_config(sizes: dict[str, Any], vocabulary: Vocabulary, noise_id: int) -> dict[str, Any]:
    """A `config.json` of these sizes, with what follows from the vocabulary filled in."""
    text = {**_FIXED, **sizes, "vocab_size": vocabulary.vocab_size, "dspark_noise_token_id": noise_id}
    primes = engram_primes(
        len(text["engram_layer_ids"]), text["engram_vocab_size"], text["engram_max_ngram_size"], text["engram_n_heads"]
    )
    text["engram_num_embeddings"] = [sum(layer) for layer in primes]
    text["engram_compressed_vocab_size"] = int(compress_vocabulary(vocabulary).max()) + 1
    data = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": vocabulary.bos_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "pad_token_id": vocabulary.pad_token_id,
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }
    ModelConfig.from_dict(data)  # refuses what contradicts itself before anything is trained
    return data


_FIXED: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
}

# Window only (0, 1 with Engram); Full at ratio 2 (2, 4 with Engram), Reuse (3); Full at ratio 1 and pool (5), Reuse
# (6, 8), Reindex (7): all kinds of the released model.
FULL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 9,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "max_position_embeddings": 16384,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 64,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 1009,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "dspark_target_layer_ids": [6, 7, 8],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

FULL_VOCAB = 1536

MINI: dict[str, Any] = {
    **FULL,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "max_position_embeddings": 2048,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "engram_vocab_size": 61,
    "engram_n_heads": 2,
    "dspark_markov_rank": 16,
}
"""The same structure for tests on a CPU."""

MINI_VOCAB = 448
