"""The output of a batch: an append-only file of lines that survives `kill -9`.

A line is written by one `write` to a descriptor in append mode, so it is there as a whole or, where the kernel was
interrupted, cut off at the end of the file; what is cut off is removed when the next run begins. One process at a
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
from deepinfer.entrypoints.openai_batch import begins_like_a_record, dump_line, record_key

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
        failed: those among these whose line is an error.
        num_cut: bytes of an incomplete last line, which `begin` removes.

    Raises:
        ResultFileError: another process holds the file, or a line in it is not a result; nothing was changed.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.answered: set[str | int] = set()
        self.failed: set[str | int] = set()
        self.num_cut = 0
        self._has_begun = False
        self._synced = time.monotonic()
        self._fd, self._is_new = self._open()
        try:
            if not overwrite:
                self._read()
            _sync_folder(self.path)
        except BaseException:
            os.close(self._fd)
            raise

    def begin(self) -> None:
        """Remove an incomplete last line, and keep the file even if nothing is written.

        Called once a run is sure to begin: until then nothing is changed.
        """
        if not self._has_begun:
            self._has_begun = True
            if self.num_cut:
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - self.num_cut)

    def clear(self) -> None:
        """Remove all results."""
        os.ftruncate(self._fd, 0)
        self._has_begun = True
        self.answered.clear()
        self.failed.clear()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one result.

        Raises:
            ResultFileError: the file takes no more (a full disk); it ends as it did before.
        """
        self.begin()
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
        """Sync and let go of the file; one that was created for a run that never began is removed."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if self._is_new and not self._has_begun:
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            with contextlib.suppress(OSError):
                os.fsync(fd)
            os.close(fd)

    def _open(self) -> tuple[int, bool]:
        """The file, locked, and whether it was created."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        while True:
            is_new = not os.path.lexists(self.path)
            try:
                fd = os.open(self.path, flags | os.O_CREAT | (os.O_EXCL if is_new else 0), 0o644)
            except FileExistsError:
                continue  # another run created it just now
            except OSError as error:
                raise ResultFileError(f"{self.path}: cannot be opened for writing: {error.strerror}") from error
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ResultFileError(f"{self.path}: is no regular file; results need one, to be resumed")
                self._lock(fd)
                if os.path.exists(self.path) and os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd, is_new
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its run never began, and removed it before the lock was had

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResultFileError(f"{self.path}: another run is writing this file; wait for it, or stop it") from error

    def _read(self) -> None:
        """Note what is answered, and an incomplete last line; a file that is not ours is refused."""
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    self._note(number, line)
                elif begins_like_a_record(line):
                    self.num_cut = len(line)
                else:
                    raise self._not_ours(number)

    def _not_ours(self, number: int) -> ResultFileError:
        return ResultFileError(f"{self.path}: line {number} is not a result of a batch; choose another output file")

    def _note(self, number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        key = record_key(record)
        if key is None:
            raise self._not_ours(number)
        self.answered.add(key)
        if record.get("response") is None:
            self.failed.add(key)


def _sync_folder(path: Path) -> None:
    """Make a file that was just created outlive a power loss."""
    with contextlib.suppress(OSError):
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
