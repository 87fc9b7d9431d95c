"""The ladder that a backend climbs. A level is a function of the session; a claim of level n means 0 to n.

Levels 3 to 5 run the engine; until their module is here they say so, and nothing passes by not being asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.suite import Session
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.registry import ACCEPTED_API_VERSIONS


@dataclass(frozen=True)
class Level:
    """One rung.

    Attributes:
        title: what it shows.
        run: `module:function`, called with the session; imported when the level runs.
    """

    title: str
    run: str


LEVELS: Mapping[int, Level] = {
    0: Level("loads", "deepinfer.conformance.levels:run_loads"),
    1: Level("ops", "deepinfer.conformance.suite:run_ops"),
    2: Level("one layer of each kind", "deepinfer.conformance.layers:run_layers"),
    3: Level("engine semantics", "deepinfer.conformance.engine_levels:run_semantics"),
    4: Level("determinism and sampling", "deepinfer.conformance.engine_levels:run_determinism"),
    5: Level("several ranks and faults", "deepinfer.conformance.fault_levels:run_faults"),
    6: Level("performance sheet", "deepinfer.conformance.performance:run_performance"),
}


def run_level(number: int, session: Session) -> None:
    """Run one level; one that is not in this release gives one unsupported result."""
    level = LEVELS[number]
    module, _, name = level.run.partition(":")
    run: Callable[[Session], None] | None = None
    try:
        run = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    if run is None:
        if session.whole:
            session.add(
                CaseResult(number, level.title, "level", "", False, "unsupported", detail="not in this release")
            )
        return
    run(session)


def run_loads(session: Session) -> None:
    """Level 0: the backend answers, is of an accepted contract, and its device moves bytes."""
    backend, runtime = session.backend, session.runtime
    result = CaseResult(0, "backend", "loads", backend.name, True)
    try:
        answer = backend.probe()
        result.checks.append(Check("probe", answer.available, answer.reason))
        accepted = backend.api_version in ACCEPTED_API_VERSIONS
        result.checks.append(Check("contract", accepted, f"version {backend.api_version} is not accepted"))
        backend.load()
        known = defined_ops()
        strangers = sorted({i.op.name for i in backend.implementations if known.get(i.op.name) is not i.op})
        result.checks.append(Check("ops", not strangers, f"implements ops that are not defined here: {strangers}"))
        names = [f"{i.op.name}={i.name}" for i in backend.implementations]
        twice = sorted({name for name in names if names.count(name) > 1})
        result.checks.append(Check("names", not twice, f"registered twice under one name: {twice}"))
        result.checks += _device_checks(session)
    except Exception as error:  # whatever a backend raises, the report must say it
        result.checks.append(Check("loads", False, f"{type(error).__name__}: {error}"))
    result.detail = f"{len(backend.implementations)} implementations, device {runtime.device}"
    session.add(result.settle())


def _device_checks(session: Session) -> list[Check]:
    runtime = session.runtime
    memory = runtime.memory_info()
    checks = [Check("memory", 0 < memory.free_bytes <= memory.total_bytes, f"{memory}")]
    host = torch.arange(1000, dtype=torch.int32)
    there = runtime.to_device(host)
    event = runtime.event()
    event.record()
    event.synchronize()
    same = torch.equal(runtime.to_host(there), host) and event.query()
    checks.append(Check("copies", same, "a tensor did not survive the way to the device and back"))
    zeros = runtime.to_host(runtime.zeros((7, 3), torch.float32))
    checks.append(Check("zeros", bool((zeros == 0).all()), "zeros are not zero"))
    kind = runtime.device.type
    checks.append(Check("device", there.device.type == kind, f"tensors are on {there.device.type}, not on {kind}"))
    return checks
