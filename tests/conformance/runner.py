"""Running one case of one op: value, arguments, memory, layouts, determinism.

A case is made once per run from a seed that is a function of its name, so it can be made again anywhere. The reference
always runs on the host, in the dtypes of the case. A reference row (an op without an implementation) is checked against
itself in float64 and for everything else, and does not count as native.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.batches import Arguments
from deepinfer.conformance.compare import compare
from deepinfer.conformance.determinism import check_batches, check_repeat
from deepinfer.conformance.layouts import expanded, layout_variants
from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.subject import SPARE_BYTES, Subject
from deepinfer.conformance.values import HUGE_BYTES, copied, extent, snapshot, transform, walk
from deepinfer.ops.contract import check_arguments
from deepinfer.ops.spec import Case, OpSpec, Tolerance

REFERENCE_FLOAT = Tolerance(2e-4, 2e-5, off_by_one=5e-3, why="float32 against float64, sums of a few hundred terms")
RAISED = "runs"
"""The check that a case fails when something is raised."""
SLOW_FACTOR, SLOW_SECONDS = 10.0, 0.2


@dataclass(frozen=True)
class Made:
    """A case's arguments, and how to get them again."""

    op: OpSpec[..., Any]
    case: Case
    args: Arguments

    def fresh(self) -> Arguments:
        """Arguments with new copies of what the op mutates; the rest is shared."""
        far = any(
            extent(t) * t.element_size() > HUGE_BYTES for name in self.op.mutates for _, t in walk(self.args[name])
        )
        if far:
            return make_case(self.op, self.case).args
        return {name: copied(value) if name in self.op.mutates else value for name, value in self.args.items()}


def seed_of(op: str, case: str) -> int:
    """The seed of a case: a function of its name."""
    return zlib.crc32(f"{op}/{case}".encode())


def make_case(op: OpSpec[..., Any], case: Case) -> Made:
    """Build the arguments of a case and hold them against the contract.

    Raises:
        OpArgumentError: the case breaks the contract that it is to prove.
    """
    args = case.make(torch.Generator().manual_seed(seed_of(op.name, case.name)))
    check_arguments(op.name, op.arguments, args)
    return Made(op, case, args)


def run_case(subject: Subject, made: Made, *, quick: bool = False) -> CaseResult:
    """Run every check of a case.

    Args:
        subject: the op on one implementation.
        made: the case.
        quick: value and arguments only (verification on first use).
    """
    op, case = made.op, made.case
    result = CaseResult(1, op.name, case.name, subject.implementation, subject.native)
    if _too_far(subject, made):
        result.status, result.detail = "unsupported", "far addresses need 8 GiB of free device memory"
        return result
    try:
        for check in _checks(subject, made, result, quick):
            result.checks.append(check)
    except Exception as error:  # an implementation may raise anything; the suite goes on
        result.checks.append(Check(RAISED, False, f"{type(error).__name__}: {error}"))
    if subject.persistent is not None:
        result.checks.append(Check("persistent", not subject.dirt, "; ".join(subject.dirt[:1])))
    return result.settle()


def tolerance_for(op: OpSpec[..., Any], args: Arguments, want: Any) -> Tolerance:
    """The op's bound for these arguments and results: narrower where none is bfloat16."""
    rounds = any(tensor.dtype == torch.bfloat16 for _, tensor in walk((args, want)))
    return op.tolerance if rounds else op.tolerance.without_bfloat16()


def _too_far(subject: Subject, made: Made) -> bool:
    if subject.runtime.device.type == "cpu":
        return False
    far = any(extent(t) * t.element_size() > HUGE_BYTES for _, t in walk(made.args))
    return far and subject.runtime.memory_info().free_bytes < SPARE_BYTES


def _checks(subject: Subject, made: Made, result: CaseResult, quick: bool) -> Iterator[Check]:
    op, case = made.op, made.case
    define = definer(op)
    wanted = made.fresh()
    began = time.perf_counter()
    want = define(wanted, op.reference(**wanted))
    reference_seconds = time.perf_counter() - began
    untouched = {name: value for name, value in made.args.items() if name not in op.mutates}
    before = snapshot(untouched)

    args = made.fresh()
    began = time.perf_counter()
    got = define(args, subject.run(args))
    result.seconds = time.perf_counter() - began
    outcome = compare(_everything(op, args, got), _everything(op, wanted, want), tolerance_for(op, made.args, want))
    result.histogram, result.worst = outcome.histogram, outcome.worst
    yield Check("value", not outcome.failures, "; ".join(outcome.failures[:3]))
    changed = [path for path, bits in snapshot(untouched).items() if not torch.equal(bits, before[path])]
    yield Check("arguments", not changed, f"written, though the contract does not say so: {', '.join(changed)}")
    yield _aliasing(args, got)
    if quick:
        return
    if subject.has_graphs and op.results is not None:
        args = made.fresh()
        outcome = compare(
            _everything(op, args, define(args, subject.replay(args))),
            _everything(op, wanted, want),
            tolerance_for(op, made.args, want),
        )
        yield Check("capture", not outcome.failures, "; ".join(outcome.failures[:3]))
    yield check_repeat(op, lambda a: subject.run(a, poisoned=False), made.fresh, define)
    if not subject.native:
        yield from _float64(op, made, define)
    yield from _layouts(subject, made, want, wanted, define)
    if subject.batch_invariant:
        yield from check_batches(op, case, subject.run, made.fresh, seed_of(op.name, case.name))
    if subject.native and result.seconds > max(SLOW_SECONDS, SLOW_FACTOR * reference_seconds):
        again = made.fresh()  # the first call may have loaded or compiled something
        began = time.perf_counter()
        subject.run(again, poisoned=False)
        result.seconds = time.perf_counter() - began
    if subject.native and result.seconds > max(SLOW_SECONDS, SLOW_FACTOR * reference_seconds):
        result.status, result.detail = "slow", f"{result.seconds:.2f} s, the reference takes {reference_seconds:.2f} s"


def _everything(op: OpSpec[..., Any], args: Arguments, result: Any) -> dict[str, Any]:
    """Results and written arguments, as one tree."""
    return {"result": result, **{name: args[name] for name in op.mutates}}


def _aliasing(args: Arguments, result: Any) -> Check:
    """No result may share memory with an argument."""
    held = {tensor.untyped_storage().data_ptr(): path for path, tensor in walk(args) if tensor.numel()}
    shared = [
        f"{path} is {held[tensor.untyped_storage().data_ptr()]}"
        for path, tensor in walk(result, "result")
        if tensor.numel() and tensor.untyped_storage().data_ptr() in held
    ]
    return Check("aliasing", not shared, f"a result shares memory with an argument: {', '.join(shared)}")


def _layouts(subject: Subject, made: Made, want: Any, wanted: Arguments, define: Define) -> Iterator[Check]:
    op = made.op
    if any(extent(t) * t.element_size() > HUGE_BYTES for _, t in walk(made.args)):
        return
    reference = _everything(op, wanted, want)
    for name, args in layout_variants(op, made.fresh()):
        got = define(args, subject.run(args))
        outcome = compare(_everything(op, args, got), reference, tolerance_for(op, made.args, want))
        yield Check("layout", not outcome.failures, f"{name}: " + "; ".join(outcome.failures[:2]))
    spread = expanded(op, made.fresh(), made.case.rows)
    if spread is not None:
        packed = {name: transform(value, lambda t: t.contiguous().clone()) for name, value in spread.items()}
        reference = define(packed, op.reference(**packed))
        outcome = compare(define(spread, subject.run(spread)), reference, tolerance_for(op, packed, reference))
        yield Check("layout", not outcome.failures, "expanded: " + "; ".join(outcome.failures[:2]))


def _float64(op: OpSpec[..., Any], made: Made, define: Define) -> Iterator[Check]:
    """The reference in float32 against itself in float64 (no bfloat16: its rounding is part of the model)."""
    single = {name: _as(value, torch.float32) for name, value in made.fresh().items()}
    double = {name: _as(value, torch.float64) for name, value in made.fresh().items()}
    narrow = define(single, op.reference(**single))
    wide = define(double, op.reference(**double))
    left = _everything(op, single, narrow)
    right = transform(_everything(op, double, wide), _as_float32)
    outcome = compare(left, right, REFERENCE_FLOAT)
    yield Check("float64", not outcome.failures, "; ".join(outcome.failures[:2]))


def _as(value: Any, dtype: torch.dtype) -> Any:
    if value in (torch.bfloat16, torch.float32):
        return dtype
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return value.to(dtype)
    return value


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


Define = Callable[[Arguments, Any], Any]


def definer(op: OpSpec[..., Any]) -> Define:
    """Clears what the contract leaves undefined, so that it does not take part in comparisons."""
    return _UNDEFINED.get(op.name, lambda args, result: result)


def _defined_rows(args: Arguments, result: Tensor) -> Tensor:
    end = int(args["psum"][-1]) if len(args["psum"]) else 0
    return torch.cat((result[:end], torch.zeros_like(result[end:])))


def _defined_dispatch(args: Arguments, result: Any) -> Any:
    rows, weights, psum, handle = result
    end = int(psum[-1]) if len(psum) else 0

    def cut(tensor: Tensor) -> Tensor:
        return torch.cat((tensor[:end], torch.zeros_like(tensor[end:])))

    return transform(rows, cut), cut(weights), psum, handle


_UNDEFINED: dict[str, Define] = {"moe_grouped_gemm": _defined_rows, "ep_dispatch": _defined_dispatch}
