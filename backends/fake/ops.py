"""Every op of the contract on the fake device: the CPU backend's implementation, run late on hidden memory.

A backend imports no other backend, so the host's implementations are found as a user would find them: by entry point.
Where the CPU has none, or is not installed, the reference runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.backends.fake import BACKEND
from deepinfer.backends.fake.errors import HostAccessError
from deepinfer.backends.fake.memory import Ref
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.backends.fake.streams import Work
from deepinfer.backends.fake.tensor import FakeTensor
from deepinfer.ops.backend import Backend, BindContext, Dims, FunctionPlan
from deepinfer.ops.catalog import defined_ops
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.registry import BoundOp, OpTable, discover_backends
from deepinfer.ops.spec import OpSpec
from deepinfer.ops.trees import map_tensors, tensors_of


@dataclass(frozen=True)
class _Struct:
    """A dataclass of the contract taken apart, so that its checks do not meet a `Ref`."""

    kind: type
    parts: dict[str, Any]


@dataclass(frozen=True)
class FakePlan:
    """One op on the fake device.

    Attributes:
        op: the contract.
        host: what computes it, on host tensors; it brings the memory that its plan asked for.
        runtime: the device.
        capturable: the shapes of its results are known before it runs, so the host need not wait.
        names: of its parameters, in order.
    """

    op: OpSpec[..., Any]
    host: BoundOp[..., Any]
    runtime: FakeRuntime
    capturable: bool
    names: tuple[str, ...]
    scratch_bytes: int = 0
    persistent_bytes: int = 0

    def run(self, *inputs: Any, out: Any = None, scratch: Tensor | None = None, **options: Any) -> Any:
        """Queue the op; results are tensors whose memory it will fill.

        Args:
            inputs: arguments by position.
            out: where to write the results; new memory by default.
            scratch: not needed.
            options: arguments by name.

        Raises:
            HostAccessError: an argument is a tensor of the host.
            LaunchError: a fault.
        """
        arguments = dict(zip(self.names, inputs, strict=False))
        if options or len(inputs) != len(self.names):
            bound = self.op.signature.bind(*inputs, **options)
            bound.apply_defaults()
            arguments = bound.arguments
        reads: list[Ref] = []
        writes: list[Ref] = []
        taken = {
            name: self._take(value, name, writes if name in self.op.mutates else reads)
            for name, value in arguments.items()
        }
        shaped = self.op.results
        if out is None and shaped is None:
            return self._run_and_wait(taken, reads, writes)
        result = out if shaped is None or out is not None else shaped(self.runtime.empty, SimpleNamespace(**arguments))
        targets: list[Ref] = []
        self._take(result, "out", targets)

        def compute() -> None:
            _store(self.op.name, tensors_of(self.host(**_give(taken))), targets)

        self.runtime.submit(Work(self.op.name, compute, tuple(reads), (*writes, *targets)), launch=True)
        return result

    def _run_and_wait(self, taken: Mapping[str, Any], reads: list[Ref], writes: list[Ref]) -> Any:
        """An op whose results have shapes that are not known before it ran."""
        got: list[Any] = []

        def compute() -> None:
            got.append(self.host(**_give(taken)))

        work = Work(self.op.name, compute, tuple(reads), tuple(writes))
        self.runtime.wait_for(
            self.runtime.submit(work, launch=True), f"{self.op.name}, the size of whose result is not declared,"
        )
        return map_tensors(got[0], self.runtime.to_device)

    def _take(self, value: Any, name: str, refs: list[Ref]) -> Any:
        """An argument as queued work holds it: memory by `Ref`, so that it lives no longer than the program wants."""
        if isinstance(value, FakeTensor):
            refs.append(value.ref())
            return refs[-1]
        if value is None or isinstance(value, int | float | str | torch.dtype):
            return value

        def take(tensor: Tensor) -> Any:
            if isinstance(tensor, FakeTensor):
                refs.append(tensor.ref())
                return refs[-1]
            if name not in self.op.rules.host:
                raise HostAccessError(f"op {self.op.name}", f"its argument {name} is a tensor on {tensor.device}")
            return tensor

        return map_tensors(value, take, _Struct)


def _give(value: Any) -> Any:
    """The arguments for the host: what `_take` took apart, put together around views of the hidden memory."""
    if isinstance(value, Ref):
        return value.view()
    if isinstance(value, _Struct):
        return value.kind(**{name: _give(part) for name, part in value.parts.items()})
    if isinstance(value, tuple | list):
        return type(value)(_give(item) for item in value)
    if isinstance(value, dict):
        return {key: _give(item) for key, item in value.items()}
    return value


def _store(name: str, got: list[Tensor], targets: list[Ref]) -> None:
    shapes = [(tuple(t.shape), t.dtype) for t in got]
    wanted = [(t.shape, t.dtype) for t in targets]
    if shapes != wanted:
        raise OpArgumentError(f"{name} returned {shapes} where the fake device, or `out`, expects {wanted}")
    for tensor, target in zip(got, targets, strict=True):
        target.view().copy_(tensor)


def _register(op: OpSpec[..., Any]) -> None:
    def bind(dims: Dims, ctx: BindContext) -> FakePlan:
        if not isinstance(ctx.runtime, FakeRuntime):
            raise OpArgumentError(f"the fake backend runs on a FakeRuntime, got {type(ctx.runtime).__name__}")
        host = _host_op(op, dims, ctx)
        return FakePlan(op, host, ctx.runtime, capturable=op.results is not None, names=tuple(op.signature.parameters))

    bind.__name__ = op.name
    BACKEND.implements_plan(op)(bind)


def _host_backend() -> Backend | None:
    backend = discover_backends().get("cpu")
    if backend is None or backend.runtime is None or not backend.probe().available:
        return None
    backend.load()
    return backend


def _host_op(op: OpSpec[..., Any], dims: Dims, ctx: BindContext) -> BoundOp[..., Any]:
    if _HOST is None or _HOST.runtime is None:
        return BoundOp(op, "reference", False, FunctionPlan(op.reference), dims)
    context = BindContext(torch.device("cpu"), _HOST.runtime(), ctx.batch_invariant, ctx.max_tokens)
    return OpTable(_HOST, context, overrides={}).bind(op, **dims)


_HOST: Final = _host_backend()
for _op in defined_ops().values():
    _register(_op)
