"""Which files a kernel's proof is bound to: all that its own folder contributes, so that no edit goes unnoticed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from deepinfer.ops.backend import Implementation
from deepinfer.ops.proof import source_files
from deepinfer.ops.registry import discover_backends

pytest.importorskip("triton", reason="the fallback of these kernels")

PLUMBING: Final = {"__init__.py", "registry.py", "tensors.py"}
"""What changes no result: the backend's name, what a plan is, new memory for results."""
UNUSED: Final = {"linear_bf16_wgmma": {"packing.py", "packing_narrow.py", "products.cu"}}
"""Files that a listed one needs for something else: of `products.py` this kernel has only how rows are tiled."""


def imported(file: Path) -> set[str]:
    """Names of files of backends that a Python file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepinfer.backends."):
            place = file.parent.parent.joinpath(*str(node.module).split(".")[2:])
            modules = [place.with_suffix(".py"), *(place / f"{name.name}.py" for name in node.names)]
            found |= {module.name for module in modules if module.is_file()}
    return found


def named(file: Path) -> set[str]:
    """Names of CUDA C++ files in a Python file's strings."""
    return set(re.findall(r'"(\w+\.cuh?)"', file.read_text(encoding="utf-8")))


def needed(implementation: Implementation) -> set[str]:
    """Names of the files that those of an implementation's own folder import or name."""
    module, *others = source_files(implementation)
    own = [file for file in (module, *others) if file.suffix == ".py" and file.parent.samefile(module.parent)]
    return set().union(*(imported(file) | named(file) for file in own))


def compiled() -> list[Implementation]:
    """Implementations with programs in CUDA C++."""
    backend = discover_backends()["cuda_sm90"]
    backend.load()
    return [i for i in backend.implementations if any(f.suffix == ".cu" for f in source_files(i))]


def test_sources_name_every_file_that_a_kernel_is_made_of() -> None:
    implementations = compiled()
    assert {file.name for i in implementations for file in source_files(i)} >= {
        file.name for file in (source_files(implementations[0])[0].parent / "cuda").iterdir()
    }
    for implementation in implementations:
        known = {file.name for file in source_files(implementation)}
        name = implementation.name.removeprefix("cuda_sm90.")
        missing = needed(implementation) - known - PLUMBING - UNUSED.get(name, set())
        assert not missing, f"{implementation.name}: its sources lack {sorted(missing)}"
