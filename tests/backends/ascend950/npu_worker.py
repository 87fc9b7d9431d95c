"""Run in a process of its own, over the stub: every provider's cases, with the operators' documented values.

Prints one JSON object: for each implementation its verdict, and how often each operator was called, with which results
differed from its meta function.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch_npu  # registers the operators' schemas and meta functions
from torch.utils._pytree import tree_map

from deepinfer.backends.ascend950 import BACKEND, providers
from deepinfer.backends.ascend950.host.torch_device import NpuTorch
from deepinfer.conformance.selfcheck import verify_implementation
from deepinfer.ops.host import HostRuntime

_SPEC = importlib.util.spec_from_file_location("npu_operators", Path(__file__).with_name("npu_operators.py"))
assert _SPEC is not None and _SPEC.loader is not None
operators = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(operators)

calls: Counter[str] = Counter()
differences: list[str] = []


def _to_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on_host(name: str) -> Any:
    """The documented operator, which also asks the real one's meta function for shapes and dtypes."""
    operator = getattr(torch.ops.npu, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        results = operators.OPERATORS[name](*args, **kwargs)
        answer = operator(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        listed = results if isinstance(results, (tuple, list)) else (results,)
        meta = answer if isinstance(answer, (tuple, list)) else (answer,)
        for place, (own, real) in enumerate(zip(listed, meta, strict=True)):
            said = None if real is None else (tuple(real.shape), real.dtype)
            if said is not None and said != (tuple(own.shape), own.dtype):
                differences.append(f"{name}[{place}]: {tuple(own.shape)} {own.dtype}, its meta function {said}")
        return results

    return call


class _Stream:
    """A stream by torch_npu's names, without a device."""

    handles = itertools.count(1)

    def __init__(self, device: Any = None) -> None:
        self.npu_stream = next(self.handles)


def _torch_device() -> dict[str, Any]:
    """What `NpuTorch` makes of torch_npu's names, with stand-ins for those that need a device."""
    current, pools = [_Stream()], []

    @contextmanager
    def stream(chosen: _Stream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    @contextmanager
    def use_mem_pool(pool: Any, device: Any) -> Iterator[None]:
        pools.append((pool, str(device)))
        yield

    names = {
        "set_device": lambda device: None,
        "Stream": _Stream,
        "current_stream": lambda device: current[-1],
        "stream": stream,
        "memory_reserved": lambda device: 100,
        "memory_allocated": lambda device: 40,
        "MemPool": object,
        "use_mem_pool": use_mem_pool,
    }
    missing = [name for name in names if not hasattr(torch_npu.npu, name)]
    handle = hasattr(torch_npu.npu.Stream, "npu_stream")
    with ExitStack() as stack:
        for name, stand_in in names.items():
            stack.enter_context(mock.patch.object(torch_npu.npu, name, stand_in))
        device = NpuTorch(1)
        queue = device.new_queue()
        with device.use_queue(queue):
            followed = device.current_queue() == queue
        with device.kept_allocations() as memory:
            kept = pools == [(memory, "npu:1")]
        back = device.current_queue() != queue
        unused = device.unused_bytes()
    return {
        "missing": missing,
        "has a handle": handle,
        "device": str(device.device),
        "queues": [followed, back],
        "kept": kept,
        "unused": unused,
        "launches at once": os.environ["TASK_QUEUE_ENABLE"] == "0",
    }


def main() -> None:
    """Register the operators for the host and verify every provider there."""
    library = torch.library.Library("npu", "IMPL")
    for name in operators.OPERATORS:
        library.impl(name, _on_host(name), "CPU")
    runtime, verdicts = HostRuntime(), {}
    for implementation in BACKEND.implementations:
        if implementation.module == providers.__name__:
            verdict = verify_implementation(implementation, runtime, quick=True)
            verdicts[implementation.name] = [verdict.passed, verdict.detail]
    hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    report = {
        "verdicts": verdicts,
        "calls": calls,
        "differences": sorted(set(differences)),
        "torch device": _torch_device(),
        "hccl options": hasattr(hccl.Options(), "_timeout"),
    }
    json.dump(report, sys.stdout)


main()
