"""Kernels whose text TileLang made (`tiles/`), declared from the head of the pinned file and called by argument names.

TileLang orders a kernel's parameters as it likes, and drops those that a variant does not use; so a call names its
arguments and hands over those that the text still asks for.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.backends.ascend950.launch import VECTOR_CORES, Kernel, program

SOURCES: Final = ("generated.py", "kernels/generated/tile_names.h")
"""Files that every pinned kernel is made of, beside its own and the twin's."""


@dataclass(frozen=True)
class Generated:
    """A pinned kernel.

    Attributes:
        kernel: its declaration.
    """

    kernel: Kernel

    def __call__(self, tasks: int, **arguments: Any) -> None:
        """Launch on as many vector cores as there are tasks for; no tasks launch nothing.

        Args:
            tasks: what the kernel deals out to its cores (`cores` is filled in here).
            arguments: tensors, None and numbers, by the names of the definition.

        Raises:
            KeyError: an argument that the text asks for is missing.
        """
        blocks = min(tasks, VECTOR_CORES)
        values = {**arguments, "cores": blocks}
        self.kernel(blocks, *(values[parameter.name] for parameter in self.kernel.parameters))


@functools.cache
def family(name: str) -> dict[str, Generated]:
    """The kernels of `kernels/generated/NAME.asc`, by the names of their definitions."""
    made = program(f"generated/{name}.asc", zero_is_ub=True)
    heads = re.findall(r"^// kernel (\w+): (.*)$", made.path.read_text(), re.MULTILINE)
    return {kernel: Generated(made.kernel(f"{kernel}_kernel", signature)) for kernel, signature in heads}


def tasks_of(count: int, each: int) -> int:
    """How many pieces of `each` hold `count`."""
    return -(-count // each)
