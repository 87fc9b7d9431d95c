"""Text from token ids as they arrive, never half a character.

Works on bytes: a token may end inside a character, so what is incomplete waits for the next token. The prompt is never
decoded again; only the unfinished bytes at its end matter, and they are handed over once. Looking for stop strings is
left to the caller, who finds in `offsets` which token a text position belongs to.
"""

import codecs
from collections.abc import Collection, Iterable, Sequence

from deepinfer.core.tokenizer import Tokenizer

_MAX_PENDING_BYTES = 3  # a UTF-8 character has at most four bytes


class IncrementalDetokenizer:
    """Feeds on token ids, gives back text that will not change any more.

    The pieces joined, with `finish()` last, equal `tokenizer.decode` of all ids at once. Where the prompt ends inside
    a character, those first bytes count as fed: the character appears whole if the ids complete it, and a prompt's
    own broken bytes are never shown.

    Args:
        tokenizer: where a token's bytes come from.
        skip_special_tokens: whether control tokens leave no text.
        keep_ids: control tokens that are shown all the same (an output parser looks for some).
        prompt_tail_ids: the prompt's ids, or at least its last three; empty when output starts on its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        keep_ids: Collection[int] = frozenset(),
        prompt_tail_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.hidden_ids(skip_special_tokens, keep_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_bytes = _unfinished_bytes(tokenizer, prompt_tail_ids)
        self._finished = False
        self.num_chars: int = 0
        """Characters given out so far."""
        self.offsets: list[int] = []
        """Per fed token, how many characters the text had once it was in: the first `i + 1` ids give
        `text[:offsets[i]]`. The token that completes a text position `p` is the first with `offsets[i] >= p`."""

    def feed(self, ids: Iterable[int]) -> str:
        """Take the next ids, one or several, and return the text they complete (maybe empty).

        Raises:
            RuntimeError: `finish` was called before.
        """
        if self._finished:
            raise RuntimeError("feed after finish: a detokenizer serves one sequence")
        pieces = [self._feed_one(token_id) for token_id in ids]
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back: U+FFFD where the ids end inside a character. The last offset grows to cover it."""
        if self._finished:
            return ""
        self._finished = True
        piece = self._decoder.decode(b"", final=True)
        self.num_chars += len(piece)
        if self.offsets:
            self.offsets[-1] = self.num_chars
        return piece

    def _feed_one(self, token_id: int) -> str:
        data = b"" if token_id in self._hidden else self._tokenizer.id_to_bytes(token_id)
        if data and self._prompt_bytes:
            if _continues(self._prompt_bytes, data[:1]):
                data = self._prompt_bytes + data
            self._prompt_bytes = b""
        piece = self._decoder.decode(data)
        self.num_chars += len(piece)
        self.offsets.append(self.num_chars)
        return piece


def _unfinished_bytes(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bytes:
    """The bytes of the character that the prompt ends in the middle of, if it does."""
    tail = b""
    for token_id in reversed(prompt_ids):
        # a control token ends whatever stood before it
        if len(tail) >= _MAX_PENDING_BYTES or token_id in tokenizer.special_ids:
            break
        tail = tokenizer.id_to_bytes(token_id) + tail
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    pending, _ = decoder.getstate()
    return bytes(pending)


def _continues(unfinished: bytes, byte: bytes) -> bool:
    """Whether `byte` is a legal next byte of the character begun by `unfinished`."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(unfinished + byte)
    except UnicodeDecodeError:
        return False
    return True
