"""Making the pinned Ascend C text from TileLang definitions.

    python -m deepinfer.backends.ascend950.tiles.lower            # families whose definitions changed
    python -m deepinfer.backends.ascend950.tiles.lower --all      # every family
    python -m deepinfer.backends.ascend950.tiles.lower rope codes

A family is a module of this folder and a file of `kernels/generated`. The file begins with the TileLang release, a hash
of the definitions, and a line per kernel: its entry, its parameters in the order of the text, with "!" behind those
that it writes. Lowering is deterministic, so the text can be compared; it needs neither CANN nor a device. What the
text keeps of TileLang's own is its names for instructions, which `tile_names.h` defines. Vector functions are called by
way of `asc_vf_call`, as the C API documents it, where TileLang calls them like any function.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from deepinfer.backends.ascend950 import twin_build

TILES: Final = Path(__file__).parent
TEXTS: Final = twin_build.KERNELS / "generated"
RELEASE: Final = "0.1.15"
"""The TileLang release whose text is pinned."""

FAMILIES: Final = ("lists", "moves", "shaping", "rope", "streams", "sinkhorn", "codes", "swiglu", "merge")

_OPTIONS: Final = {"tl.disable_safe_memory_legalize": True}  # extents are checked where a kernel is launched
_ENTRY: Final = re.compile(r'^extern "C" __global__ \w+(?:\([^)]*\))? void (\w+)\((.*)\) \{$', re.MULTILINE)
_PARAMETER: Final = re.compile(r"(?P<type>.+?)(?P<pointer>\*?) (?P<name>\w+)$")
_KINDS: Final = {"int32_t": "i32", "int64_t": "i64", "float": "f32"}


def definition_hash(family: str) -> str:
    """Hash of the release and of every file that a family's definitions are made of."""
    digest = hashlib.sha256(RELEASE.encode())
    for name in ("common", *_imports(family), family):
        digest.update((TILES / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def pinned_hash(family: str) -> str | None:
    """The hash that the pinned text of a family was made with; None where there is no text."""
    file = TEXTS / f"{family}.asc"
    if not file.exists():
        return None
    found = re.search(r"^// definitions (\w+)$", file.read_text(), re.MULTILINE)
    return found[1] if found else None


def lower_family(family: str) -> str:
    """The text of a family.

    Raises:
        RuntimeError: another TileLang than `RELEASE` is installed, or none.
    """
    module = _definitions(family)
    bodies = [_lower(definition) for definition in module.KERNELS]
    entries = [line for body in bodies for line in _entries(body)]
    head = [
        f"// Made by `python -m deepinfer.backends.ascend950.tiles.lower {family}`; do not edit.",
        f"// TileLang {RELEASE}",
        f"// definitions {definition_hash(family)}",
        *(f"// kernel {entry}" for entry in entries),
        '#include "tile_names.h"',
    ]
    return "\n".join(head) + "\n\n" + "\n\n".join(bodies) + "\n"


def lower_kernel(family: str, name: str) -> str:
    """The text of one kernel of a family, without the head of the file."""
    for definition in _definitions(family).KERNELS:
        if _name(definition) == name:
            return _lower(definition)
    raise KeyError(f"no kernel {name!r} in tiles/{family}.py")


def pinned_kernels(family: str) -> dict[str, str]:
    """Pinned text of each kernel of a family, with its vector functions, by the name of its definition."""
    kernels: dict[str, str] = {}
    name, lines = "", list[str]()
    body = (TEXTS / f"{family}.asc").read_text().split('#include "tile_names.h"\n', 1)[1]
    for line in body.splitlines():
        lines.append(line)
        entry = _ENTRY.match(line)
        name = entry[1].removesuffix("_kernel") if entry else name
        if name and line == "}":
            kernels[name] = "\n".join(lines).strip()
            name, lines = "", []
    return kernels


def _definitions(family: str) -> ModuleType:
    try:
        found = importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != RELEASE:
        raise RuntimeError(f"pinned text is made with tilelang {RELEASE}; installed is {found}")
    return importlib.import_module(f"deepinfer.backends.ascend950.tiles.{family}")


def _imports(family: str) -> list[str]:
    """Other families whose functions a family's definitions use."""
    text = (TILES / f"{family}.py").read_text()
    found = re.findall(r"^from deepinfer\.backends\.ascend950\.tiles\.(\w+) import", text, re.MULTILINE)
    return sorted(set(found) - {"common"})


def _name(definition: Any) -> str:
    return str(definition.attrs["global_symbol"])


def _lower(definition: Any) -> str:
    import tilelang
    from tilelang.ascend.target import _make_ascend_target

    target = _make_ascend_target()
    with tilelang.tvm.transform.PassContext(opt_level=3, config=_OPTIONS), target:
        text = tilelang.lower(definition, target=target, enable_device_compile=False).kernel_source
    text = re.sub(r"^( *)(\w+_simd_vf_\d+)\((.*)\);$", r"\1asc_vf_call<\2>(\3);", text, flags=re.MULTILINE)
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#include")]
    return "\n".join(lines).strip()


def _entries(text: str) -> Iterable[str]:
    for found in _ENTRY.finditer(text):
        words = []
        for parameter in found[2].split(", "):
            parts = _PARAMETER.match(parameter)
            if parts is None:
                raise RuntimeError(f"cannot read parameter {parameter!r} of {found[1]}")
            name = parts["name"]
            if parts["pointer"]:
                words.append(f"{name}!" if _is_written(text, name) else name)
            else:
                words.append(f"{name}: {_KINDS[parts['type']]}")
        yield f"{found[1].removesuffix('_kernel')}: {', '.join(words)}"


def _is_written(text: str, name: str) -> bool:
    stored = re.search(rf"^\s*{name}\[.*\] = ", text, re.MULTILINE)
    copied = re.search(rf"asc_copy_ub2gm_align\(\(__gm__ uint8_t\*\)\(\(&\({name}\[", text)
    return bool(stored or copied)


def main(arguments: list[str] | None = None) -> int:
    """Write the text of families."""
    parser = argparse.ArgumentParser(prog="lower", description="Make the pinned Ascend C text of TileLang kernels.")
    parser.add_argument("family", nargs="*", choices=[*FAMILIES, []], help="default: those whose definitions changed")
    parser.add_argument("--all", action="store_true", help="every family")
    chosen = parser.parse_args(arguments)
    changed = [family for family in FAMILIES if pinned_hash(family) != definition_hash(family)]
    for family in FAMILIES if chosen.all else chosen.family or changed:
        start = time.perf_counter()
        (TEXTS / f"{family}.asc").write_text(lower_family(family))
        sys.stdout.write(f"{family}: {time.perf_counter() - start:.1f} s\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
