"""The tokenizer: byte-level BPE over the tasks' own text and natural text, with the family's control tokens.

Digits, Chinese characters and spaces are pieces of their own: a word reads the same behind a space, a quote or the
start of a line, so what is copied is copied token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.core.tokenizer import TOKENIZER_FILE
from deepinfer.core.tokenizer import Tokenizer as Encoder
from deepinfer.entrypoints.eval_tasks import TASKS, Item, make_item
from deepinfer.models.deepseek_v41_flash.chat import encode_chat
from deepinfer.models.deepseek_v41_flash.tiny_tokenizer import build_tokenizer
from tools.train_tiny.corpus import natural_text

_PIECES = r"\d|\p{Han}|[\p{L}&&[^\p{Han}]]+|\s|[^\s\p{L}\d]+"
_CORPUS_SEED = 977
_FIRST_IDS = 3
"""bos, eos and pad begin the vocabulary; the other control tokens end it."""


def train_tokenizer(vocab_size: int, items_per_task: int = 300) -> Tokenizer:
    """A tokenizer of `vocab_size` ids, control tokens included.

    Raises:
        ValueError: so few ids that bytes and control tokens do not fit.
    """
    control = _control_tokens()
    room = vocab_size - len(control) + _FIRST_IDS
    if room < 256 + _FIRST_IDS:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for 256 bytes and {len(control)} control tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=room,
        special_tokens=[_added(text) for text in control[:_FIRST_IDS]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(items_per_task), trainer)
    tokenizer.add_special_tokens([_added(text) for text in control[_FIRST_IDS:]])
    return tokenizer


def load_encoder(folder: Path, vocab_size: int) -> Encoder:
    """The tokenizer of a run, made on its first start and kept in its folder."""
    file = folder / TOKENIZER_FILE
    if not file.exists():
        file.write_text(train_tokenizer(vocab_size).to_str(), encoding="utf-8")
    return Encoder.from_dir(folder)


def _corpus(items_per_task: int) -> Iterator[str]:
    for task in TASKS:
        for number in range(items_per_task):
            yield from _ordinary_text(make_item(task, "train", _CORPUS_SEED, number))
    for source in natural_text():
        yield from source.paragraphs


def _ordinary_text(item: Item) -> Iterator[str]:
    prompt = encode_chat(item.answered_request, add_generation_prompt=False)
    return (segment.text for segment in prompt.segments if not segment.is_control)


def _control_tokens() -> list[str]:
    added = build_tokenizer(384).get_added_tokens_decoder()
    return [added[token_id].content for token_id in sorted(added)]


def _added(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)
