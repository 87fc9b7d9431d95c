"""CUDA C++ programs on the CPU, each compiled once a session: that takes longer than most tests of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import cuda_on_cpu

from deepinfer.backends.nvidia.nvrtc import CudaProgram

PERMITTED = ("gather_records.cu:43",)
"""Lines in no order with themselves: reads of bits that others set meanwhile, to save setting them again."""
_MADE: dict[tuple[object, ...], ctypes.CDLL] = {}
"""By the name of the kernel, all that a compiler reads of it, and what is planted there."""


@dataclass(frozen=True)
class Fault:
    """A mistake that is planted in a source.

    Attributes:
        file: its name.
        good: what stands there once.
        bad: what stands there instead.
    """

    file: str
    good: str
    bad: str = ""

    def planted(self, path: Path, folder: Path) -> Path:
        """The file, or a copy with the mistake if it is that one."""
        if path.name != self.file:
            return path
        text = path.read_text()
        assert text.count(self.good) == 1, f"{self.file} has {self.good!r} {text.count(self.good)} times"
        copy = folder / path.name
        copy.write_text(text.replace(self.good, self.bad))
        return copy


@dataclass
class Notes:
    """What programs do to shared memory while `noted` lasts."""

    fault: Fault | None = None
    programs: list[ctypes.CDLL] = field(default_factory=list)

    def disorder(self) -> list[str]:
        """Pairs of accesses without an order, with their lines, but those that are permitted."""
        found = [pair for program in self.programs for pair in cuda_on_cpu.disorder(program)]
        return [pair for pair in found if not any(pair.count(line) == 2 for line in PERMITTED)]


_notes = Notes()


@contextmanager
def noted(fault: Fault | None = None) -> Iterator[Notes]:
    """Programs that are asked for meanwhile have a mistake, or none, and their accesses are watched."""
    global _notes
    before, _notes = _notes, Notes(fault)
    try:
        yield _notes
    finally:
        _notes = before


def on_cpu(program: CudaProgram, folder: Path) -> ctypes.CDLL:
    """As `cuda_on_cpu.on_cpu`; `folder` is where to if no test before wanted this program."""
    fault = _notes.fault
    key = program.entry, program.text(), fault
    if key not in _MADE:
        if fault:
            program = replace(program, files=tuple(fault.planted(path, folder) for path in program.files))
        _MADE[key] = cuda_on_cpu.on_cpu(program, folder)
    if _MADE[key] not in _notes.programs:
        _notes.programs.append(_MADE[key])
    return _MADE[key]
