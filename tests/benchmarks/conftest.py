"""Benchmarks are programs, no part of the installed package: their folder is where they import each other from."""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors gain nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
