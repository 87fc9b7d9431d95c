"""How functions that launch kernels become implementations of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from deepinfer.backends.ascend950 import BACKEND
from deepinfer.ops.backend import BindContext, Dims, Implementation, Plan
from deepinfer.ops.spec import OpSpec

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class KernelPlan:
    """Launches on the current stream, with results in `out` where the caller has memory for them.

    Attributes:
        function: takes the op's arguments and `out`; with `scratch_bytes` also `scratch`.
        scratch_bytes: bytes between the launches of one run.
        persistent_bytes: none of these kernels keeps anything.
        capturable: False where a run needs the host.
    """

    function: Callable[..., Any]
    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = True

    def run(self, *inputs: Any, out: Any = None, scratch: Tensor | None = None, **options: Any) -> Any:
        """Launch; without `out` the results are new memory."""
        if scratch is not None:
            return self.function(*inputs, out=out, scratch=scratch, **options)
        return self.function(*inputs, out=out, **options)


def _always(dims: Dims) -> bool:
    return True


def implements(
    op: OpSpec[..., Any],
    *,
    sources: tuple[str, ...],
    when: Callable[[Dims], bool] = _always,
    capturable: bool = True,
    scratch: Callable[[Dims, BindContext], int] | None = None,
) -> Callable[[F], F]:
    """Register a function `f(*the op's arguments, out=None)` that launches kernels.

    Args:
        op: the contract.
        sources: kernel files of this folder, such as "kernels/norm.asc"; headers and the twin are counted anyway.
        when: predicate over static dimensions.
        capturable: False where a run needs the host.
        scratch: bytes that a run needs between its launches; the function then takes `scratch` too.
    """

    def wrap(function: F) -> F:
        def bind(dims: Dims, ctx: BindContext) -> Plan:
            num_bytes = scratch(dims, ctx) if scratch is not None else 0
            return KernelPlan(function, scratch_bytes=num_bytes, capturable=capturable)

        BACKEND.implementations.append(
            Implementation(
                op,
                f"{BACKEND.name}.{function.__name__}",
                bind,
                when,
                module=function.__module__,
                sources=BACKEND.sources + sources,
            )
        )
        return function

    return wrap
