"""An op as a backend runs it: resolved, bound, fed with device copies, its results brought back to the host.

New memory is poisoned while a subject runs, so an implementation that reads what it did not write, or leaves part of
a result unwritten, shows NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.values import HUGE_BYTES, extent, place, transform, walk
from deepinfer.ops.backend import Backend, BindContext, Dims, Implementation, Plan, PreparingPlan
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.registry import OpTable
from deepinfer.ops.runtime import Runtime
from deepinfer.ops.spec import OpSpec

Arguments = dict[str, Any]
SPARE_BYTES = 8 << 30
"""Free memory that a device must have before a case with far addresses runs on it."""


@dataclass(frozen=True)
class Subject:
    """One op on one implementation.

    Attributes:
        op: the contract.
        implementation: name as tables print it.
        native: False when it is the reference.
        plan: bound to the dimensions of the case.
        runtime: the device.
        batch_invariant: rows must have the same bits in any batch.
        persistent: what the plan asked for, zeroed once; every run must leave it zero.
        dirt: what runs left there, in words.
    """

    op: OpSpec[..., Any]
    implementation: str
    native: bool
    plan: Plan
    runtime: Runtime
    batch_invariant: bool = True
    persistent: Tensor | None = field(default=None, init=False, repr=False)
    dirt: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.plan.persistent_bytes:
            object.__setattr__(self, "persistent", self.runtime.zeros((self.plan.persistent_bytes,), torch.uint8))

    def run(self, args: Mapping[str, Any], *, poisoned: bool = True) -> Any:
        """Run on `args` (host tensors); written arguments and results come back to the host.

        Args:
            args: keyword arguments; those the op mutates are updated in place.
            poisoned: fill new memory with NaN, 0xFF and the largest integers.
        """
        return self.fetch(args, self.launch(args, poisoned=poisoned))

    def launch(self, args: Mapping[str, Any], *, poisoned: bool = True) -> tuple[Mapping[str, Any], Any]:
        """Start the op; `fetch` brings back its results."""
        there = args if self._on_host else {name: self.moved(value) for name, value in args.items()}
        there = self.prepared(there)
        options = self.options(args)
        with poisoned_memory() if poisoned else plain_memory():
            returned = self.plan.run(*self.positional(there), **options)
            self.runtime.synchronize()
        result = options.get("out", returned)  # the engine does not look at what is returned either
        if self.persistent is not None:
            dirty = int((self.runtime.to_host(self.persistent) != 0).sum())
            if dirty:
                self.dirt.append(f"a run left {dirty} of {self.plan.persistent_bytes} bytes other than zero")
        return there, result

    @property
    def has_graphs(self) -> bool:
        """The plan promises to fit into a graph, and the device has graphs."""
        return self.native and self.plan.capturable and self.runtime.capabilities.graphs

    def replay(self, args: Mapping[str, Any]) -> Any:
        """As `run`, by capturing the op as a graph and replaying it once.

        Raises:
            CaptureError: or what else the device raises where the plan allocates, waits or reads on the host.
        """
        there = self.prepared({name: self.moved(value) for name, value in args.items()})
        positional, options = self.positional(there), self.options(args)
        self.runtime.synchronize()
        replay = self.runtime.capture(lambda: self.plan.run(*positional, **options))
        replay()
        self.runtime.synchronize()
        return self.fetch(args, (there, options.get("out")))

    def fetch(self, args: Mapping[str, Any], launched: tuple[Mapping[str, Any], Any]) -> Any:
        """Results on the host; what the op wrote in place is copied back into `args`."""
        there, result = launched
        if self._on_host:
            return result
        for name in self.op.mutates:
            for (_, mine), (_, theirs) in zip(walk(args[name]), walk(there[name]), strict=True):
                mine.copy_(self.runtime.to_host(theirs))
        return transform(result, self.runtime.to_host)

    def prepared(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Arguments on the device in the forms that the plan makes of weights, as a model passes them."""
        if not isinstance(self.plan, PreparingPlan):
            return args
        return {
            name: value if name in self.op.mutates else self.plan.prepare(name, value) for name, value in args.items()
        }

    def positional(self, args: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments in the order of the signature, defaults filled in."""
        bound = self.op.signature.bind(**args)
        bound.apply_defaults()
        return bound.args

    def options(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """`scratch=` and `persistent=` as a `BoundOp` passes them, `out=` to a capturable plan; poison if not 0."""
        options: dict[str, Any] = {}
        if self.plan.scratch_bytes:
            options["scratch"] = self._filled((self.plan.scratch_bytes,), torch.uint8)
        if self.persistent is not None:
            options["persistent"] = self.persistent
        if self.plan.capturable and self.op.results is not None:
            arguments = dict(zip(self.op.signature.parameters, self.positional(args), strict=True))
            out = self.op.results(self._filled, SimpleNamespace(**arguments))
            if out is not None:
                options["out"] = out
        return options

    def _filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value: Any = torch.nan if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max
        if self.runtime.capabilities.torch_compute:
            return self.runtime.empty(shape, dtype).fill_(value)  # scratch may be large, and this is done for every run
        return self.runtime.to_device(torch.full(shape, value, dtype=dtype))

    @property
    def _on_host(self) -> bool:
        return self.runtime.device.type == "cpu"

    def moved(self, value: Any) -> Any:
        """Device copies that keep strides."""

        def there(tensor: Tensor) -> Tensor:
            if tensor.is_contiguous():
                return self.runtime.to_device(tensor)
            if extent(tensor) * tensor.element_size() <= HUGE_BYTES:
                # Gaps travel too, so that nothing but a copy to the device and a view of it is asked of torch there.
                whole = tensor.as_strided((extent(tensor),), (1,), tensor.storage_offset())
                return self.runtime.to_device(whole).as_strided(tensor.shape, tensor.stride())
            return place(
                self.runtime.to_device(tensor.contiguous()).as_strided(tensor.shape, _packed(tensor)),
                self._room(tensor),
            )

        return transform(value, there)

    def _room(self, tensor: Tensor) -> Callable[[int, torch.dtype], Tensor]:
        def buffer(elements: int, dtype: torch.dtype) -> Tensor:
            room = self.runtime.empty((max(elements, extent(tensor)),), dtype)
            return room.as_strided(tensor.shape, tensor.stride()) if 0 not in tensor.stride() else room[:elements]

        return buffer


def _packed(tensor: Tensor) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def resolve(
    backend: Backend, runtime: Runtime, op: OpSpec[..., Any], dims: Dims, *, batch_invariant: bool = True
) -> Subject:
    """The implementation that the registry would choose for these dimensions; the reference where there is none."""
    table = OpTable(backend, context(runtime, batch_invariant=batch_invariant), overrides={})
    bound = table.bind(op, **dims)
    return Subject(op, bound.implementation, bound.native, bound.plan, runtime, batch_invariant)


def subject_of(implementation: Implementation, runtime: Runtime, dims: Dims) -> Subject | None:
    """One given implementation; None when its predicate refuses these dimensions."""
    if not implementation.when(dims):
        return None
    invariant = implementation.batch_invariant
    plan = implementation.bind(dims, context(runtime, batch_invariant=invariant))
    return Subject(implementation.op, implementation.name, True, plan, runtime, invariant)


def context(runtime: Runtime, *, batch_invariant: bool = True) -> BindContext:
    """What implementations bind with here."""
    return BindContext(runtime.device, runtime, batch_invariant, max_tokens=8192)


def open_runtime(backend: Backend) -> Runtime:
    """The backend's runtime, or the host's for a backend that has none of its own."""
    if backend.runtime is not None:
        return backend.runtime()
    return HostRuntime()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New torch memory holds NaN or the largest integer until it is written."""
    was = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


@contextmanager
def plain_memory() -> Iterator[None]:
    """New memory as it comes."""
    yield
