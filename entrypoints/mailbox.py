"""What is new about a request, on its way from the engine's thread to the coroutine that consumes it.

A mailbox holds one piece. What comes before it is taken is added to it, so a consumer that never looks costs no more
memory than the answer itself, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import threading

from deepinfer.core.outputs import Logprob, RequestOutput
from deepinfer.entrypoints.stream_output import StreamOutput, extend, part_of, with_choices


class Mailbox:
    """One request's news. Made in the event loop that will take them; `put` and `fail` are the engine's thread's.

    Args:
        only_whole: there is no news before the whole result.
    """

    def __init__(self, only_whole: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self._only_whole = only_whole
        self._lock = threading.Lock()
        self._arrived = asyncio.Event()
        self._taken: dict[int, tuple[int, int]] = {}
        self._complete: set[int] = set()
        self._has_scores = False
        self._piece: StreamOutput | None = None
        self._failure: Exception | None = None

    def put(self, output: RequestOutput) -> bool:
        """Add what is new in a live result since the last call.

        Returns:
            Whether the consumer has to be woken (`wake`, in its loop): what was there before is taken.
        """
        if self._only_whole and not output.finished:
            return False
        news = self._news(output)
        with self._lock:
            first = self._piece is None
            if self._piece is None:
                self._piece = news
            else:
                extend(self._piece, news)
                self._piece.delta += news.delta
        return first

    def fail(self, error: Exception) -> None:
        """Nothing more will come: what is there may still be taken, then `take` raises. The consumer must be woken."""
        with self._lock:
            self._failure = error

    def wake(self) -> None:
        """Let the consumer look; called in its event loop."""
        self._arrived.set()

    async def take(self) -> StreamOutput:
        """Wait for news and take them: the new tokens, text and logprobs of the choices that have some."""
        while True:
            with self._lock:
                piece, self._piece = self._piece, None
                if piece is not None:
                    return piece
                if self._failure is not None:
                    raise self._failure
                self._arrived.clear()  # `wake` runs in this thread, so none is lost
            await self._arrived.wait()

    def _news(self, output: RequestOutput) -> StreamOutput:
        choices = []
        delta = ""
        for choice in output.outputs:
            so_far = len(choice.token_ids), len(choice.text)
            is_running = choice.finish_reason is None
            if choice.index in self._complete or (is_running and self._taken.get(choice.index) == so_far):
                continue
            part = part_of(choice, *self._taken.get(choice.index, (0, 0)))
            self._taken[choice.index] = so_far
            if not is_running:
                self._complete.add(choice.index)
            if choice.index == 0:
                delta = part.text
            choices.append(part)
        news = with_choices(output, choices)
        news.delta = delta
        news.prompt_logprobs = self._new_scores(output)
        return news

    def _new_scores(self, output: RequestOutput) -> list[dict[int, Logprob] | None] | None:
        """The prompt's logprobs, once: as soon as they grow no more."""
        scores = output.prompt_logprobs
        if scores is None or self._has_scores or not (output.finished or len(scores) == len(output.prompt_token_ids)):
            return None
        self._has_scores = True
        return list(scores)
