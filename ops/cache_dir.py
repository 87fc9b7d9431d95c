"""Where what a machine made for itself is kept between runs: compiled kernels, verdicts."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`DEEPINFER_CACHE_DIR`, else `deepinfer` in the user's cache folder; an empty variable counts as none."""
    named = os.environ.get("DEEPINFER_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer"
