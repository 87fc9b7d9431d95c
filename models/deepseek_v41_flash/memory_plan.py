"""How much memory a checkpoint takes, and what fits beside it: for `deepinfer inspect` and for sizing pools.

Everything follows from the configuration, the tensor table and the cache formats; no weight is read. Weight bytes are
those of the loaded form, in which FP8 blocks have a scale per row and 32 columns. Activations and scratch are not
counted: a backend knows those.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from deepinfer.models.deepseek_v41_flash.caches import cache_spec
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.tensors import expected_tensors, loaded_parts

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}
_FORMATS = {"F32": "fp32", "BF16": "bf16", "F8_E4M3": "fp8", "I8": "fp4", "U8": "fp4"}


@dataclass(frozen=True)
class Fit:
    """What a given memory holds beside the weights.

    Attributes:
        cache_bytes: left for caches; negative when the weights alone do not fit.
        num_seqs: sequences asked for.
        num_tokens: tokens that all of them together may hold, in whole blocks; 0 when nothing fits.
        num_blocks: blocks of the global group, the never allocated block 0 not counted.
    """

    cache_bytes: int
    num_seqs: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights and caches.

    Attributes:
        weight_bytes: part to bytes of its loaded weights; Engram tables have an entry of their own, `engram_tables`.
        format_bytes: storage format (fp4, fp8, bf16, fp32, with their scales) to bytes, all parts together.
        host_bytes: of the weights, those that stay in host memory or in their files (Engram tables).
        num_tensors: part to tensors in the checkpoint.
        kv_bytes_per_token: compressed KV and index keys, all sources together.
        window_bytes_per_token: window KV of all layers, draft layers included when they are loaded.
        window: tokens of window KV that a sequence needs.
        state_bytes_per_seq: open groups of the compressors.
    """

    weight_bytes: Mapping[str, int]
    format_bytes: Mapping[str, int]
    host_bytes: int
    num_tensors: Mapping[str, int]
    kv_bytes_per_token: Fraction
    window_bytes_per_token: int
    window: int
    state_bytes_per_seq: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        kv_rounding: bool = True,
        draft: bool = True,
        vision: bool = True,
        stored: Mapping[str, str] | None = None,
    ) -> "MemoryPlan":
        """Plan a model.

        Args:
            config: its configuration.
            kv_rounding: caches in quantised records; off takes float32 records.
            draft: whether the draft blocks are loaded.
            vision: whether the image tower is loaded.
            stored: name to safetensors dtype as a checkpoint holds it, where a tensor may have one of several types;
                without it, the first type that is understood is assumed.
        """
        parts = loaded_parts(config, draft=draft, vision=vision)
        by_part: Counter[str] = Counter()
        by_format: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        rows, fmt = 0, ""
        for name, spec in expected_tensors(config).items():
            counts[spec.part] += 1
            if spec.part not in parts:
                continue
            dtype = (stored or {}).get(name, "")
            dtype = dtype if dtype in spec.dtypes else spec.dtypes[0]
            shape = spec.shape
            if name.endswith(".scale"):  # follows its weight, whose rows it covers once loaded
                shape = (rows, *shape[1:])
            else:
                rows, fmt = shape[0], _FORMATS[dtype]
            size = math.prod(shape) * _BYTES[dtype]
            by_part["engram_tables" if ".engram.embed." in name else spec.part] += size
            by_format[fmt] += size
        caches = cache_spec(config.text, kv_rounding, draft="draft" in parts)
        ratios = (Fraction(record.format.record_bytes, record.ratio) for record in caches.block_records)
        return cls(
            weight_bytes=dict(by_part),
            format_bytes=dict(by_format),
            host_bytes=by_part["engram_tables"],
            num_tensors=dict(counts),
            kv_bytes_per_token=sum(ratios, Fraction(0)),
            window_bytes_per_token=sum(record.format.record_bytes for record in caches.window_records),
            window=caches.window,
            state_bytes_per_seq=sum(state.ratio * 2 * state.width * 4 for state in caches.states),
        )

    @property
    def total_weight_bytes(self) -> int:
        """Bytes of all loaded weights, Engram tables included."""
        return sum(self.weight_bytes.values())

    def window_bytes_per_seq(self, window_page: int = 1) -> int:
        """Bytes of window KV that one decoding sequence holds, in pages of `window_page` tokens.

        A window may begin anywhere in a page, so it touches one page more than its length fills.
        """
        pages = -(-(self.window + window_page - 1) // window_page)
        return pages * window_page * self.window_bytes_per_token

    def request_bytes(self, num_tokens: int, *, block_size: int = 128, window_page: int = 32) -> int:
        """Bytes of all caches of a sequence of `num_tokens` tokens."""
        blocks = -(-num_tokens // block_size)
        return blocks * self.block_bytes(block_size) + self.seq_bytes(window_page)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the global group; `block_size` is a multiple of all ratios."""
        return int(self.kv_bytes_per_token * block_size)

    def seq_bytes(self, window_page: int = 32) -> int:
        """Bytes that a sequence takes whatever its length: window KV and open groups."""
        return self.window_bytes_per_seq(window_page) + self.state_bytes_per_seq

    def fit(
        self,
        memory_bytes: int,
        *,
        num_seqs: int = 1,
        block_size: int = 128,
        window_page: int = 32,
        tables_elsewhere: bool = True,
    ) -> Fit:
        """What fits into `memory_bytes`, with `num_seqs` sequences running at once.

        Args:
            memory_bytes: memory for weights and caches.
            num_seqs: sequences that hold a window and open groups.
            block_size: tokens of a block.
            window_page: tokens of a window page.
            tables_elsewhere: Engram tables are in other memory, or stay in their files.
        """
        weights = self.total_weight_bytes - (self.host_bytes if tables_elsewhere else 0)
        left = memory_bytes - weights
        for_blocks = left - num_seqs * self.seq_bytes(window_page)
        block = self.block_bytes(block_size)
        blocks = max(for_blocks // block - 1, 0) if block else 0  # block 0 is never allocated
        return Fit(left, num_seqs, blocks * block_size, blocks)
