"""Choosing implementations: which backends exist, and which of their functions runs each op.

The choice is made once, when a model binds its ops, and can be printed. What a backend lacks runs on the reference,
visibly; under `strict` it is one error that names every gap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import SimpleNamespace
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from deepinfer.ops.backend import (
    Availability,
    Backend,
    BindContext,
    Dims,
    FunctionPlan,
    Implementation,
    Plan,
    PreparingPlan,
)
from deepinfer.ops.errors import BackendUnavailableError, MissingOpsError, OpArgumentError
from deepinfer.ops.fallback import THROUGH_HOST, HostPlan
from deepinfer.ops.outputs import Outputs, watched
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import API_VERSION, OpSpec

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

ENTRY_POINT_GROUP = "deepinfer.backends"
ACCEPTED_API_VERSIONS = frozenset({API_VERSION})
"""Contract versions of backends that this release runs; an older one is kept for one release after a change."""


def discover_backends() -> dict[str, Backend]:
    """Every installed backend by name, available or not; kernels are not imported.

    A broken package keeps nobody from the others: an entry point that cannot be imported, or names no `Backend`, is
    listed under its own name, as unavailable for that reason.
    """
    found: dict[str, Backend] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        try:
            backend = entry.load()
        except Exception as error:  # whatever a package raises as it is imported
            backend = _broken(entry, f"cannot be imported ({type(error).__name__}: {error})")
        if not isinstance(backend, Backend):
            backend = _broken(entry, f"is a {type(backend).__name__}, not a Backend")
        found[backend.name] = backend
    return found


def _broken(entry: EntryPoint, why: str) -> Backend:
    answer = Availability(False, f"its entry point {entry.name} = {entry.value} {why}")
    return Backend(entry.name, device_type="none", probe=lambda: answer, priority=-1)


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
    _check_contract(backend)
    backend.load()
    return backend


def find_emulated(name: str) -> Backend:
    """A backend with its kernels interpreted on the host, whether its device is here or not.

    Raises:
        BackendUnavailableError: no such backend, its contract version is not accepted, or it has no emulated form here.
    """
    backends = discover_backends()
    if name not in backends:
        raise BackendUnavailableError(f"no backend named {name!r}; installed: {', '.join(backends) or 'none'}")
    _check_contract(backends[name])
    return backends[name].emulated()


def _check_contract(backend: Backend) -> None:
    if backend.api_version not in ACCEPTED_API_VERSIONS:
        accepted = ", ".join(str(v) for v in sorted(ACCEPTED_API_VERSIONS))
        raise BackendUnavailableError(
            f"backend {backend.name!r} was written for op contract version {backend.api_version}; "
            f"this release accepts {accepted}. Install a matching release of the backend."
        )


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
        self.buffer: Tensor | None = None

    def __call__(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of undefined contents."""
        if self.buffer is None or self.buffer.shape[0] < num_bytes:
            self.buffer = self._runtime.pool("scratch").empty((num_bytes,), torch.uint8)
        return self.buffer[:num_bytes]


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
    outputs: Outputs | None = None
    preparing: PreparingPlan | None = None

    def prepare(self, name: str, value: T) -> T:
        """An argument that never changes in the form that the implementation reads best, to be passed from then on.

        Args:
            name: of the op's parameter.
            value: canonical, on the device. What is returned may be `value` itself.
        """
        return value if self.preparing is None else cast(T, self.preparing.prepare(name, value))

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold it: the plan promises so, and its results are known before it runs."""
        return self.plan.capturable and self.op.results is not None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the plan, with the memory it asked for at bind and, if it is capturable, memory for its results."""
        try:
            if self.scratch is None and self.persistent is None and self.outputs is None:
                return cast(R, self.plan.run(*args, **kwargs))
            options: dict[str, Any] = dict(kwargs)
            if self.scratch is not None:
                options["scratch"] = self.scratch(self.plan.scratch_bytes)
            if self.persistent is not None:
                options["persistent"] = self.persistent
            out = self._new_results(args, kwargs) if self.outputs is not None else None
            if out is None:
                return cast(R, self.plan.run(*args, **options))
            self.plan.run(*args, out=out, **options)
            return cast(R, out)
        except Exception as error:
            error.add_note(f"while op {self.op.name} was called (implementation {self.implementation})")
            raise

    def _new_results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.outputs is not None and self.op.results is not None, "only of a capturable op"
        names = self.op.signature.parameters
        if kwargs or len(args) != len(names):
            bound = self.op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return self.op.results(self.outputs.new, SimpleNamespace(**bound.arguments))
        return self.op.results(self.outputs.new, SimpleNamespace(**dict(zip(names, args, strict=True))))


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

    Attributes:
        outputs: where results of capturable plans are put.

    Raises:
        OpArgumentError: an override of an op that does not exist.
    """

    backend: Backend
    context: BindContext
    strict: bool = False
    overrides: dict[str, str] = field(default_factory=lambda: parse_overrides(os.environ.get("DEEPINFER_OPS", "")))
    gate: Callable[[Implementation], bool] | None = None
    _bound: dict[tuple[str, tuple[tuple[str, Any], ...]], BoundOp[..., Any]] = field(default_factory=dict, repr=False)
    _scratch: Scratch = field(init=False, repr=False)
    outputs: Outputs = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._scratch = Scratch(self.context.runtime)
        self.outputs = Outputs(self.context.runtime)
        unknown = sorted(self.overrides.keys() - _all_ops().keys()) if self.overrides else []
        if unknown:
            raise OpArgumentError(
                f"override of {', '.join(map(repr, unknown))}: no such op; `deepinfer backends --ops` lists all"
            )

    def bind(self, op: OpSpec[P, R], **dims: Any) -> BoundOp[P, R]:
        """Choose an implementation for `op` at these static dimensions and bind it; the same call gives the same plan.

        Raises:
            MissingOpsError: `strict`, and only the reference could run it.
            OpArgumentError: an override names an implementation that does not exist or refuses these dimensions, or
                ranks cannot divide the experts.
        """
        bound = self._over_ranks(op, dims)
        return self.bind_here(op, **dims) if bound is None else bound

    def bind_here(self, op: OpSpec[P, R], **dims: Any) -> BoundOp[P, R]:
        """As `bind`, for this rank alone: no exchange, whoever holds the experts."""
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

    @property
    def through_host(self) -> tuple[str, ...]:
        """Ops whose reference runs on the host, on copies: the host waits for each, so no step can be asynchronous."""
        return tuple(sorted({b.op.name for b in self._bound.values() if isinstance(b.plan, HostPlan)}))

    @property
    def scratch(self) -> Tensor | None:
        """The buffer that plans share now. A graph keeps the one it was captured with: a later op may need a larger."""
        return self._scratch.buffer

    @property
    def not_capturable(self) -> tuple[str, ...]:
        """Ops that a graph cannot hold, so that a step with one of them is never captured."""
        return tuple(sorted({b.op.name for b in self._bound.values() if not b.capturable}))

    def _over_ranks(self, op: OpSpec[P, R], dims: Dims) -> BoundOp[P, R] | None:
        """The exchange that stands in the place of an op, where experts are divided among ranks."""
        ranks = self.context.expert_ranks
        if ranks is None:
            return None
        from deepinfer.ops.expert_ranks import PLANS  # it is made of ops, which are defined once this module exists

        make = PLANS.get(op.name)
        if make is None:
            return None
        key = (op.name, (*sorted(dims.items()), ("over_ranks", True)))
        if key not in self._bound:
            plan = make(self, ranks, dims)
            name = f"{plan.here.implementation} over {ranks.group.world_size} ranks"
            self._bound[key] = BoundOp(op, name, plan.here.native, plan, dict(dims))
        return cast("BoundOp[P, R]", self._bound[key])

    def _resolve(self, op: OpSpec[P, R], dims: Dims) -> BoundOp[P, R]:
        candidates = [i for i in self.backend.implementations if i.op.name == op.name]
        override = self.overrides.get(op.name)
        if override is not None:
            if override == "reference":
                return self._reference(op, dims)
            candidates = [i for i in candidates if i.name == override]
            if not candidates:
                raise OpArgumentError(f"override {op.name}={override}: backend {self.backend.name!r} has no such one")
        chosen = self._choose(candidates, dims, gated=override is None)
        if chosen is not None:
            plan = chosen.bind(dims, self.context)
            kept = plan.persistent_bytes
            persistent = self.context.runtime.pool("persistent").zeros((kept,), torch.uint8) if kept else None
            scratch = self._scratch if plan.scratch_bytes else None
            if scratch is not None:
                scratch(plan.scratch_bytes)  # taken now, so that no run allocates
            preparing = plan if isinstance(plan, PreparingPlan) else None
            takes_out = plan.capturable and op.results is not None
            if takes_out:
                plan = watched(self.context.runtime, op, plan)
            outputs = self.outputs if takes_out else None
            return BoundOp(op, chosen.name, True, plan, dict(dims), scratch, persistent, outputs, preparing)
        if override is not None:
            raise OpArgumentError(f"override {op.name}={override} does not accept {dict(dims)}")
        if self.strict:
            self.require(_all_ops().values())
            raise MissingOpsError(self.backend.name, [op.name])  # there, but not for these dimensions
        return self._reference(op, dims)

    def _reference(self, op: OpSpec[P, R], dims: Dims) -> BoundOp[P, R]:
        runtime = self.context.runtime
        if runtime.capabilities.torch_compute:
            return BoundOp(op, "reference", False, FunctionPlan(op.reference), dict(dims))
        return BoundOp(op, THROUGH_HOST, False, HostPlan(op, runtime), dict(dims))

    def _choose(self, candidates: list[Implementation], dims: Dims, *, gated: bool) -> Implementation | None:
        usable = [i for i in candidates if i.when(dims) and (i.batch_invariant or not self.context.batch_invariant)]
        for candidate in sorted(usable, key=lambda i: (i.priority, i.name), reverse=True):
            if not gated or self.gate is None or self.gate(candidate):
                return candidate
        return None


def _all_ops() -> Mapping[str, OpSpec[Any, Any]]:
    from deepinfer.ops.catalog import defined_ops  # importing it defines every op there is

    return defined_ops()
