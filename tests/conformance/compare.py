"""Comparing a result with the reference's under the op's tolerance, leaf by leaf.

Integers must be equal, floats within `atol + rtol * |want|`, quantised values by how many codes differ and by how much:
where an op allows `off_by_one`, a value may be one step of its (coarser) scale away, and only so many of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.values import cache_parts, first_difference, settle_codes
from deepinfer.ops.formats import PagedCache, QTensor
from deepinfer.ops.spec import Tolerance

EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.25, 0.5, 1.0)
"""Upper edges of the error histogram, as shares of the tolerance; the last bin is beyond it."""


@dataclass
class Comparison:
    """What comparing one case gave.

    Attributes:
        failures: one message per leaf that is out of tolerance.
        histogram: elements per bin of `EDGES`, and those beyond.
        worst: largest error as a share of the tolerance (inf for a NaN that should not be, or the other way).
        sim: largest `1 - similarity` of a float leaf.
        differing: largest share of quantised values that differ.
    """

    failures: list[str] = field(default_factory=list)
    histogram: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    worst: float = 0.0
    sim: float = 0.0
    differing: float = 0.0


def compare(got: Any, want: Any, tolerance: Tolerance) -> Comparison:
    """Compare two trees of equal structure."""
    outcome = Comparison()
    for path, mine, reference in _pairs(got, want, ""):
        if mine is None or reference is None or type(mine) is not type(reference):
            outcome.failures.append(f"{path}: got {_describe(mine)}, want {_describe(reference)}")
        elif isinstance(mine, QTensor):
            _quantised(outcome, path, mine, reference, tolerance)
        elif isinstance(mine, PagedCache):
            _cache(outcome, path, mine, reference, tolerance)
        elif isinstance(mine, Tensor):
            _tensor(outcome, path, mine, reference, tolerance)
        elif mine != reference:
            outcome.failures.append(f"{path}: got {mine!r}, want {reference!r}")
    return outcome


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _pairs(got: Any, want: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Leaves of both trees side by side; a missing one is None."""
    if got is None and want is None:
        return
    if isinstance(want, Tensor | QTensor | PagedCache) or type(got) is not type(want):
        yield path or "result", got, want
    elif isinstance(want, Mapping):
        for key in want:
            yield from _pairs(got.get(key), want[key], f"{path}.{key}" if path else str(key))
    elif isinstance(want, tuple | list):
        if len(got) != len(want):
            yield path or "result", len(got), len(want)
            return
        for index, (mine, reference) in enumerate(zip(got, want, strict=True)):
            yield from _pairs(mine, reference, f"{path}[{index}]")
    elif is_dataclass(want) and not isinstance(want, type):
        for part in fields(want):
            yield from _pairs(getattr(got, part.name), getattr(want, part.name), f"{path}.{part.name}")
    else:
        yield path or "result", got, want


def _tensor(outcome: Comparison, path: str, got: Tensor, want: Tensor, tolerance: Tolerance) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        outcome.failures.append(f"{path}: got {_describe(got)}, want {_describe(want)}")
        return
    if not want.numel():
        return
    if not want.dtype.is_floating_point:
        _count(outcome, torch.where(got == want, 0.0, math.inf))
        if not torch.equal(got, want):
            outcome.failures.append(f"{path}: {first_difference(got, want)} (integers must be equal)")
        return
    left, right = got.double(), want.double()
    error = (left - right).abs()
    allowed = tolerance.atol + tolerance.rtol * right.abs()
    share = torch.where(error == 0, 0.0, error / allowed)
    special = ~(left.isfinite() & right.isfinite())
    agree = (left == right) | (left.isnan() & right.isnan())
    share = torch.where(special, torch.where(agree, 0.0, math.inf), share)
    _count(outcome, share)
    beyond = share > 1
    if bool(beyond.any()):
        index = tuple(beyond.nonzero()[0].tolist())
        outcome.failures.append(
            f"{path}: {int(beyond.sum())} of {want.numel()} elements beyond "
            f"{tolerance.atol:g} + {tolerance.rtol:g} * |want|, "
            f"first at {list(index)}: got {got[index].item():.9g}, want {want[index].item():.9g}"
        )
    if tolerance.sim is not None:
        x, y = left[~special], right[~special]
        norm = float((x.square().sum() + y.square().sum()).item())
        sim = float((x - y).square().sum()) / norm if norm else 0.0
        outcome.sim = max(outcome.sim, sim)
        if sim > tolerance.sim:
            outcome.failures.append(f"{path}: 1 - similarity is {sim:.3g}, allowed {tolerance.sim:g}")


def _count(outcome: Comparison, share: Tensor) -> None:
    flat = share.flatten().float()
    outcome.worst = max(outcome.worst, float(flat.max()))
    edges = torch.tensor(EDGES)
    for bin_, number in zip(*torch.bucketize(flat, edges).unique(return_counts=True), strict=True):
        outcome.histogram[int(bin_)] += int(number)


def _quantised(outcome: Comparison, path: str, got: QTensor, want: QTensor, tolerance: Tolerance) -> None:
    if (got.fmt, got.layout, got.data.shape, got.scale.shape) != (
        want.fmt,
        want.layout,
        want.data.shape,
        want.scale.shape,
    ):
        outcome.failures.append(
            f"{path}: got {got.fmt} {got.layout} {got.shape}, want {want.fmt} {want.layout} {want.shape}"
        )
        return
    got, want = settle_codes(got), settle_codes(want)
    same = torch.equal(got.data, want.data) and torch.equal(got.scale, want.scale)
    count = math.prod(want.shape)
    if same or not tolerance.off_by_one:
        outcome.histogram[0 if same else -1] += count
        if not same:
            part, left, right = ("scale", got.scale, want.scale)
            if torch.equal(left, right):
                part, left, right = ("data", got.data, want.data)
            outcome.worst = math.inf
            outcome.failures.append(f"{path}.{part}: {first_difference(left, right)} (codes and scales must be equal)")
        return
    _off_by_one(outcome, path, got, want, tolerance)


def _off_by_one(outcome: Comparison, path: str, got: QTensor, want: QTensor, tolerance: Tolerance) -> None:
    from deepinfer.ops.quant import dequantize

    left, right = dequantize(got, torch.float64), dequantize(want, torch.float64)
    width = left.shape[-1]
    group = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}[want.fmt]
    unit = torch.maximum(_scale_values(got), _scale_values(want)).repeat_interleave(group, -1)[..., :width]
    magnitude = torch.maximum(left.abs(), right.abs()) / unit
    if want.fmt == "mxfp8":
        step = torch.where(magnitude < 2.0**-6, 2.0**-9, torch.exp2(magnitude.clamp(min=2.0**-6).log2().floor() - 3))
    else:
        step = torch.where(magnitude <= 2, 0.5, torch.where(magnitude <= 4, 1.0, 2.0))
    share = torch.where(left == right, 0.0, (left - right).abs() / (step * unit))
    agree = (left == right) | (left.isnan() & right.isnan())
    share = torch.where(left.isfinite() & right.isfinite(), share, torch.where(agree, 0.0, math.inf))
    _count(outcome, share)
    differing = int((share > 0).sum())
    # a scale that moves by one step moves all the codes of its group
    moved = int((got.scale != want.scale).sum())
    groups_allowed = math.ceil(tolerance.off_by_one * want.scale.numel())
    allowed = math.ceil(tolerance.off_by_one * share.numel()) + group * min(moved, groups_allowed)
    outcome.differing = max(outcome.differing, differing / max(share.numel(), 1))
    if bool((share > 1.0001).any()):
        index = tuple((share > 1.0001).nonzero()[0].tolist())
        outcome.failures.append(
            f"{path}: value at {list(index)} is more than one code away: "
            f"got {left[index].item():g}, want {right[index].item():g}"
        )
    elif differing > allowed or moved > groups_allowed:
        outcome.failures.append(
            f"{path}: {differing} of {share.numel()} codes and {moved} scales differ, "
            f"allowed {allowed} and {groups_allowed}"
        )


def _scale_values(value: QTensor) -> Tensor:
    from deepinfer.ops.quant import e4m3_value, ue8m0_value

    convert = e4m3_value if value.fmt == "nvfp4" else ue8m0_value
    return convert(value.scale, torch.float64)


def _cache(outcome: Comparison, path: str, got: PagedCache, want: PagedCache, tolerance: Tolerance) -> None:
    (codes, scales), (want_codes, want_scales) = cache_parts(got), cache_parts(want)
    fmt = want.format.quant
    if fmt is None or scales is None or want_scales is None:
        _tensor(outcome, f"{path}.records", codes, want_codes, tolerance)
    else:
        _quantised(outcome, path, QTensor(codes, scales, fmt), QTensor(want_codes, want_scales, fmt), tolerance)
