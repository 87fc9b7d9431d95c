"""Choosing implementations: which backends exist, and which of their functions runs each op.

The choice is made once, when a model binds its ops, and can be printed. What a backend lacks runs on the reference,
visibly; under `strict` it is one error that names every gap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from deepinfer.ops.backend import Availability, Backend, BindContext, Dims, FunctionPlan, Implementation, Plan
from deepinfer.ops.errors import BackendUnavailableError, MissingOpsError, OpArgumentError
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import API_VERSION, OpSpec

P = ParamSpec("P")
R = TypeVar("R")

ENTRY_POINT_GROUP = "deepinfer.backends"
ACCEPTED_API_VERSIONS = frozenset({API_VERSION})
"""Contract versions of backends that this release runs; an older one is kept for one release after a change."""


def discover_backends() -> dict[str, Backend]:
    """Every installed backend by name, available or not; kernels are not imported.

    Raises:
        BackendUnavailableError: an entry point cannot be imported, or does not name a `Backend`; it is named.
    """
    found: dict[str, Backend] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        try:
            backend = entry.load()
        except Exception as error:
            raise BackendUnavailableError(f"entry point {entry.name} = {entry.value} failed: {error}") from error
        if not isinstance(backend, Backend):
            raise BackendUnavailableError(f"backend entry point {entry.name} = {entry.value} is not a Backend")
        found[backend.name] = backend
    return found


def find_backend(name: str = "auto") -> Backend:
    """The backend to run on, loaded.

    Args:
        name: a backend's name, or "auto" for the available one of the highest priority.

    Raises:
        BackendUnavailableError: no such backend, its probe says no, or its contract version is not accepted.
    """
    backends = discover_backends()
    if name == "auto":
        usable = [b for b in backends.values() if b.priority >= 0 and b.probe().available]
        if not usable:
            raise BackendUnavailableError(f"no backend is available; installed: {', '.join(backends) or 'none'}")
        backend = max(usable, key=lambda b: (b.priority, b.name))
    else:
        if name not in backends:
            raise BackendUnavailableError(f"no backend named {name!r}; installed: {', '.join(backends) or 'none'}")
        backend = backends[name]
        answer: Availability = backend.probe()
        if not answer.available:
            raise BackendUnavailableError(f"backend {name!r} is installed but cannot run here: {answer.reason}")
    if backend.api_version not in ACCEPTED_API_VERSIONS:
        accepted = ", ".join(str(v) for v in sorted(ACCEPTED_API_VERSIONS))
        raise BackendUnavailableError(
            f"backend {backend.name!r} was written for op contract version {backend.api_version}; "
            f"this release accepts {accepted}. Install a matching release of the backend."
        )
    backend.load()
    return backend


def parse_overrides(text: str) -> dict[str, str]:
    """Parse `op=implementation,op=implementation` (the form of `DEEPINFER_OPS`).

    Raises:
        OpArgumentError: an item has no `=`; the item is named.
    """
    overrides: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, equals, implementation = item.partition("=")
        if not equals or not op or not implementation:
            raise OpArgumentError(f"DEEPINFER_OPS item {item!r} is not of the form op=implementation")
        overrides[op.strip()] = implementation.strip()
    return overrides


class Scratch:
    """One buffer for all plans of a table: they run one after the other on one stream. Grows, never shrinks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._buffer: Tensor | None = None

    def __call__(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of undefined contents."""
        if self._buffer is None or self._buffer.shape[0] < num_bytes:
            self._buffer = self._runtime.empty((num_bytes,), torch.uint8)
        return self._buffer[:num_bytes]


@dataclass(frozen=True)
class BoundOp(Generic[P, R]):
    """An op bound to one implementation and one set of static dimensions; call it like the op."""

    op: OpSpec[P, R]
    implementation: str
    native: bool
    plan: Plan
    dims: Dims = field(default_factory=dict)
    scratch: Scratch | None = None
    persistent: Tensor | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the plan, with the memory it asked for at bind."""
        if self.scratch is None and self.persistent is None:
            return cast(R, self.plan.run(*args, **kwargs))
        options: dict[str, Any] = dict(kwargs)
        if self.scratch is not None:
            options["scratch"] = self.scratch(self.plan.scratch_bytes)
        if self.persistent is not None:
            options["persistent"] = self.persistent
        return cast(R, self.plan.run(*args, **options))


@dataclass
class OpTable:
    """The ops of one engine: resolves each (op, dims) once and remembers the choice.

    Args:
        backend: a loaded backend.
        context: what implementations bind with.
        strict: refuse to run any op on the reference.
        overrides: op name to implementation name ("reference" is one); default from `DEEPINFER_OPS`.
        gate: asked once per implementation before it is used; False leaves the op to the next one, and ends in the
            reference (`deepinfer.ops.proof.Gate`). None lets all pass. An override is not asked.
    """

    backend: Backend
    context: BindContext
    strict: bool = False
    overrides: dict[str, str] = field(default_factory=lambda: parse_overrides(os.environ.get("DEEPINFER_OPS", "")))
    gate: Callable[[Implementation], bool] | None = None
    _bound: dict[tuple[str, tuple[tuple[str, Any], ...]], BoundOp[..., Any]] = field(default_factory=dict, repr=False)
    _scratch: Scratch = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._scratch = Scratch(self.context.runtime)

    def bind(self, op: OpSpec[P, R], **dims: Any) -> BoundOp[P, R]:
        """Choose an implementation for `op` at these static dimensions and bind it; the same call gives the same plan.

        Raises:
            MissingOpsError: `strict`, and only the reference could run it.
            OpArgumentError: an override names an implementation that does not exist or refuses these dimensions.
        """
        key = (op.name, tuple(sorted(dims.items())))
        if key not in self._bound:
            self._bound[key] = self._resolve(op, dims)
        return cast("BoundOp[P, R]", self._bound[key])

    def require(self, ops: Iterable[OpSpec[..., Any]]) -> None:
        """Under `strict`, refuse at once with every op of `ops` that only the reference could run."""
        have = {i.op.name for i in self.backend.implementations}
        missing = [op.name for op in ops if op.name not in have]
        if self.strict and missing:
            raise MissingOpsError(self.backend.name, missing)

    def rows(self) -> list[tuple[str, str, str]]:
        """The choices so far as (op, dims, implementation), sorted."""
        return sorted(
            (b.op.name, " ".join(f"{k}={v}" for k, v in sorted(b.dims.items())), b.implementation)
            for b in self._bound.values()
        )

    def _resolve(self, op: OpSpec[P, R], dims: Dims) -> BoundOp[P, R]:
        candidates = [i for i in self.backend.implementations if i.op.name == op.name]
        override = self.overrides.get(op.name)
        if override is not None:
            if override == "reference":
                return BoundOp(op, "reference", False, FunctionPlan(op.reference), dict(dims))
            candidates = [i for i in candidates if i.name == override]
            if not candidates:
                raise OpArgumentError(f"override {op.name}={override}: backend {self.backend.name!r} has no such one")
        chosen = self._choose(candidates, dims, gated=override is None)
        if chosen is not None:
            plan = chosen.bind(dims, self.context)
            kept = plan.persistent_bytes
            persistent = self.context.runtime.zeros((kept,), torch.uint8) if kept else None
            scratch = self._scratch if plan.scratch_bytes else None
            if scratch is not None:
                scratch(plan.scratch_bytes)  # taken now, so that no run allocates
            return BoundOp(op, chosen.name, True, plan, dict(dims), scratch, persistent)
        if override is not None:
            raise OpArgumentError(f"override {op.name}={override} does not accept {dict(dims)}")
        if self.strict:
            from deepinfer.ops.catalog import defined_ops  # defines every op there is

            self.require(defined_ops().values())
            raise MissingOpsError(self.backend.name, [op.name])  # there, but not for these dimensions
        return BoundOp(op, "reference", False, FunctionPlan(op.reference), dict(dims))

    def _choose(self, candidates: list[Implementation], dims: Dims, *, gated: bool) -> Implementation | None:
        usable = [i for i in candidates if i.when(dims) and (i.batch_invariant or not self.context.batch_invariant)]
        for candidate in sorted(usable, key=lambda i: (i.priority, i.name), reverse=True):
            if not gated or self.gate is None or self.gate(candidate):
                return candidate
        return None
