"""The vocabulary as grammars see it: the bytes of each token, and how text is spelled in a grammar.

A control token is no text, whatever it looks like: it gets bytes that no text has, one code point beyond Unicode, so
that a string or a character class never lets it through, and a grammar reaches it by name only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from deepinfer.core.grammar.spec import StructuredOutputError
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.ops.show import shown

_BEYOND_UNICODE: Final = 0x110000
_MOST_CONTROL: Final = 0x1FFFFF - _BEYOND_UNICODE
"""Ids above it have no such code point; vocabularies are far smaller."""


class GrammarVocabulary:
    """Tokens of one model.

    Args:
        tokenizer: the text of tokens.
        vocab_size: ids run from 0 to `vocab_size` - 1; those that the tokenizer lacks are never allowed.
        eos_token_ids: ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._control = {
            text: token_id
            for token_id in sorted(tokenizer.special_ids)
            if token_id < min(vocab_size, _MOST_CONTROL) and (text := tokenizer.decode_single_with_special(token_id))
        }
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def token_bytes(self) -> list[bytes]:
        """The bytes of every id; b"" for one that no grammar may reach."""
        control = set(self._control.values())
        return [
            chr_beyond(token_id) if token_id in control else self._tokenizer.id_to_bytes(token_id)
            for token_id in range(self.vocab_size)
        ]

    def is_control(self, token_id: int) -> bool:
        """Whether an id is a control token."""
        return token_id in self._tokenizer.special_ids

    def token_id(self, name: str) -> int | None:
        """The id of a control token, None where there is none of this name."""
        return self._control.get(name)

    def literal(self, text: str) -> str:
        """Text as an EBNF expression; control tokens that are spelled in it stand for themselves."""
        parts = [
            f"Token({self._control[part]})" if part in self._control else quoted(part) for part in self._split(text)
        ]
        return " ".join(parts) or '""'

    def trigger(self, text: str) -> str:
        """The same as one EBNF string, as a dispatch wants it."""
        parts = [
            f"\\U{_BEYOND_UNICODE + self._control[part]:08x}" if part in self._control else quoted(part)[1:-1]
            for part in self._split(text)
        ]
        return f'"{"".join(parts)}"'

    def cuts_token(self, text: str, at: int) -> bool:
        """Whether a place in a text lies inside of a control token's name."""
        return bool(self._control) and any(m.start() < at < m.end() for m in self._control_pattern.finditer(text))

    def resolve(self, grammar: str) -> str:
        """An EBNF text with `Token("name")` replaced by `Token(id)`, and `Trigger("text")` by a dispatch's string.

        Raises:
            StructuredOutputError: no control token has this name.
        """

        def resolved(match: re.Match[str]) -> str:
            if match["text"] is not None:
                return self.trigger(match["text"])
            if match["name"] is None:
                return match[0]
            token_id = self._control.get(match["name"])
            if token_id is None:
                raise StructuredOutputError(f"grammar: this vocabulary has no control token {shown(match['name'])}")
            return f"Token({token_id})"

        return _STRING_OR_TOKEN.sub(resolved, grammar)

    def _split(self, text: str) -> list[str]:
        return [part for part in self._control_pattern.split(text) if part] if self._control else [text]


_STRING_OR_TOKEN = re.compile(
    r'\bToken\(\s*"(?P<name>[^"\\\n]+)"\s*\)|\bTrigger\("(?P<text>[^"\\\n]+)"\)'
    r'|"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|\#[^\n]*'
)
"""What may hold something that looks like a rule and is none; strings, classes and comments are left as they are."""
_NO_RULES: Final = ("Regex", "true", "false")
_NAME_OR_TEXT = re.compile(
    r'(?P<name>[A-Za-z_][\w-]*)(?!\w|-|\s*=)|"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|\#[^\n]*'
)


def chr_beyond(token_id: int) -> bytes:
    """The bytes that stand for a control token: a code point above Unicode's last, encoded as UTF-8 would go on."""
    code = _BEYOND_UNICODE + token_id
    return bytes([0xF0 | code >> 18, *(0x80 | code >> shift & 0x3F for shift in (12, 6, 0))])


def quoted(text: str) -> str:
    """Text as an EBNF string."""
    return '"' + "".join(_ESCAPES.get(letter) or _spelled(letter) for letter in text) + '"'


def renamed(grammar: str, prefix: str) -> str:
    """An EBNF text whose rules are called otherwise, so that it can stand beside another one; `root` is `{prefix}root`.

    Args:
        grammar: rules made of strings, classes, names, operators and `Regex`.
        prefix: put before every rule's name.
    """

    def named(match: re.Match[str]) -> str:
        return prefix + match[0] if match["name"] and match["name"] not in _NO_RULES else match[0]

    return _NAME_OR_TEXT.sub(named, grammar)


_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _spelled(letter: str) -> str:
    return letter if " " <= letter <= "~" else f"\\U{ord(letter):08x}"
