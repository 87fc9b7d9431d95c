"""The text of one answer as it grows: never half a character, never a piece of a stop string.

Each token is looked at by itself, however many a step emits, so a stop string ends the answer at the token that
completes it. Text that may turn out to be the beginning of a stop string is held back until that is decided: what a
stream has shown is never taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deepinfer.core.detokenizer import IncrementalDetokenizer
from deepinfer.core.outputs import CompletionOutput
from deepinfer.core.tokenizer import Tokenizer


class AnswerText:
    """Feeds on token ids, gives back text that will not change any more, and finds stop strings.

    Args:
        detokenizer: fresh.
        stop: strings that end the answer.
        include_stop: leave the stop string itself in the text.
        min_tokens: a stop string that an earlier token completes ends nothing.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self._num_tokens = 0
        self.stopped_by: str | None = None
        """The stop string that was found; text behind it is dropped."""

    def feed(self, token_id: int) -> str:
        """Take the next token and return the text that may be shown now (maybe empty)."""
        self._num_tokens += 1
        new = self._detokenizer.feed((token_id,))
        if not self._stop or self.stopped_by is not None:
            return new if self.stopped_by is None else ""
        before = len(self._held)
        self._held += new
        if self._num_tokens >= self._min_tokens and new:
            found = self._find(before)
            if found is not None:
                start, self.stopped_by = found
                shown = self._held[: start + len(self.stopped_by) if self._include_stop else start]
                self._held = ""
                return shown
        return self._release(len(self._held) - self._num_held())

    def finish(self) -> str:
        """Return what was held back, a broken last character as U+FFFD; nothing behind a stop string."""
        rest = self._detokenizer.finish()
        return "" if self.stopped_by is not None else self._release(len(self._held)) + rest

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _find(self, before: int) -> tuple[int, str] | None:
        """Start and text of the stop string that ends first behind `before`; of several that end there the longest."""
        found = []
        for stop in self._stop:
            start = self._held.find(stop, max(before - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _num_held(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class LazyText:
    """Text that nothing in the engine depends on, made of all new tokens at once when somebody reads it.

    Args:
        detokenizer: fresh.
        completion: the answer, whose token ids grow.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, completion: CompletionOutput) -> None:
        self._detokenizer = detokenizer
        self._completion = completion
        self._num_fed = 0
        self._end: int | None = None
        self.is_finished = False
        """No token will be added; the next `read` returns all that is left."""

    def read(self) -> str:
        """The text since the call before that will not change any more (maybe empty)."""
        ids = self._completion.token_ids[self._num_fed : self._end]
        self._num_fed += len(ids)
        text = self._detokenizer.feed(ids)
        return text + self._detokenizer.finish() if self.is_finished else text

    def leave_out_last(self) -> None:
        """The last token ends the answer and leaves no text."""
        self._end = len(self._completion.token_ids) - 1

    def finish(self) -> None:
        """The answer is complete."""
        self.is_finished = True


def text_with(tokenizer: Tokenizer, completion: CompletionOutput, keep_ids: Collection[int]) -> str:
    """The text of a finished answer with some control tokens shown, ending where `completion.text` ends.

    Args:
        tokenizer: the engine's.
        completion: finished.
        keep_ids: control tokens to show, for a parser that looks for them.
    """
    shown = IncrementalDetokenizer(tokenizer, keep_ids=keep_ids)
    text = shown.feed(completion.token_ids) + shown.finish()
    for skip_special_tokens in (True, False):  # as its request had it
        plain = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        whole = plain.feed(completion.token_ids) + plain.finish()
        if whole.startswith(completion.text):
            break
    else:
        return text  # its first character was begun by the prompt
    end = len(completion.text)
    if end == len(whole) or (end == 0 and completion.stop_reason is None):  # complete, or no text was made
        return text
    place = next(i for i, offset in enumerate(plain.offsets) if offset > end)
    before, kept = (plain.offsets[place - 1], shown.offsets[place - 1]) if place else (0, 0)
    return text[: kept + end - before]
