"""Lines of the table of ops: time and rate, against roofs measured in the same run and those of the datasheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

DATASHEETS: Final = {
    "H200": (989.0, 4800.0),
    "H100": (989.0, 3350.0),
    "B200": (2250.0, 8000.0),
    "B300": (2250.0, 8000.0),
}
"""By a part of the device's name: dense bf16 TFLOP/s, GB/s of memory, as the maker states them."""

_COLUMNS: Final = (
    "op",
    "shape",
    "µs, invariant",
    "µs, not",
    "rate",
    "share of the measured roof",
    "of the datasheet",
    "beside it, µs",
)


@dataclass(frozen=True)
class Roofs:
    """What bounds an op.

    Attributes:
        copy_gbs: GB/s of torch's own copy in this run, read and written bytes together.
        product_tflops: TFLOP/s of torch's own bf16 product in this run.
        sheet_gbs: GB/s of the datasheet; 0 for a device that is not known.
        sheet_tflops: bf16 TFLOP/s of it.
    """

    copy_gbs: float
    product_tflops: float
    sheet_gbs: float = 0.0
    sheet_tflops: float = 0.0

    @classmethod
    def of(cls, device_name: str, copy_gbs: float, product_tflops: float) -> Roofs:
        """With the datasheet of a device, if it is known."""
        tflops, gbs = next((sheet for name, sheet in DATASHEETS.items() if name in device_name), (0.0, 0.0))
        return cls(copy_gbs, product_tflops, gbs, tflops)


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        work: the op and its operands, the same for all that ran on them.
        op: what ran: an implementation, or a peer's name.
        shape: of its operands.
        invariant: a row's bits depend on nothing else in the batch; None for a peer, which promises nothing.
        us: microseconds a call.
        tflops: arithmetic rate, 0 where the op has none to speak of.
        gbs: bytes an ideal implementation moves, over the time.
        bound: "arithmetic" or "memory", whichever takes longer at the measured roofs.
        share: of that measured roof.
        sheet_share: of the datasheet's figure for it; 0 where the device is not known.
    """

    work: str
    op: str
    shape: str
    invariant: bool | None
    us: float
    tflops: float
    gbs: float
    bound: str
    share: float
    sheet_share: float

    @classmethod
    def of(
        cls,
        work: str,
        op: str,
        shape: str,
        us: float,
        *,
        invariant: bool | None,
        flops: float,
        num_bytes: float,
        roofs: Roofs,
    ) -> Line:
        """A call that took `us`, does `flops` and must move `num_bytes`."""
        tflops, gbs = flops / us / 1e6, num_bytes / us / 1e3
        by_flops = tflops / roofs.product_tflops if roofs.product_tflops else 0.0
        by_bytes = gbs / roofs.copy_gbs if roofs.copy_gbs else 0.0
        is_arithmetic = by_flops > by_bytes
        rate, sheet = (tflops, roofs.sheet_tflops) if is_arithmetic else (gbs, roofs.sheet_gbs)
        bound = "arithmetic" if is_arithmetic else "memory"
        sheet_share = rate / sheet if sheet else 0.0
        return cls(work, op, shape, invariant, us, tflops, gbs, bound, max(by_flops, by_bytes), sheet_share)

    def __str__(self) -> str:
        rate = f"{self.tflops:7.1f} TFLOP/s" if self.bound == "arithmetic" else f"{self.gbs:7.0f} GB/s   "
        promise = {True: "on ", False: "off", None: "   "}[self.invariant]
        sheet = f", {self.sheet_share:4.0%} of the datasheet" if self.sheet_share else ""
        who = f"  {self.op}" if self.invariant is None else self.op
        return f"{who:40} {self.shape:40} {promise} {self.us:9.1f} us {rate} {self.share:5.0%} of {self.bound}{sheet}"


def markdown(lines: Sequence[Line]) -> str:
    """A table for people: a row per op and operands, invariance on and off side by side, peers in the last column."""
    rows = [f"| {' | '.join(_COLUMNS)} |", "|" + " --- |" * len(_COLUMNS)]
    for work in dict.fromkeys(line.work for line in lines):
        group = [line for line in lines if line.work == work]
        own = {line.invariant: line for line in group if line.invariant is not None}
        first = own.get(True) or own.get(False)
        if first is None:
            continue
        rate = f"{first.tflops:.0f} TFLOP/s" if first.bound == "arithmetic" else f"{first.gbs:.0f} GB/s"
        times = [f"{own[kind].us:.1f}" if kind in own else "the same" for kind in (True, False)]
        share = f"{first.share:.0%} of {first.bound}"
        sheet = f"{first.sheet_share:.0%}" if first.sheet_share else ""
        peers = "; ".join(f"{line.op} {line.us:.1f}" for line in group if line.invariant is None)
        cells = (f"`{first.op}`", first.shape, *times, rate, share, sheet, peers)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
