"""The ladder that a backend climbs. A level is a function of the session; a claim of level n means 0 to n.

Levels from 2 on need models and the engine, so a level's module is imported when it runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.suite import Session
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import HostSyncError
from deepinfer.ops.registry import ACCEPTED_API_VERSIONS
from deepinfer.ops.runtime import Runtime


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
    1: Level("ops", "deepinfer.conformance.drawn:run_level_one"),
    2: Level("one layer of each kind", "deepinfer.conformance.layers:run_layers"),
    3: Level("engine semantics", "deepinfer.conformance.engine_levels:run_semantics"),
    4: Level("determinism and sampling", "deepinfer.conformance.engine_levels:run_determinism"),
    5: Level("several ranks and faults", "deepinfer.conformance.fault_levels:run_faults"),
    6: Level("performance sheet", "deepinfer.conformance.performance:run_performance"),
}


def run_level(number: int, session: Session) -> None:
    """Run one level."""
    module, _, name = LEVELS[number].run.partition(":")
    run: Callable[[Session], None] = getattr(importlib.import_module(module), name)
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
    table = runtime.zeros((7, 3), torch.float32)
    checks.append(Check("zeros", bool((runtime.to_host(table) == 0).all()), "zeros are not zero"))
    wanted = torch.zeros(7, 3)
    wanted[2:5, 1] = torch.tensor([1.0, 2.0, 3.0])
    runtime.write(table[2:5, 1], torch.tensor([1.0, 2.0, 3.0]))
    written = torch.equal(runtime.to_host(table), wanted)
    checks.append(Check("write", written, "a copy into a strided view did not write its elements and no others"))
    checks += [_stream_check(runtime), _pool_check(runtime), _late_copy_check(runtime), _landing_check(runtime)]
    checks.append(_time_check(runtime))
    checks.append(Check("waits", _asks_guard(runtime), "to_host or synchronize does not ask sync_guard"))
    kind = runtime.device.type
    checks.append(Check("device", there.device.type == kind, f"tensors are on {there.device.type}, not on {kind}"))
    return checks


def _late_copy_check(runtime: Runtime) -> Check:
    """A copy to the host that is begun now and waited for later."""
    host = torch.arange(50, dtype=torch.int64)
    copy = runtime.to_host_later(runtime.to_device(host))
    return Check("late copies", torch.equal(copy.wait(), host), "to_host_later brought something else")


def _landing_check(runtime: Runtime) -> Check:
    """Copies of several lengths that come to the same memory."""
    host = torch.arange(50, dtype=torch.int64)
    there, landing = runtime.to_device(host), runtime.landing((50,), torch.int64)
    came = all(torch.equal(landing.begin(there[:count]).wait(), host[:count]) for count in (50, 20, 20, 33))
    return Check("landings", came, "a copy that came behind another brought something else")


def _time_check(runtime: Runtime) -> Check:
    """Events are in time as they are in their stream."""
    begun, ended = runtime.event(), runtime.event()
    begun.record()
    runtime.zeros((1000,), torch.float32)
    ended.record()
    ended.synchronize()
    return Check("times", ended.elapsed_ms(begun) >= 0, "an event comes before one that was recorded earlier")


def _asks_guard(runtime: Runtime) -> bool:
    """Whether the device's blocking calls are errors where waits are forbidden."""
    there = runtime.to_device(torch.zeros(1))
    for call in (lambda: runtime.to_host(there), runtime.synchronize):
        try:
            with runtime.sync_guard.forbid("a check of the conformance suite"):
                call()
        except HostSyncError:
            continue
        return False
    return True


def _stream_check(runtime: Runtime) -> Check:
    """A copy on one stream, read on another behind an event; where there is one stream both are the same."""
    host = torch.arange(50, dtype=torch.int64)
    side, copied = runtime.stream(), runtime.event()
    with runtime.use_stream(side):
        there = runtime.to_device(host)
        copied.record()
    copied.wait()
    same = torch.equal(runtime.to_host(there), host)
    copied.record()
    with runtime.use_stream(side):
        copied.wait()  # the memory is the side stream's, and is read by the other
    return Check("streams", same, "a tensor did not survive the way from one stream to another")


def _pool_check(runtime: Runtime) -> Check:
    """A pool counts what it gave."""
    pool = runtime.pool("conformance")
    before = pool.stats()
    held = pool.zeros((1000,), torch.float32)
    grown = pool.stats().allocated_bytes - before.allocated_bytes
    ok = held.numel() * 4 <= grown and "conformance" in runtime.pools()
    return Check("pools", ok, f"4000 bytes from a pool are booked as {grown}")
