"""The kernels that both generations share, collected once and registered by each backend under its own name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import Tensor

from deepinfer.ops.backend import Backend, BindContext, Dims, Implementation, Plan
from deepinfer.ops.spec import OpSpec
from deepinfer.ops.sync_guard import SyncGuard

F = TypeVar("F", bound=Callable[..., Any])

_COMMON: Final = ("launch.py", "codes.py", "tensors.py")
"""Files that every kernel is made of, beside its own."""


@dataclass(frozen=True)
class KernelPlan:
    """Launches on the current stream, with results in `out` where the caller has memory for them.

    Attributes:
        function: takes the op's arguments and `out`; with `scratch_bytes` also `scratch`.
        scratch_bytes: bytes between the launches of one run.
        persistent_bytes: bytes that are zero before and after each run; the function then takes `persistent` too.
        capturable: False where a run needs the host.
        guard: of the runtime, asked for leave where the host waits.
        waits: takes the op's arguments, and says why the host waits in a run with them; empty where it does not.
    """

    function: Callable[..., Any]
    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = True
    guard: SyncGuard | None = None
    waits: Callable[..., str] | None = None

    def run(self, *inputs: Any, out: Any = None, scratch: Tensor | None = None, **options: Any) -> Any:
        """Launch; without `out` the results are new memory."""
        if self.waits is not None and self.guard is not None:
            reason = self.waits(*inputs, **options)
            if reason:
                with self.guard.permit(reason):
                    return self.function(*inputs, out=out, **options)
        if scratch is not None:
            return self.function(*inputs, out=out, scratch=scratch, **options)
        return self.function(*inputs, out=out, **options)


@dataclass(frozen=True)
class _Entry:
    op: OpSpec[..., Any]
    name: str
    bind: Callable[[Dims, BindContext], Plan]
    when: Callable[[Dims], bool]
    priority: int
    batch_invariant: bool
    sources: tuple[str, ...]


def _always(dims: Dims) -> bool:
    return True


@dataclass
class KernelSet:
    """Implementations waiting for a backend."""

    entries: list[_Entry] = field(default_factory=list)

    def implements(
        self,
        op: OpSpec[..., Any],
        *,
        when: Callable[[Dims], bool] = _always,
        priority: int = 0,
        batch_invariant: bool = True,
        capturable: bool = True,
        scratch: Callable[[Dims, BindContext], int] | None = None,
        sources: tuple[str, ...] = (),
        waits: Callable[..., str] | None = None,
    ) -> Callable[[F], F]:
        """Collect a function `f(*the op's arguments, out=None)` that launches kernels.

        Args:
            op: the contract.
            when: predicate over static dimensions.
            priority: the highest wins.
            batch_invariant: False for a faster form without row invariance.
            capturable: False where a run needs the host.
            scratch: bytes that a run needs between its launches; the function then takes `scratch` too.
            sources: files of this folder that the kernel is made of, beside its own and the common ones.
            waits: says why the host waits in a run with these arguments, empty where it does not; without scratch.
        """

        def wrap(function: F) -> F:
            def bind(dims: Dims, ctx: BindContext) -> Plan:
                num_bytes = scratch(dims, ctx) if scratch is not None else 0
                guard = ctx.runtime.sync_guard if waits is not None else None
                return KernelPlan(function, num_bytes, capturable=capturable, guard=guard, waits=waits)

            own = Path(inspect.getfile(function)).name
            files = tuple(f"../nvidia/{name}" for name in dict.fromkeys((own, *_COMMON, *sources)))
            self.entries.append(_Entry(op, function.__name__, bind, when, priority, batch_invariant, files))
            return function

        return wrap

    def register(self, backend: Backend, module: str) -> None:
        """Give every kernel collected so far to a backend.

        Args:
            backend: whose implementations these become.
            module: a module of that backend's own folder, where its proofs are kept.
        """
        for entry in self.entries:
            backend.implementations.append(
                Implementation(
                    entry.op,
                    f"{backend.name}.{entry.name}",
                    entry.bind,
                    entry.when,
                    entry.priority,
                    entry.batch_invariant,
                    module=module,
                    sources=entry.sources,
                )
            )


KERNELS: Final = KernelSet()
"""Filled by imports of the op modules of this folder only."""
