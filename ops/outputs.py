"""The memory of results: brought by the engine, one arena per step, used again two steps later.

A capturable plan allocates nothing, so its caller brings the memory (`OpSpec.results` says how much). Where that comes
from is the caller's business: `Outputs` of an op table takes it from the device's allocator until an engine says
otherwise.

Lifetimes. An engine has two arenas that take turns. What an op returns in a step is valid until the next step but one
begins: the step in between reads it (what was drawn, what is collected late). What must live longer is copied, to the
host or outside of a step. Within a step nothing is used twice, so the same op in every layer, residual streams and
results kept for the sampler need no care.

An arena keeps a bounded number of bytes. The results of a long prefill do not all fit side by side; what is beyond the
bound comes from the device's allocator and lives as long as somebody holds it, which is right as well and costs a step
of that size nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from deepinfer.ops.backend import Plan
from deepinfer.ops.results import New
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import OpSpec

ARENA_BYTES = 256 << 20
"""What one arena keeps: every result of a decode step of some hundred rows."""


@runtime_checkable
class CheckingRuntime(Protocol):
    """What a runtime has besides, if it finds broken promises about memory, as one of software can."""

    def recycle(self, tensor: Tensor) -> Tensor:
        """The same memory as a new tensor, its contents undefined; any use of tensors made of it before is an error."""
        ...

    def watch(self, op: OpSpec[..., Any], plan: Plan) -> Plan:
        """The plan of a capturable op, which raises where it allocates, waits, or returns other memory than `out`."""
        ...


class OutputArena:
    """Results of one step, kept to be used again by a later one.

    Args:
        runtime: where memory comes from.
        limit_bytes: the most that is kept.
    """

    def __init__(self, runtime: Runtime, limit_bytes: int = ARENA_BYTES) -> None:
        self._runtime = runtime
        self._checking = runtime if isinstance(runtime, CheckingRuntime) else None
        self._limit = limit_bytes
        self._kept: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._used: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        self.num_bytes = 0
        """Bytes that are kept."""

    def begin(self) -> None:
        """Begin a step: all results of the one before are gone. What that one did not use is given back."""
        checking = self._checking
        kept, self.num_bytes = {}, 0
        for key, used in self._used.items():
            tensors = self._kept[key][:used]
            kept[key] = tensors if checking is None else [checking.recycle(tensor) for tensor in tensors]
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        self._kept, self._used = kept, {}

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One result, of undefined contents; the same step with the same shapes gets the same memory."""
        key = shape, dtype
        kept, used = self._kept.setdefault(key, []), self._used.get(key, 0)
        if used == len(kept):
            with torch.inference_mode(False):  # written in any mode later
                made = self._runtime.empty(shape, dtype)
            if self.num_bytes + made.nbytes > self._limit:
                return made
            self.num_bytes += made.nbytes
            kept.append(made)
        self._used[key] = used + 1
        return kept[used]


class StepArenas:
    """The two arenas of an engine.

    Args:
        runtime: where memory comes from.
        limit_bytes: the most that each keeps.
    """

    def __init__(self, runtime: Runtime, limit_bytes: int = ARENA_BYTES) -> None:
        self._runtime, self._limit = runtime, limit_bytes
        self.clear()

    def begin_step(self) -> None:
        """Begin a step: results of the step before stay valid, those of the one before that are gone."""
        self._arenas.reverse()
        self._arenas[0].begin()

    def clear(self) -> None:
        """Keep nothing until the next step; results that somebody holds stay as they are."""
        self._arenas = [OutputArena(self._runtime, self._limit) for _ in range(2)]

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One result of the newest step."""
        return self._arenas[0].new(shape, dtype)


class Outputs:
    """Where the ops of a table take the memory of their results from; at first the device's allocator.

    Attributes:
        new: makes one result.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.new: New = runtime.empty

    @contextmanager
    def taken_from(self, new: New) -> Iterator[None]:
        """Take results from there inside."""
        before, self.new = self.new, new
        try:
            yield
        finally:
            self.new = before


def watched(runtime: Runtime, op: OpSpec[..., Any], plan: Plan) -> Plan:
    """A capturable plan as this runtime wants to run it."""
    return runtime.watch(op, plan) if isinstance(runtime, CheckingRuntime) else plan
