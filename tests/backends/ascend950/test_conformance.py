"""The whole contract in the twin: every case of every op, and one layer of each kind, through the kernels' own text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer.ops.catalog import defined_ops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++"),
]

SHARDS = Path(__file__).resolve().parents[3] / "tools" / "conformance_shards.py"
KINDS = 7
"""Kinds of layers of the model."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Reports of the ops and of the layers, made side by side."""
    ops, layers = (tmp_path_factory.mktemp(name) for name in ("ops", "layers"))
    emulated = ("--backend", "ascend950", "--emulate", "--report")
    levels = ("--level", "2", "--op", "layer: *", "--quiet")
    commands = {
        ops: (str(SHARDS), *emulated, str(ops), "--jobs", "1"),
        layers: ("-m", "deepinfer.entrypoints.cli", "conformance", *emulated, str(layers), *levels),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = {
        folder: subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for folder, command in commands.items()
    }
    found = {}
    for folder, process in started.items():
        said, _ = process.communicate()
        assert process.returncode == 0, said.decode()[-4000:]
        found[folder.name.rstrip("0123456789")] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def test_every_case_of_every_op_passes_through_a_kernel(reports) -> None:
    results = [entry for entry in reports["ops"]["results"] if entry["level"] == 1]
    assert {entry["op"] for entry in results} == set(defined_ops()) and len(results) > 1200
    assert {entry["status"] for entry in results} == {"pass"}
    assert all(entry["native"] for entry in results), [e["op"] for e in results if not e["native"]]


def test_one_layer_of_each_kind_agrees_with_the_reference(reports) -> None:
    results = [entry for entry in reports["layers"]["results"] if entry["level"] == 2]
    assert len({entry["op"] for entry in results}) == KINDS
    assert {entry["status"] for entry in results} == {"pass"}
