"""What needs a process of its own, once per session: interpreted cases, and kernels compiled and checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
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


Entries = list[dict[str, Any]]
Begun = dict[str, list[Future[Entries]]]


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Kernels in CUDA C++ that a test runs on the CPU access shared memory in an order that their barriers give."""
    from cpu_programs import noted

    with noted() as notes:
        yield
    assert notes.disorder() == []


@dataclass(frozen=True)
class Work:
    """A script over ops, in two processes.

    Attributes:
        script: in this folder.
        needs: modules without which it is not run.
        extra: arguments behind the ops.
        env: names and values for the processes.
        ops: names; empty for all.
    """

    script: str
    needs: tuple[str, ...] = ("triton",)
    extra: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    ops: tuple[str, ...] = ()


INTERPRETED = (("TRITON_INTERPRET", "1"),)
WORK = {
    "compiled_kernels": Work("compile_worker.py", extra=("90,100,103",)),
    "emulated_cases": Work("emulated_worker.py", extra=("cuda_sm90",), env=INTERPRETED),
    "emulated_blackwell_cases": Work("emulated_worker.py", extra=("cuda_sm100",), env=INTERPRETED, ops=BLACKWELL_OPS),
    "checked_kernels": Work("sentry_worker.py", needs=("triton", "sentryward")),
}
"""By the fixture that gives what it wrote, in the order in which tests ask for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for workers come behind the others of this folder, which go on meanwhile."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    waits = sorted(places, key=lambda place: not WORK.keys().isdisjoint(getattr(items[place], "fixturenames", ())))
    moved = [items[place] for place in waits]
    for place, item in zip(places, moved, strict=True):
        items[place] = item


def _run(work: Work, part: int, output: Path) -> Entries:
    """Run one half of the ops in a process of its own, and give what it wrote."""
    names = sorted(work.ops or defined_ops())
    command = [sys.executable, str(HERE / work.script), str(output), ",".join(names[part::WORKERS]), *work.extra]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **dict(work.env)}, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    entries: Entries = json.loads(output.read_text())
    return entries


@pytest.fixture(scope="session", autouse=True)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begun]:
    """All that any test of the session will ask for, begun at once: it goes on beside the tests before."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ThreadPoolExecutor(WORKERS) as pool:
        begun = {}
        for name, work in WORK.items():
            if name in wanted and all(map(find_spec, work.needs)):
                folder = tmp_path_factory.mktemp(name)
                begun[name] = [pool.submit(_run, work, part, folder / f"{part}.json") for part in range(WORKERS)]
        yield begun
        pool.shutdown(cancel_futures=True)


def _found(name: str, started: Begun) -> Entries:
    for module in WORK[name].needs:
        pytest.importorskip(module)
    return [entry for part in started[name] for entry in part.result()]


@pytest.fixture(scope="session")
def emulated_cases(started: Begun) -> Entries:
    """Results of interpreted cases of the kernels that both generations share."""
    return _found("emulated_cases", started)


@pytest.fixture(scope="session")
def emulated_blackwell_cases(started: Begun) -> Entries:
    """Results of interpreted cases of the kernels that Blackwell alone has."""
    return _found("emulated_blackwell_cases", started)


@pytest.fixture(scope="session")
def checked_kernels(started: Begun) -> Entries:
    """What the static verifier says of kernels for sm_100a."""
    return _found("checked_kernels", started)


@pytest.fixture(scope="session")
def compiled_kernels(started: Begun) -> Entries:
    """Facts about kernels compiled for sm_90a, sm_100a and sm_103a."""
    return _found("compiled_kernels", started)
