"""Engram constants against published numbers and the project's golden files."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import decoders

from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import (
    EngramConstants,
    compress_vocabulary,
    engram_multipliers,
    engram_primes,
)
from deepinfer.models.errors import ConfigError

DATA = json.loads((Path(__file__).parent / "data" / "engram_constants.json").read_text(encoding="utf-8"))
NAMES = ("token_map", "primes", "offsets", "multipliers")
GOLDEN = Path(os.environ.get("DEEPINFER_GOLDEN") or Path(__file__).resolve().parents[2].parent / "shared" / "golden")


class Spellings:
    """A vocabulary from the spellings of its tokens; control tokens read as they are spelled."""

    def __init__(self, spellings: list[str], control: list[int] = []) -> None:  # noqa: B006
        self.spellings, self.control = spellings, set(control)
        self.vocab_size = len(spellings)

    def raw_spelling(self, token_id: int) -> str:
        return self.spellings[token_id]

    def decode_single_with_special(self, token_id: int) -> str:
        text = self.spellings[token_id]
        return text if token_id in self.control else decoders.ByteLevel().decode([text])


class Texts(Spellings):
    """A vocabulary whose tokens read as given."""

    def decode_single_with_special(self, token_id: int) -> str:
        return self.spellings[token_id]


def text_config(**changes: Any) -> Any:
    return SimpleNamespace(**DATA["quant"]["config"] | {"engram_columns": 6} | changes)


def quant_vocabulary() -> Spellings:
    return Spellings(DATA["quant"]["spellings"], DATA["quant"]["control"])


@pytest.mark.parametrize("name", ["quant", "plain"])
def test_constants_equal_the_golden_ones(name: str) -> None:
    want = DATA[name]
    config = want["config"]
    columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
    got = EngramConstants.build(
        SimpleNamespace(**config, engram_columns=columns), Spellings(want["spellings"], want["control"])
    )
    for field in NAMES:
        assert getattr(got, field).tolist() == want[field], field
    assert got.num_keys == config["engram_compressed_vocab_size"]
    assert got.token_map.dtype == torch.int32
    assert got.primes.dtype == got.offsets.dtype == got.multipliers.dtype == torch.int64


def test_the_engine_tokenizer_gives_the_same_map() -> None:
    tokenizer = Tokenizer.from_dir(Path(__file__).parent.parent / "data")
    assert compress_vocabulary(tokenizer).tolist() == DATA["quant"]["token_map"]


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden files beside the repository (DEEPINFER_GOLDEN)")
@pytest.mark.parametrize("name", ["quant", "plain"])
def test_constants_equal_the_golden_files(name: str) -> None:
    config = ModelConfig.from_dir(GOLDEN / name)
    got = EngramConstants.build(config.text, Tokenizer.from_dir(GOLDEN / name))
    with safe_open(GOLDEN / name / "golden.safetensors", "pt") as golden:
        for field in NAMES:
            assert torch.equal(getattr(got, field), golden.get_tensor(f"engram.{field}")), field


def test_primes_reproduce_the_published_table_sizes() -> None:
    first, second = engram_primes(2, 16_000_000, 4, 8)
    assert first[:3] == [16000057, 16000079, 16000081]
    assert (first[-1], sum(first)) == (16000463, 384006168)
    assert (second[0], second[-1], sum(second)) == (16000477, 16000889, 384016682)


def test_multipliers_reproduce_the_published_numbers() -> None:
    assert engram_multipliers(1, 99092, 4) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert engram_multipliers(14, 99092, 4) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


@pytest.mark.parametrize("start", [2, 3, 41, 61])
def test_small_primes_are_prime_distinct_and_not_below_the_start(start: int) -> None:
    primes = [p for layer in engram_primes(2, start, 3, 2) for p in layer]
    assert primes == sorted(set(primes))
    assert primes[0] >= start
    assert all(p % d for p in primes for d in range(2, p))


def test_tokens_that_read_alike_share_a_key() -> None:
    texts = [
        "the",
        "The",
        " THE ",
        "thé",
        "ﬁne",
        "fine",
        "２",
        "2",
        "\t",
        " ",
        "\n\r ",
        "a\t b",
        "A B",
        "\u0301",
        "́ ",
        "Σ",
        "ς",
    ]
    assert compress_vocabulary(Texts(texts)).tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 3, 6, 7]


def test_incomplete_characters_keep_their_spelling() -> None:
    # two halves of one character decode alike, to U+FFFD, and must stay apart
    assert compress_vocabulary(Spellings(["Ã", "ã", "Ã©", "e"])).tolist() == [0, 1, 2, 2]


def test_ids_without_a_token_count_as_the_pad_token() -> None:
    vocabulary = Texts([*DATA["quant"]["spellings"][:3], "", "x"])
    assert compress_vocabulary(vocabulary).tolist() == [0, 1, 2, -1, 3]
    got = EngramConstants.build(text_config(vocab_size=8, engram_compressed_vocab_size=4), vocabulary)
    assert got.token_map.tolist() == [0, 1, 2, 2, 3, 2, 2, 2]


def test_another_number_of_keys_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        EngramConstants.build(text_config(engram_compressed_vocab_size=99092), quant_vocabulary())
    message = str(caught.value)
    assert "engram_compressed_vocab_size: is 99092, but the 384 tokens of the tokenizer compress to 331 keys" in message
    assert "use the tokenizer.json that belongs to this checkpoint" in message


def test_a_pad_id_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="engram_pad_token_id: 390 is not a token of the tokenizer"):
        EngramConstants.build(text_config(vocab_size=400, engram_pad_token_id=390), quant_vocabulary())


def test_offsets_cut_a_table_into_the_parts_of_its_columns() -> None:
    got = EngramConstants.build(text_config(), quant_vocabulary())
    assert (got.offsets[:, 1:] == (got.offsets + got.primes)[:, :-1]).all()
    assert (got.offsets + got.primes)[:, -1].tolist() == text_config().engram_num_embeddings
    assert np.all(got.multipliers.numpy() % 2 == 1)
    assert (got.multipliers * (got.num_keys - 1) > 0).all()
