"""Progress of many requests: a bar on a terminal, a plain line now and then elsewhere.

Written to standard error, so that standard output stays for results.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deepinfer.entrypoints.terminal import console as forgiving_console

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0


class ProgressView:
    """Shows requests done, tokens, tokens per second and time left.

    Args:
        total: requests in all; None when unknown.
        initial: requests that were done before, left out of rates.
        console: where to draw; by default standard error.
        line_seconds: how often a line is written where there is no terminal.
    """

    def __init__(
        self,
        total: int | None,
        *,
        initial: int = 0,
        console: Console | None = None,
        line_seconds: float = _LINE_SECONDS,
    ) -> None:
        self._console = console or forgiving_console(stderr=True)
        self._total = total
        self._initial = initial
        self._line_seconds = line_seconds
        self._started = self._shown = time.monotonic()
        self._done = initial
        self._tokens = 0
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressView:
        self._started = self._shown = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("requests"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[tokens]:,} tokens  {task.fields[rate]:,.1f}/s"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=self._total, completed=self._initial, tokens=0, rate=0.0)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show(time.monotonic())
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, tokens: int) -> None:
        """Say how far things are.

        Args:
            done: requests done, those of `initial` included.
            tokens: tokens generated since the start.
        """
        self._done, self._tokens = done, tokens
        now = time.monotonic()
        if now - self._shown >= (_REDRAW_SECONDS if self._bar is not None else self._line_seconds):
            self._show(now)

    def line(self) -> str:
        """The state as a line of text."""
        elapsed = time.monotonic() - self._started
        of = f"/{self._total:,}" if self._total is not None else ""
        text = (
            f"{self._done:,}{of} requests, {self._tokens:,} tokens, {self._tokens / max(elapsed, 1e-9):,.1f} tokens/s"
        )
        fresh = self._done - self._initial
        if self._total is not None and fresh > 0 and self._done < self._total:
            text += f", {_clock(elapsed / fresh * (self._total - self._done))} left"
        return text

    def _show(self, now: float) -> None:
        self._shown = now
        if self._bar is None:
            self._console.print(self.line(), highlight=False, soft_wrap=True)
        else:
            rate = self._tokens / max(now - self._started, 1e-9)
            self._bar.update(self._task, completed=self._done, tokens=self._tokens, rate=rate)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
