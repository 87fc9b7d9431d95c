"""What Engram derives instead of storing: the compressed vocabulary, table primes, row offsets and hash multipliers.

All of it follows from the configuration and the tokenizer, and every row of the tables depends on every bit of it, so
it is checked against the counts that the checkpoint states. Hashing and fetching are ops.

Source: DeepSeek-V4.1-Flash (model specification, sections 11.1 and 11.2).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from deepinfer.models.errors import ConfigError
from deepinfer.models.interface import Vocabulary

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41_flash.config import TextConfig

_REPLACEMENT = "\ufffd"
_SEED_STEP = 10007


@dataclass(frozen=True)
class EngramConstants:
    """Constants of all Engram layers, L of them, with C = (N - 1) * heads columns.

    Attributes:
        token_map: [V] int32, token id to compressed id.
        num_keys: distinct compressed ids.
        primes: [L, C] int64, n-major.
        offsets: [L, C] int64, first row of each column's part of the table.
        multipliers: [L, N] int64.
    """

    token_map: Tensor
    num_keys: int
    primes: Tensor
    offsets: Tensor
    multipliers: Tensor

    @classmethod
    def build(cls, config: "TextConfig", tokenizer: Vocabulary) -> "EngramConstants":
        """Derive everything, and check the number of compressed ids.

        The map is as long as the larger of tokenizer and `vocab_size`; ids without a token count as the pad token.

        Raises:
            ConfigError: the tokenizer gives another number of keys than `engram_compressed_vocab_size`.
        """
        token_map = compress_vocabulary(tokenizer)
        num_keys = int(token_map.max(initial=-1)) + 1
        want, pad = config.engram_compressed_vocab_size, config.engram_pad_token_id
        problems = []
        if num_keys != want:
            problems.append(
                f"text_config.engram_compressed_vocab_size: is {want}, but the {len(token_map)} tokens of the "
                f"tokenizer compress to {num_keys} keys, so table rows would be read from wrong places; use the "
                "tokenizer.json that belongs to this checkpoint"
            )
        token_map = np.pad(token_map, (0, max(config.vocab_size - len(token_map), 0)), constant_values=-1)
        if token_map[pad] < 0:
            problems.append(f"text_config.engram_pad_token_id: {pad} is not a token of the tokenizer; it must be one")
        if problems:
            raise ConfigError("tokenizer.json and config.json", problems)
        layers, depth = config.engram_layer_ids, config.engram_max_ngram_size
        primes = engram_primes(len(layers), config.engram_vocab_size, depth, config.engram_n_heads)
        table = torch.tensor(primes, dtype=torch.int64).reshape(len(layers), config.engram_columns)
        multipliers = [engram_multipliers(layer, want, depth) for layer in layers]
        return cls(
            token_map=torch.from_numpy(np.where(token_map < 0, token_map[pad], token_map)),
            num_keys=num_keys,
            primes=table,
            offsets=table.cumsum(1) - table,
            multipliers=torch.tensor(multipliers, dtype=torch.int64).reshape(len(layers), depth),
        )

    def to(self, device: torch.device | str) -> "EngramConstants":
        """The same constants on a device."""
        return replace(
            self,
            token_map=self.token_map.to(device),
            primes=self.primes.to(device),
            offsets=self.offsets.to(device),
            multipliers=self.multipliers.to(device),
        )


def compress_vocabulary(tokenizer: Vocabulary) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Compressed id of every token id: tokens that read the same after normalising share one.

    Returns:
        [vocab_size] int32; ids number the keys in order of first appearance. -1 where no token has the id.
    """
    normalizer, strip = _normalizer(), normalizers.Strip()
    numbers: dict[str, int] = {}
    token_map = np.empty(tokenizer.vocab_size, dtype=np.int32)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode_single_with_special(token_id)
        if not text:
            token_map[token_id] = -1
            continue
        if _REPLACEMENT in text:
            key = tokenizer.raw_spelling(token_id)
        else:
            folded = normalizer.normalize_str(text)
            key = (folded if folded == " " else strip.normalize_str(folded)) or text
        token_map[token_id] = numbers.setdefault(key, len(numbers))
    return token_map


def engram_primes(num_layers: int, start: int, max_ngram: int, num_heads: int) -> list[list[int]]:
    """Primes of each layer's columns, n-major: one ascending stream that no two columns share.

    For every (layer, n) the search starts anew at `start` - 1 and takes the next primes not used before, which are the
    next ones of the stream.
    """
    stream = _primes_from(start)
    return [[next(stream) for _ in range(max(max_ngram - 1, 0) * num_heads)] for _ in range(num_layers)]


def engram_multipliers(layer: int, compressed_vocab_size: int, max_ngram: int) -> list[int]:
    """Odd hash multipliers of one layer, one per n-gram place; products with a compressed id fit in 63 bits."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    drawn = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [int(value) * 2 + 1 for value in drawn]


def _normalizer() -> normalizers.Normalizer:
    # the library's own tables, so that the count of keys does not follow Python's Unicode version
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )


def _primes_from(start: int) -> Iterator[int]:
    candidate = max(start, 2)
    while True:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            yield candidate
        candidate += 1
