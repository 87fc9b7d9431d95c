"""What each kernel plans to use of the machine, and the share of its roofline that the plan allows.

    python -m deepinfer.backends.ascend950.budget            # a table
    python -m deepinfer.backends.ascend950.budget --json

A budget is arithmetic on paper, kept beside the kernels in `budgets/`: bytes of local memories, bytes of global memory
per unit of work, instructions. No clock has confirmed any of it. Tests compare it with what the twin counts, local
memories and instructions of many kernels, bytes of few. The roofline of a kernel is the time of whichever is slower,
its bytes at the memory's rate or its products at the Cube's; the share is that time over the time of the plan's slowest
part, vector instructions and second-level cache included.

Source: peaks as tabulated publicly for Ascend 950PR and 950DT; one register instruction per cycle and vector core,
which leaves out that loads, stores and arithmetic can issue together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Final

from deepinfer.backends.ascend950 import OP_MODULES, twin_build
from deepinfer.backends.ascend950.launch import CUBE_CORES, VECTOR_CORES, Program

_PACKAGE: Final = "deepinfer.backends.ascend950"

CLOCK_HZ: Final = 1.65e9
LAYER_TWO: Final = 5e12
"""Bytes per second of the second-level cache."""

CAPACITY: Final = {"ub": 248 << 10, "l1": 512 << 10, "l0a": 64 << 10, "l0b": 64 << 10, "l0c": 256 << 10}
"""Bytes of each local memory of a core."""

SIMT_UB: Final = 216 << 10
"""What SIMT functions leave of the unified buffer."""

MACS: Final = {"bf16": 4096, "mxfp8": 8192, "mxfp4": 16384}
"""Products of a Cube core per cycle."""

MEMORY: Final = {"950PR": 1.6e12, "950DT": 4.0e12}
"""Bytes per second of each part's memory."""


@dataclass(frozen=True)
class Budget:
    """The plan of one kernel, per unit of work where it says so.

    Attributes:
        kernel: entry name in the text. unit: what a unit of work is, with the sizes of the model that the numbers are
        for. core: "vector", "simt", "cube" or "mix". moved: bytes of global memory read and written per unit. ub: bytes
        of the unified buffer of a vector core. l1: bytes of L1 of a cube core. l0a: bytes of L0A. l0b: bytes of L0B.
        l0c: bytes of L0C. vector: register instructions per unit, over both vector cores of a block; of a SIMT
        function, warp instructions. macs: products per unit. cube_format: of the Cube's operands. cube_waits: cycles
        per unit in which the Cube does nothing although it is the unit's turn. cached: bytes per unit from the
        second-level cache beyond those from memory. cube_cores: cube cores that work at a time. vector_cores: vector
        cores that work at a time. note: what the reader should know.
    """

    kernel: str
    unit: str
    core: str
    moved: float
    ub: int = 0
    l1: int = 0
    l0a: int = 0
    l0b: int = 0
    l0c: int = 0
    vector: float = 0
    macs: float = 0
    cube_format: str = "bf16"
    cube_waits: float = 0
    cached: float = 0
    cube_cores: int = CUBE_CORES
    vector_cores: int = VECTOR_CORES
    note: str = ""

    @property
    def cube_cycles(self) -> float:
        """Cycles of products per unit on one cube core."""
        return self.macs / MACS[self.cube_format]

    def seconds(self, part: str) -> dict[str, float]:
        """Time per unit that each resource needs, all cores working, by the name of the resource.

        Args:
            part: "950PR" or "950DT".
        """
        return {
            "memory": self.moved / MEMORY[part],
            "cache": (self.moved + self.cached) / LAYER_TWO,
            "vector": self.vector / (self.vector_cores * CLOCK_HZ),
            "cube": (self.cube_cycles + self.cube_waits) / (self.cube_cores * CLOCK_HZ),
        }

    def bound(self, part: str) -> str:
        """The resource that takes longest."""
        times = self.seconds(part)
        return max(times, key=lambda name: times[name])

    def share(self, part: str) -> float:
        """Share of the roofline that the plan allows, in (0, 1]."""
        ideal = max(self.moved / MEMORY[part], self.cube_cycles / (CUBE_CORES * CLOCK_HZ))
        return ideal / max(self.seconds(part).values())

    @property
    def share_of_cube(self) -> float:
        """Share of the Cube's peak that the plan allows where memory is fast enough."""
        times = self.seconds("950DT")
        return self.cube_cycles / (CUBE_CORES * CLOCK_HZ) / max(times["cube"], times["vector"], times["cache"])

    def overflows(self) -> list[str]:
        """Local memories that the plan asks more of than there is."""
        limits = {**CAPACITY, "ub": SIMT_UB if self.core == "simt" else CAPACITY["ub"]}
        return [name for name, limit in limits.items() if getattr(self, name) > limit]


def kernel_entries() -> dict[str, str]:
    """Every kernel that an op of the package can launch: entry name to the file that holds it."""
    from deepinfer.backends.ascend950.generated import family

    generated = (family(file.stem) for file in sorted((twin_build.KERNELS / "generated").glob("*.asc")))
    modules = (import_module(f"{_PACKAGE}.{name}") for name in OP_MODULES)
    programs = [value for module in modules for value in vars(module).values() if isinstance(value, Program)]
    programs += [next(iter(kernels.values())).kernel.program for kernels in generated]
    return {kernel.entry: program.path.name for program in programs for kernel in program.kernels}


def budgets() -> dict[str, Budget]:
    """All budgets by kernel, in the order of `budgets/`."""
    from deepinfer.backends.ascend950.budgets import ALL

    return {budget.kernel: budget for budget in ALL}


def rows() -> Iterator[dict[str, object]]:
    """One row per kernel, as the table and the JSON have them; a kernel without a budget has only its name and file."""
    known = budgets()
    for entry, file in kernel_entries().items():
        if entry not in known:
            yield {"kernel": entry, "file": file}
            continue
        budget = known[entry]
        shares = {f"share_{part}": round(budget.share(part), 3) for part in MEMORY}
        bounds = {f"bound_{part}": budget.bound(part) for part in MEMORY}
        yield {**asdict(budget), "file": file, "cube_cycles": round(budget.cube_cycles, 1), **shares, **bounds}


def _table() -> str:
    head = ("kernel", "cores", "UB", "L1", "L0A", "L0B", "L0C", "moved", "vector", "cube", "950PR", "950DT", "unit")
    lines: list[tuple[str, ...]] = [head]
    known = budgets()
    for entry in kernel_entries():
        budget = known.get(entry)
        if budget is None:
            lines.append((entry, "no budget", *("",) * 11))
            continue
        cores = {"cube": f"{budget.cube_cores} AIC", "mix": f"{budget.cube_cores} AIC + {budget.vector_cores} AIV"}
        local = (budget.ub, budget.l1, budget.l0a, budget.l0b, budget.l0c)
        shares = (f"{budget.share(part):.0%} {budget.bound(part)}" for part in MEMORY)
        lines.append(
            (
                entry,
                cores.get(budget.core, f"{budget.vector_cores} AIV{' SIMT' if budget.core == 'simt' else ''}"),
                *(f"{size}" if size else "" for size in local),
                f"{budget.moved:.0f}",
                f"{budget.vector:.0f}" if budget.vector else "",
                f"{budget.cube_cycles:.0f}" if budget.macs else "",
                *shares,
                budget.unit,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the budgets."""
    parser = argparse.ArgumentParser(prog="budget", description="Static budget of every kernel for Ascend 950.")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    if parser.parse_args(arguments).json:
        sys.stdout.write(json.dumps(list(rows()), indent=2) + "\n")
        return 0
    sys.stdout.write(_table() + "\n")
    sys.stdout.write(
        "bytes of local memories per core; bytes moved, register instructions and Cube cycles per unit; shares of the "
        "roofline on paper, and what bounds the plan\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
