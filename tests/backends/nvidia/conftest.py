"""What needs a process of its own, once per session: interpreted cases, and kernels compiled for each generation."""

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


def _in_parts(script: str, folder: Path, extra: Sequence[str], env: dict[str, str]) -> list[dict[str, Any]]:
    """Run a script over all ops in two processes, and give what they wrote."""
    names = sorted(defined_ops())
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
    """Results of interpreted cases."""
    pytest.importorskip("triton")
    return _in_parts("emulated_worker.py", tmp_path_factory.mktemp("emulated"), (), {"TRITON_INTERPRET": "1"})


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Facts about kernels compiled for sm_90a, sm_100a and sm_103a."""
    pytest.importorskip("triton")
    return _in_parts("compile_worker.py", tmp_path_factory.mktemp("compiled"), ("90,100,103",), {})
