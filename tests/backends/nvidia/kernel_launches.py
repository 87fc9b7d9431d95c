"""What a backend's kernels launch for cases of an op, recorded without a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.backends.nvidia.launch import Launch, recording
from deepinfer.conformance.runner import make_case
from deepinfer.ops.backend import Backend, BindContext
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.registry import discover_backends
from deepinfer.ops.spec import Case, OpSpec

GENERATIONS = {90: "cuda_sm90", 100: "cuda_sm100", 103: "cuda_sm100"}
"""Which backend serves a compute capability."""


def backend_of(capability: int) -> Backend:
    """The backend of a compute capability, with its kernels."""
    backend = discover_backends()[GENERATIONS[capability]]
    backend.load()
    return backend


def launches_of(
    backend: Backend, op: OpSpec[..., Any], case: Case, max_tokens: int
) -> tuple[list[Launch], list[Tensor]]:
    """Launches of every Triton implementation that takes a case, and the tensors that the case itself has."""
    arguments = make_case(op, case).args
    return launches_with(backend, op, arguments, max_tokens), list(tensors_in(arguments.values()))


def launches_with(backend: Backend, op: OpSpec[..., Any], arguments: dict[str, Any], max_tokens: int) -> list[Launch]:
    """Launches of every Triton implementation that takes these arguments."""
    bound = op.signature.bind(**arguments)
    bound.apply_defaults()
    dims = op.static_dims(arguments)
    context = BindContext(torch.device("cpu"), HostRuntime(), max_tokens=max_tokens)
    found: list[Launch] = []
    for implementation in backend.implementations:
        if implementation.op == op and implementation.interpreted and implementation.when(dims):
            with recording() as launches:
                implementation.bind(dims, context).run(*bound.args)
            found += launches
    return found


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor in a case's arguments, at any depth."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif hasattr(value, "__dict__"):
            yield from tensors_in(vars(value).values())
