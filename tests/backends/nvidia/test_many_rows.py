"""Forms of moving kernels that many rows take, in the interpreter: no small case of their contracts has so many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernel_launches import backend_of

from deepinfer.backends.nvidia.ahead import compile_ahead
from deepinfer.backends.nvidia.launch import recording


def test_they_give_what_few_rows_give() -> None:
    worker = Path(__file__).parent / "many_rows_worker.py"
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [90, 100, 103])
def test_they_compile_without_spills(capability: int) -> None:
    backend_of(capability)
    from deepinfer.backends.nvidia import moe

    rows = 2048
    ids, weights = torch.zeros(rows, 6, dtype=torch.int64), torch.zeros(rows, 6)
    with recording() as launches:
        moe.ep_dispatch(torch.zeros(rows, 5120, dtype=torch.bfloat16), ids, weights, 384)
    made = [compile_ahead(launch, capability) for launch in launches]
    assert [entry.name for entry in made] == ["_count", "_starts", "_spread"]
    assert [entry.spilled_bytes + entry.stack_bytes for entry in made] == [0] * len(made)
