"""torch_npu's operators against the wheel itself: names, keywords, shapes and dtypes, and documented values.

A process with the unpacked wheel over a stub of CANN runs every provider's conformance cases on the host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer.backends.ascend950 import BACKEND, providers
from deepinfer.ops.backend import Backend

FOLDER = Path(__file__).parent
CALLED = set(re.findall(r"_npu\(\)\.(\w+)\(", Path(providers.__file__).read_text()))


@pytest.fixture(scope="module")
def report(npu_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the worker says."""
    folder = tmp_path_factory.mktemp("stub")
    program = [sys.executable, str(FOLDER / "npu_stub.py"), str(npu_wheel), str(folder)]
    built = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    environment = json.loads(built.stdout)
    done = subprocess.run(
        [sys.executable, str(FOLDER / "npu_worker.py")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.slow
def test_every_provider_passes_its_contract_with_the_documented_values(report: dict[str, Any]) -> None:
    assert len(report["verdicts"]) == 8
    failed = {name: detail for name, (passed, detail) in report["verdicts"].items() if not passed}
    assert not failed


def test_every_operator_named_is_called_with_its_own_schema(report: dict[str, Any]) -> None:
    assert set(report["calls"]) == CALLED


def test_results_have_the_shapes_and_dtypes_of_the_meta_functions(report: dict[str, Any]) -> None:
    assert not report["differences"]


def test_torch_npu_has_what_the_runtime_asks_of_it(report: dict[str, Any]) -> None:
    assert report["hccl options"]
    assert report["torch device"] == {
        "missing": [],
        "has a handle": True,
        "device": "npu:1",
        "queues": [True, True],
        "kept": True,
        "unused": 60,
        "launches at once": True,
    }


def test_providers_come_last_and_are_not_interpreted() -> None:
    own = [i for i in BACKEND.implementations if i.module == providers.__name__]
    assert {i.priority for i in own} == {providers.PRIORITY}
    assert not any(i.interpreted for i in own)
    assert isinstance(BACKEND, Backend)


def test_only_what_adds_nothing_up_promises_the_bits_of_a_row() -> None:
    invariant = {i.name.removeprefix("ascend950.") for i in BACKEND.implementations if i.batch_invariant}
    assert invariant & CALLED == {"npu_dynamic_mx_quant", "npu_mhc_post"}


@pytest.mark.parametrize(("name", "word"), [("ascend950.md", "yes"), ("ascend950.zh.md", "是")])
def test_the_pages_list_exactly_what_is_used(name: str, word: str) -> None:
    page = (FOLDER.parents[2] / "docs" / name).read_text()
    rows = [row.split("|")[1:4] for row in page.splitlines() if row.startswith("| `")]
    used = {
        operator for _, cell, fit in rows if fit.strip().startswith(word) for operator in re.findall(r"`(\w+)`", cell)
    }
    assert used == CALLED
    contracts = {i.op.name for i in BACKEND.implementations if i.module == providers.__name__}
    assert contracts == {re.findall(r"`(\w+)`", cell)[0] for cell, _, fit in rows if fit.strip().startswith(word)}
