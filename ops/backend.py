"""What a backend author writes: a `Backend`, a probe, and functions or plans registered against op specs.

A backend registers implementations while its op modules are imported; `deepinfer.ops.registry` chooses among them once,
when a model is built. Nothing here knows a vendor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

from deepinfer.ops.errors import BackendUnavailableError
from deepinfer.ops.spec import API_VERSION, OpSpec

if TYPE_CHECKING:
    from deepinfer.ops.expert_ranks import ExpertRanks
    from deepinfer.ops.runtime import Runtime

Dims = Mapping[str, Any]
"""Static facts that a predicate may look at: sizes by name, dtypes and record formats."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Availability:
    """A probe's answer: can this backend run here, and if not, what is missing."""

    available: bool
    reason: str = ""


class Plan(Protocol):
    """An op bound to static dimensions, ready to run many times.

    Scratch has undefined contents before and after a run and is shared by all plans of a stream; persistent memory is
    private to this plan, zeroed at bind and left zero by every run, of which one goes on at a time: a plan's runs,
    replays of graphs included, stand in the order of one stream. A capturable plan's `run` allocates nothing,
    synchronises nothing and reads no device memory on the host.
    """

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch a run needs."""
        ...

    @property
    def persistent_bytes(self) -> int:
        """Bytes of persistent memory."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a run may be captured in a graph."""
        ...

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Run the op.

        `scratch=` and `persistent=` are passed to a plan that asked for such bytes. A capturable plan of an op that
        returns something is given `out=`, a tree of the op's results in memory of the engine: it writes them there and
        returns it. Without `out` a run makes its results.
        """
        ...


@runtime_checkable
class PreparingPlan(Plan, Protocol):
    """A plan that reads some of its arguments in a form of its own, made once: weights, which no run changes."""

    def prepare(self, name: str, value: Any) -> Any:
        """The form of an argument that `run` wants most; `value` itself where there is none better.

        It has the same shape and, of experts, the same first axis. A quantised tensor says its form in `layout`. `run`
        takes the canonical form as well.

        Args:
            name: of the op's parameter.
            value: canonical, on the device.
        """
        ...


@dataclass(frozen=True)
class FunctionPlan:
    """A plain function as a plan: it may allocate, so it is not capturable. References are wrapped the same way."""

    function: Callable[..., Any]
    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = False

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Call the function."""
        return self.function(*inputs, **options)


@dataclass(frozen=True)
class BindContext:
    """What an implementation may use while it binds.

    Attributes:
        device: where tensors live.
        runtime: streams, memory and graphs of that device.
        batch_invariant: rows must have the same bits in any batch (the default everywhere).
        max_tokens: upper bound on rows of one step.
        expert_ranks: the ranks that divide the experts, if there are any; dispatch and combine are exchanges then, made
            of the implementations for one rank.
    """

    device: torch.device
    runtime: Runtime
    batch_invariant: bool = True
    max_tokens: int = 0
    expert_ranks: ExpertRanks | None = None


@dataclass(frozen=True)
class Implementation:
    """One backend's way to run one op.

    Attributes:
        op: the spec it implements.
        name: `backend.function`, as tables print it and overrides name it.
        bind: makes a plan for static dimensions.
        when: predicate over static dimensions; False leaves the op to the next implementation.
        priority: the highest wins among those whose predicate holds.
        batch_invariant: False marks a faster form that is only chosen with `batch_invariant=False`.
        module: where it is written; its file is part of the kernel's source (`deepinfer.ops.proof`).
        sources: other files of that source, as globs beside the module's file.
        interpreted: False for a kernel that the backend's emulated form cannot run.
    """

    op: OpSpec[..., Any]
    name: str
    bind: Callable[[Dims, BindContext], Plan]
    when: Callable[[Dims], bool]
    priority: int = 0
    batch_invariant: bool = True
    module: str = ""
    sources: tuple[str, ...] = ()
    interpreted: bool = True


def _always(dims: Dims) -> bool:
    return True


@dataclass
class Backend:
    """A device family: how to find out whether it is here, how to run it, and which ops it implements.

    Args:
        name: what `backend=` and the command line call it.
        device_type: the `torch.device` type its tensors have.
        probe: answers without importing any kernel module.
        op_modules: imported on first use; each registers implementations.
        runtime: makes the runtime (device, streams, memory) on first use.
        priority: which backend `auto` prefers among those available.
        api_version: the op contract this backend was written for.
        sources: files that all its kernels are made of, as globs beside the file of any of its op modules; an edit of
            one of them takes back what was proven.
        software: its device exists only in software; there are no kernels of its own to prove with the model's shapes.
        emulation: makes this process one that interprets the kernels on the host, and gives the runtime for that; None
            where there is no interpreter. Called before any kernel is imported.
    """

    name: str
    device_type: str
    probe: Callable[[], Availability]
    op_modules: tuple[str, ...] = ()
    runtime: Callable[[], Runtime] | None = None
    priority: int = 0
    api_version: int = API_VERSION
    sources: tuple[str, ...] = ()
    software: bool = False
    emulation: Callable[[], Runtime] | None = None
    implementations: list[Implementation] = field(default_factory=list, repr=False)
    _loaded: bool = field(default=False, repr=False)

    def load(self) -> None:
        """Import the op modules, which register their implementations; a second call does nothing."""
        if not self._loaded:
            for module in self.op_modules:
                importlib.import_module(module)
            self._loaded = True

    def emulated(self) -> Backend:
        """This backend with its kernels interpreted on the host: what passes there is proven as "emulated".

        Call it in a process that has not loaded the backend's kernels; those that no interpreter runs are left out.

        Raises:
            BackendUnavailableError: there is no interpreter for it, or not in this process.
        """
        if self.emulation is None:
            raise BackendUnavailableError(f"backend {self.name!r} has no emulated form")
        runtime = self.emulation()
        self.load()
        return replace(
            self,
            device_type=runtime.device.type,
            probe=lambda: Availability(True),
            runtime=lambda: runtime,
            implementations=[i for i in self.implementations if i.interpreted],
        )

    def implements(
        self,
        op: OpSpec[..., Any],
        *,
        when: Callable[[Dims], bool] = _always,
        priority: int = 0,
        batch_invariant: bool = True,
        sources: tuple[str, ...] = (),
    ) -> Callable[[F], F]:
        """Register a plain function with the op's own signature.

        Args:
            op: the spec; keyword names and order must match its reference.
            when: predicate over static dimensions.
            priority: the highest wins.
            batch_invariant: False for a faster form without row invariance.
            sources: files beside this module that the kernel is made of, as globs.
        """

        def wrap(function: F) -> F:
            plan = FunctionPlan(function)
            self.implementations.append(
                Implementation(
                    op=op,
                    name=f"{self.name}.{function.__name__}",
                    bind=lambda dims, ctx: plan,
                    when=when,
                    priority=priority,
                    batch_invariant=batch_invariant,
                    module=function.__module__,
                    sources=self.sources + sources,
                )
            )
            return function

        return wrap

    def implements_plan(
        self,
        op: OpSpec[..., Any],
        *,
        when: Callable[[Dims], bool] = _always,
        priority: int = 0,
        batch_invariant: bool = True,
        sources: tuple[str, ...] = (),
        interpreted: bool = True,
    ) -> Callable[[Callable[[Dims, BindContext], Plan]], Callable[[Dims, BindContext], Plan]]:
        """Register a `bind(dims, ctx) -> Plan` for kernels that want scratch, persistent memory or capture."""

        def wrap(bind: Callable[[Dims, BindContext], Plan]) -> Callable[[Dims, BindContext], Plan]:
            name = getattr(bind, "__name__", "plan")
            self.implementations.append(
                Implementation(
                    op,
                    f"{self.name}.{name}",
                    bind,
                    when,
                    priority,
                    batch_invariant,
                    module=bind.__module__,
                    sources=self.sources + sources,
                    interpreted=interpreted,
                )
            )
            return bind

        return wrap
