"""The whole contract in the twin: every case of every op, and one layer of each kind, through the kernels' own text."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepinfer.ops.catalog import defined_ops

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++"),
]

KINDS = 7
"""Kinds of layers of the model."""


@pytest.fixture(scope="module")
def reports(whole_contract: Mapping[Path, subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Reports of the ops and of the layers."""
    found = {}
    for folder, process in whole_contract.items():
        assert process.wait() == 0, (folder / "said.txt").read_text(encoding="utf-8")[-4000:]
        found[folder.name.rstrip("0123456789")] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def test_every_case_of_every_op_passes_through_a_kernel(reports) -> None:
    results = [entry for entry in reports["ops"]["results"] if entry["level"] == 1]
    assert {entry["op"] for entry in results} == set(defined_ops()) and len(results) > 1200
    assert {entry["status"] for entry in results} - {"slow"} == {"pass"}  # how fast a twin is says nothing
    assert all(entry["native"] for entry in results), [e["op"] for e in results if not e["native"]]


def test_one_layer_of_each_kind_agrees_with_the_reference(reports) -> None:
    results = [entry for entry in reports["layers"]["results"] if entry["level"] == 2]
    assert len({entry["op"] for entry in results}) == KINDS
    assert {entry["status"] for entry in results} == {"pass"}
