"""Text to token ids and back, around a checkpoint's `tokenizer.json`.

Owns three things the `tokenizers` library leaves open. Control tokens typed by a user stay ordinary text unless the
caller says otherwise. Every token has exact bytes, so text that arrives token by token can be joined without guessing.
And a token the checkpoint marks as control is never shown by accident. Which control tokens a prompt is made of is a
model's business (`models/*/chat.py`); holding back half a character is `core/detokenizer.py`'s.
"""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import tokenizers

TOKENIZER_FILE = "tokenizer.json"

_FULLWIDTH_BAR = "\uff5c"  # marks control tokens in vocabularies that forget to flag them special


class TokenizerError(ValueError):
    """A tokenizer file cannot be used, or a token was asked for that the vocabulary does not hold."""


class Tokenizer:
    """A byte-level BPE vocabulary with its control tokens kept apart.

    Thread-safe after construction: nothing here changes.

    Args:
        definition: the parsed `tokenizer.json`.
        bos: id or text of the token that begins a sequence.
        eos: id or text of the token that ends one.
        pad: id or text of the padding token.
        source: what error messages call this tokenizer, normally its file.

    Raises:
        TokenizerError: the definition is not a byte-level BPE the library accepts, or bos, eos or pad is not in it.
    """

    def __init__(
        self,
        definition: dict[str, Any],
        *,
        bos: int | str = "<｜begin▁of▁sentence｜>",
        eos: int | str = "<｜end▁of▁sentence｜>",
        pad: int | str = "<｜▁pad▁｜>",
        source: str = "tokenizer",
    ) -> None:
        self._source = source
        _check_byte_level(definition, source)
        control, plain_added = _added_tokens(definition, source)
        self._full = _build(_without_tokens(definition, frozenset()), source)
        self._plain = _build(_without_tokens(definition, control), source)

        self._ids: dict[str, int] = self._full.get_vocab(with_added_tokens=True)
        self._spellings: dict[int, str] = {token_id: text for text, token_id in self._ids.items()}
        self.vocab_size: int = max(self._spellings, default=-1) + 1
        self.special_ids: frozenset[int] = frozenset(self._ids[text] for text in control)
        as_they_read = control | plain_added
        self._bytes: dict[int, bytes] = {
            token_id: text.encode() if text in as_they_read else _spelling_to_bytes(text)
            for token_id, text in self._spellings.items()
        }
        self.bos_token_id: int = self._resolve(bos, "bos")
        self.eos_token_id: int = self._resolve(eos, "eos")
        self.pad_token_id: int = self._resolve(pad, "pad")

    @classmethod
    def from_dir(
        cls,
        path: str | Path,
        *,
        bos: int | str = "<｜begin▁of▁sentence｜>",
        eos: int | str = "<｜end▁of▁sentence｜>",
        pad: int | str = "<｜▁pad▁｜>",
    ) -> "Tokenizer":
        """Load the tokenizer of a checkpoint folder.

        Args:
            path: the folder that holds `tokenizer.json`.
            bos: id (as `config.json` gives it) or text of the token that begins a sequence.
            eos: id or text of the token that ends one.
            pad: id or text of the padding token.

        Raises:
            TokenizerError: the file is absent, unreadable, not JSON or not a usable tokenizer; the message names it.
        """
        file = Path(path) / TOKENIZER_FILE
        try:
            definition = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise TokenizerError(f"{file}: no such file; a checkpoint folder needs its {TOKENIZER_FILE}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise TokenizerError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(definition, dict):
            raise TokenizerError(f"{file}: expected a JSON object, got {type(definition).__name__}")
        try:
            return cls(definition, bos=bos, eos=eos, pad=pad, source=str(file))
        except RecursionError as error:
            raise TokenizerError(f"{file}: is nested too deeply to be a tokenizer") from error

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Turn text into token ids; nothing is added in front or behind.

        Args:
            text: any string. Surrogate pairs are joined, and a surrogate without its partner becomes U+FFFD.
            parse_special: whether the spelling of a control token stands for that token. Leave it off for anything a
                user typed: its ids are then never in `special_ids`, and decode to the same text.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        chosen = self._full if parse_special else self._plain
        return chosen.encode(text, add_special_tokens=False).ids

    def token_to_id(self, text: str) -> int | None:
        """The id whose vocabulary spelling is `text`, or None. Control tokens are spelled as they read."""
        return self._ids.get(text)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, control tokens as their text.

        An id without a token (a padded row of the output matrix) has no bytes, so that a model which samples one
        cannot stop the engine.
        """
        return self._bytes.get(token_id, b"")

    def raw_spelling(self, token_id: int) -> str:
        """The token as the vocabulary spells it, one letter of the byte alphabet per byte.

        Raises:
            TokenizerError: no token has this id.
        """
        try:
            return self._spellings[token_id]
        except KeyError:
            raise TokenizerError(f"{self._source}: no token has id {token_id}") from None

    def decode_single_with_special(self, token_id: int) -> str:
        """The text of one token on its own, control tokens included; U+FFFD for bytes that are no whole character."""
        return self.id_to_bytes(token_id).decode("utf-8", "replace")

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, *, keep_ids: Collection[int] = frozenset()
    ) -> str:
        """Turn token ids into text; invalid UTF-8 becomes U+FFFD.

        Args:
            ids: token ids in order.
            skip_special_tokens: whether the ids of `special_ids` leave no text.
            keep_ids: special ids that are shown all the same, for an output parser that looks for them.
        """
        hidden = self.hidden_ids(skip_special_tokens, keep_ids)
        return b"".join(self.id_to_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")

    def hidden_ids(self, skip_special_tokens: bool, keep_ids: Collection[int] = frozenset()) -> frozenset[int]:
        """The ids that `decode` with these arguments shows nothing for."""
        return self.special_ids.difference(keep_ids) if skip_special_tokens else frozenset()

    def _resolve(self, token: int | str, role: str) -> int:
        token_id = self._ids.get(token) if isinstance(token, str) else token
        if token_id is None or token_id not in self._spellings:
            raise TokenizerError(f"{self._source}: the {role} token {token!r} is not in the vocabulary")
        return token_id


def _check_byte_level(definition: dict[str, Any], source: str) -> None:
    model = definition.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise TokenizerError(f"{source}: expected a BPE model with a vocabulary")
    if model.get("byte_fallback") or '"ByteLevel"' not in json.dumps(definition.get("decoder")):
        raise TokenizerError(f"{source}: expected a byte-level vocabulary (decoder ByteLevel)")


def _added_tokens(definition: dict[str, Any], source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Texts of the control tokens, and of the other tokens that were added beside the BPE vocabulary.

    The `special` flag alone is not trusted: published vocabularies leave it off for some markers such as `<think>`.
    """
    try:
        added = definition.get("added_tokens") or ()
        flags = {str(token["content"]): bool(token["special"]) for token in added if token["id"] >= 0}
    except (TypeError, KeyError, ValueError) as error:
        raise TokenizerError(f"{source}: added_tokens holds an entry without id, content or special") from error
    control = frozenset(
        text
        for text, special in flags.items()
        if special or _FULLWIDTH_BAR in text or (text.startswith("<") and text.endswith(">"))
    )
    return control, frozenset(flags) - control - definition["model"]["vocab"].keys()


def _without_tokens(definition: dict[str, Any], removed: frozenset[str]) -> dict[str, Any]:
    """A copy of the definition in which no text can reach the removed tokens and every other token keeps its id."""
    model = dict(definition["model"])
    added = [token for token in definition.get("added_tokens") or () if token["content"] not in removed]
    # the library numbers added tokens by itself unless the vocabulary holds them
    numbered = {token["content"]: token["id"] for token in added} | model["vocab"]
    model["vocab"] = {text: token_id for text, token_id in numbered.items() if text not in removed}
    model["merges"] = [merge for merge in model.get("merges") or () if not removed.intersection(_merge_tokens(merge))]
    # a template may name removed tokens, and prompts are never wrapped by it anyway
    return {**definition, "model": model, "added_tokens": added, "post_processor": None}


def _merge_tokens(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def _build(definition: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception for every fault
        raise TokenizerError(f"{source}: not a usable tokenizer: {error}") from error


def _byte_alphabet() -> dict[str, int]:
    """Letter to byte of the byte-level alphabet: printable Latin-1 stands for itself, the rest from U+0100 upwards.

    Source: the byte encoder of GPT-2's vocabulary, which every byte-level BPE shares.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()


def _spelling_to_bytes(spelling: str) -> bytes:
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in spelling)
    except KeyError:  # not written in the byte alphabet, so it is its own text
        return spelling.encode()
