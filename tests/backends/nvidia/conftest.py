"""What needs a process of its own, once per session: interpreted cases, and kernels compiled and checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepinfer.ops.catalog import defined_ops

HERE = Path(__file__).parent
if str(HERE) not in sys.path:  # test modules are imported by path, so what they share must be found by name
    sys.path.insert(0, str(HERE))
WORKERS = 2
BLACKWELL_OPS = ("linear_mx", "moe_grouped_gemm", "sparse_attn")
"""Ops for which Blackwell has Triton kernels of its own."""


def _in_parts(
    script: str, folder: Path, extra: Sequence[str], env: dict[str, str], ops: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Run a script over ops (all of them by default) in two processes, and give what they wrote."""
    names = sorted(defined_ops() if ops is None else ops)
    started = []
    for part in range(WORKERS):
        output = folder / f"{part}.json"
        command = [sys.executable, str(HERE / script), str(output), ",".join(names[part::WORKERS]), *extra]
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, stderr=subprocess.PIPE)
        started.append((process, output))
    entries: list[dict[str, Any]] = []
    for process, output in started:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()[-4000:]
        entries += json.loads(output.read_text())
    return entries


@pytest.fixture(scope="session")
def emulated_cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of interpreted cases of the kernels that both generations share."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("emulated")
    return _in_parts("emulated_worker.py", folder, ("cuda_sm90",), {"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="session")
def emulated_blackwell_cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of interpreted cases of the kernels that Blackwell alone has."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("emulated_blackwell")
    return _in_parts("emulated_worker.py", folder, ("cuda_sm100",), {"TRITON_INTERPRET": "1"}, BLACKWELL_OPS)


@pytest.fixture(scope="session")
def checked_kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the static verifier says of kernels for sm_100a."""
    pytest.importorskip("triton")
    pytest.importorskip("sentryward")
    return _in_parts("sentry_worker.py", tmp_path_factory.mktemp("checked"), (), {})


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Facts about kernels compiled for sm_90a, sm_100a and sm_103a."""
    pytest.importorskip("triton")
    return _in_parts("compile_worker.py", tmp_path_factory.mktemp("compiled"), ("90,100,103",), {})
