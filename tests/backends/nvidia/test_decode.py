"""Rows and scales decoded ahead of products, interpreted in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_rows_and_scales_are_what_their_codes_stand_for() -> None:
    worker = Path(__file__).parent / "decode_worker.py"
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
