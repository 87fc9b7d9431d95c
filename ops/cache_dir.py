"""Where what a machine made for itself is kept between runs: compiled kernels, verdicts."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


def cache_dir() -> Path:
    """`DEEPINFER_CACHE_DIR`, else `deepinfer` in the user's cache folder; an empty variable counts as none."""
    named = os.environ.get("DEEPINFER_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer"


def keep_file(path: Path, content: bytes) -> None:
    """Write a file whole: whoever reads or writes it at the same moment sees the old one or a new one, never a part.

    What is kept is made again where it is not there, so a caller should go on without it, and say so.

    Raises:
        OSError: the folder cannot be made or written, or is full; nothing of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
