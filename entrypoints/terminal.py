"""What accompanies a job on standard output and error; where these are gone or full, the job does not notice."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

from rich.console import Console


class Forgiving:
    """A stream that drops what its stream does not take, as after the reader of a pipe has gone.

    Args:
        stream: None drops everything, as where the process has no such stream.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    @property
    def encoding(self) -> str:
        """Of the text."""
        return getattr(self._stream, "encoding", None) or "utf-8"


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console whose failures are nobody's."""
    return Console(file=_as_file(Forgiving(sys.stderr if stderr else sys.stdout)), quiet=quiet, highlight=False)


def say(text: str) -> None:
    """Print a line on standard error."""
    stream = Forgiving(sys.stderr)
    stream.write(f"{text}\n")
    stream.flush()


def settle_streams() -> None:
    """Flush standard output and error; what they do not take is dropped.

    The interpreter flushes them once more when it ends, and would end with a status of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _as_file(stream: Any) -> TextIO:
    file: TextIO = stream
    return file
