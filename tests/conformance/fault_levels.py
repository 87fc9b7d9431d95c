"""Level 5: several ranks (`rank_levels`), and what an engine does when its device fails under it.

A runtime that can be told to fail has `inject_fault`. A hard device has no such thing, and the cases say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol, cast, runtime_checkable

from deepinfer.conformance.engine_levels import Bench, equal, returned, run_cases
from deepinfer.conformance.rank_levels import run_ranks
from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.subject import open_runtime
from deepinfer.conformance.suite import Session
from deepinfer.entrypoints.llm import LLM
from deepinfer.ops.errors import DeviceError, DeviceLostError, LaunchError

FaultKind = Literal["failed_launch", "lost_device"]
FAILING_OP = "sparse_attn"
LIVE = 6
"""Requests that are live when the device fails."""


@runtime_checkable
class FaultyRuntime(Protocol):
    """A runtime that fails when it is told to."""

    def inject_fault(self, kind: FaultKind, *, name: str = "*", at: int = 1) -> None:
        """Let the `at`-th piece of work from now whose name matches fail.

        Args:
            kind: "failed_launch" refuses it with a `LaunchError`, and the device goes on; "lost_device" fails it and
                everything after with a `DeviceLostError`.
            name: pattern; ops go by their own.
            at: from 1.
        """
        ...


def run_faults(session: Session) -> None:
    """Level 5: ranks, and faults of one device."""
    run_ranks(session)
    kinds: dict[str, tuple[FaultKind, bool]] = {
        "a failed launch ends the step's requests, and the engine goes on": ("failed_launch", False),
        "a failed launch among asynchronous steps": ("failed_launch", True),
        "a lost device ends every request": ("lost_device", False),
    }
    if isinstance(session.runtime, FaultyRuntime):
        cases: dict[str, Callable[[Bench], Iterator[Check]]] = {
            name: partial(_fault, kind=kind, asynchronous=late) for name, (kind, late) in kinds.items()
        }
        run_cases(session, 5, cases)
        return
    for name in kinds:
        if session.wants("engine", name):
            reason = "faults cannot be injected into this device (its runtime has no inject_fault)"
            session.add(CaseResult(5, "engine", name, session.backend.name, True, "unsupported", detail=reason))


def _fault(bench: Bench, *, kind: FaultKind, asynchronous: bool) -> Iterator[Check]:
    """A device of its own runs well, fails, and where it goes on runs well again."""
    bench = Bench(replace(bench.session, runtime=open_runtime(bench.session.backend)), bench.folder)
    runtime = cast(FaultyRuntime, bench.session.runtime)
    prompts, params = bench.prompts[:LIVE], bench.params[:LIVE]
    llm = bench.build(async_scheduling=asynchronous)
    try:
        want = bench.run(llm, prompts, params)
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            llm.engine.add_request(str(index), prompt, one)
        runtime.inject_fault(kind, name=FAILING_OP, at=5)
        yield from _failing_step(llm, LaunchError if kind == "failed_launch" else DeviceLostError)
        yield returned(llm)
        if kind == "failed_launch":
            again = bench.run(llm, prompts, params)
            yield equal("equals before the fault", again, want)
            yield replace(returned(llm), name="memory at the end")
    finally:
        with suppress(DeviceError):  # a lost device cannot be waited for
            llm.close()


def _failing_step(llm: LLM, wanted: type[DeviceError]) -> Iterator[Check]:
    """Steps until one raises, and what became of the requests."""
    engine = llm.engine
    ended: dict[str, str | None] = {}

    def collect() -> None:
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output.error.code if output.error is not None else None

    raised: BaseException | None = None
    while raised is None and engine.has_unfinished():
        try:
            collect()
        except Exception as error:  # which one is the question
            raised = error
    yield Check("typed error", isinstance(raised, wanted), f"the step raised {raised!r}, not {wanted.__name__}")
    if raised is None:
        return
    before = set(ended)
    while engine.has_unfinished():
        collect()
    lost = [f"request {i} got {ended.get(str(i), 'no result')}" for i in range(LIVE) if str(i) not in before]
    wrong = [text for text in lost if not text.endswith("engine_error")]
    yield Check("requests end", bool(lost) and not wrong, ", ".join(wrong) or "no request was live")
