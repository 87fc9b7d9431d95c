"""The output of a batch: an append-only file of lines that survives `kill -9`.

A line is written by one `write` to a descriptor in append mode, so it is there as a whole or, where the kernel was
interrupted, cut off at the end of the file; what is cut off is removed when the file is opened next. One process at a
time holds the file. The page cache outlives the process, so a sync is only due against power loss: every few seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.core.errors import DeepInferError
from deepinfer.entrypoints.openai_batch import dump_line, record_key

_SYNC_SECONDS = 5.0


class ResultFileError(DeepInferError):
    """The output cannot be used as it is. Remedy: choose another file, or wait for the run that holds it."""


class ResultFile:
    """Results on disk, and which items they answer.

    Args:
        path: created if absent; its folder must exist.
        overwrite: do not look at what is there; `clear` removes it, once the run is sure to begin.

    Attributes:
        answered: ids, and line numbers of items without one, that have a line from an earlier run.
        num_errors: lines among these that are errors.
        num_cut: bytes of an incomplete last line that were removed.

    Raises:
        ResultFileError: another process holds the file, or a line in it is not a result; nothing was changed.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.answered: set[str | int] = set()
        self.num_errors = 0
        self.num_cut = 0
        self._synced = time.monotonic()
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ResultFileError(f"{self.path}: cannot be opened for writing: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ResultFileError(f"{self.path}: is no regular file; results need one, to be resumed")
            self._lock()
            if not overwrite:
                self._read()
            _sync_folder(self.path)
        except BaseException:
            os.close(self._fd)
            raise

    def clear(self) -> None:
        """Remove all results."""
        os.ftruncate(self._fd, 0)
        self.answered.clear()
        self.num_errors = 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one result.

        Raises:
            ResultFileError: the file takes no more (a full disk); it ends as it did before.
        """
        line = dump_line(record)
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise ResultFileError(f"{self.path}: cannot be written: {error.strerror}") from error
        if written != len(line):
            os.ftruncate(self._fd, size)
            raise ResultFileError(
                f"{self.path}: only {written} of {len(line)} bytes could be written; is the disk full?"
            )
        if time.monotonic() - self._synced >= _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        os.fsync(self._fd)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and let go of the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                os.fsync(fd)
            os.close(fd)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResultFileError(f"{self.path}: another run is writing this file; wait for it, or stop it") from error

    def _read(self) -> None:
        """Note what is answered, and remove an incomplete last line; a file that is not ours is left as it is."""
        end = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self.num_cut = len(line)
                    break
                self._note(number, line)
                end += len(line)
        if self.num_cut:
            os.ftruncate(self._fd, end)

    def _note(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        key = record_key(record)
        if key is None:
            raise ResultFileError(f"{self.path}: line {number} is not a result of a batch; choose another output file")
        self.answered.add(key)
        self.num_errors += record.get("response") is None


def _sync_folder(path: Path) -> None:
    """Make a file that was just created outlive a power loss."""
    with contextlib.suppress(OSError):
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
