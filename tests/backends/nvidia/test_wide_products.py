"""Products with packed weights on the host's side: what they launch and what memory they take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from deepinfer.backends.cuda_sm90 import linear
from deepinfer.backends.cuda_sm90.packing import pack
from deepinfer.backends.nvidia.ahead import compile_ahead
from deepinfer.backends.nvidia.launch import recording
from deepinfer.ops.backend import BindContext
from deepinfer.ops.formats import QTensor, QuantFormat
from deepinfer.ops.host import HostRuntime

ROWS, OUTPUTS, DEPTH, EXPERTS = 5, 256, 384, 3
DIMS = {"n": OUTPUTS, "k": DEPTH, "experts": EXPERTS, "groups": EXPERTS}


class NoNewMemory(TorchDispatchMode):
    """Raises where an operation of torch returns memory that it was not given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        if isinstance(result, Tensor) and result.numel() and result.untyped_storage().data_ptr() not in known:
            raise AssertionError(f"{func} made new memory")
        return result


def codes(*shape: int, fmt: QuantFormat) -> QTensor:
    """Equal codes; here only shapes count."""
    width = shape[-1] if fmt == "mxfp8" else shape[-1] // 2
    data = torch.full((*shape[:-1], width), 0x21, dtype=torch.uint8)
    return QTensor(data, torch.full((*shape[:-1], shape[-1] // 32), 120, dtype=torch.uint8), fmt)


def rows_of(kind: str, *shape: int) -> Tensor | QTensor:
    """Activations of a kind; odd ones have rows that no tensor map takes."""
    if kind == "mxfp8":
        return codes(*shape, fmt="mxfp8")
    if kind == "odd":
        return torch.ones((*shape[:-1], shape[-1] + 1), dtype=torch.bfloat16)[..., 1:]
    return torch.ones(shape, dtype=torch.float32 if kind == "float32" else torch.bfloat16)


def dense(x: Tensor | QTensor, fmt: QuantFormat) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    acc = torch.ones(ROWS, OUTPUTS, dtype=torch.bfloat16)
    return linear.linear_mx_wgmma, (x, pack(codes(OUTPUTS, DEPTH, fmt=fmt)), torch.float32, acc), (ROWS, OUTPUTS)


def experts(x: Tensor | QTensor, fmt: QuantFormat) -> tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
    ends = torch.tensor([2, 2, ROWS], dtype=torch.int32)
    weight = pack(codes(EXPERTS, OUTPUTS, DEPTH, fmt=fmt))
    return linear.moe_grouped_gemm_wgmma, (x, weight, ends, torch.float32), (ROWS, OUTPUTS)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("kind", ["mxfp8", "bfloat16", "odd", "float32"])
@pytest.mark.parametrize("operands", [dense, experts])
def test_a_run_with_scratch_makes_no_memory(
    operands: Callable[..., Any], kind: str, fmt: QuantFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = []
    monkeypatch.setattr(linear, "multiply", lambda *args, **kwargs: multiplied.append(args))
    bind, arguments, shape = operands(rows_of(kind, ROWS, DEPTH), fmt)
    plan = bind(DIMS, BindContext(torch.device("cpu"), HostRuntime(), max_tokens=ROWS))
    assert plan.capturable
    scratch, out = torch.empty(plan.scratch_bytes, dtype=torch.uint8), torch.empty(shape)
    with recording() as launches, NoNewMemory():  # type: ignore[no-untyped-call]
        assert plan.run(*arguments, out=out, scratch=scratch) is out
    assert len(multiplied) == (0 if kind == "float32" else 1)
    assert len(launches) == (1 if kind in ("mxfp8", "float32") else 0)  # decoded rows; the product itself


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_a_run_over_groups_makes_no_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = []
    monkeypatch.setattr(linear, "multiply", lambda *args, **kwargs: multiplied.append(args))
    x = rows_of(kind, ROWS, EXPERTS, DEPTH)
    weight = pack(codes(EXPERTS, OUTPUTS, DEPTH, fmt="mxfp8"))
    plan = linear.linear_grouped_o_wgmma(DIMS, BindContext(torch.device("cpu"), HostRuntime(), max_tokens=ROWS))
    assert isinstance(x, Tensor)
    out = torch.empty(ROWS, EXPERTS, OUTPUTS, dtype=x.dtype)
    with recording() as launches, NoNewMemory():  # type: ignore[no-untyped-call]
        assert plan.run(x, weight, out=out) is out
    assert (len(multiplied), len(launches)) == ((0, 1) if kind == "float32" else (1, 0))


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_the_form_for_float32_stays_in_registers(fmt: QuantFormat) -> None:
    with recording() as launches:
        for operands in (dense, experts):
            bind, arguments, _ = operands(rows_of("float32", ROWS, DEPTH), fmt)
            plan = bind(DIMS, BindContext(torch.device("cpu"), HostRuntime(), max_tokens=ROWS))
            plan.run(*arguments)
    for launch in launches:
        assert compile_ahead(launch, 90).spilled_bytes == 0


def test_packed_weights_give_the_bits_of_canonical_ones() -> None:
    worker = Path(__file__).parent / "wide_products_worker.py"
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
