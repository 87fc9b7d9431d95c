"""Makes `import torch_npu` work where no CANN is installed, to look at its operators: no device, no values.

Every function that torch_npu's libraries want from CANN becomes one that returns an error, in one library which stands
under the names of all that are missing. Operators can then be called on meta tensors, and on the host where an
implementation is registered for it. A tensor on a device would end the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

_TORCH = Path(torch.__file__).parent / "lib"
_DATA = ("_ZTV", "_ZTI", "_ZTS")
"""Mangled names of tables of classes and types."""


def build(package: Path, folder: Path) -> dict[str, str]:
    """Make the stub library; gives the environment for a process that imports torch_npu.

    Args:
        package: the unpacked `torch_npu`.
        folder: where the library goes.
    """
    own = [file for file in package.rglob("*.so*") if not file.is_symlink()]
    shipped = [*own, *_TORCH.glob("*.so*")]
    needed = set().union(*(_needed(file) for file in own)) - {file.name for file in shipped}
    system = [path for name in needed if (path := _in_system(name)) is not None]
    there = set().union(*(_symbols(file, "--defined-only") for file in (*shipped, *system)))
    wanted = set().union(*(_symbols(file, "--undefined-only") for file in own))
    missing = sorted(name for name in wanted - there if not name.startswith(("Py", "_Py")))
    source = folder / "stub.c"
    source.write_text("\n".join(_stand_in(name) for name in missing) + "\n")
    library = folder / "libstub.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True, timeout=60)
    for name in needed - {path.name for path in system}:
        (folder / name).symlink_to(library)
    path = os.pathsep.join(map(str, (folder, package / "lib", _TORCH)))
    return {
        "LD_LIBRARY_PATH": path,
        "PYTHONPATH": str(package.parent),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def _stand_in(name: str) -> str:
    if name.startswith(_DATA):
        return f"char {name}[512];"
    return f"int {name}(void) {{ return 507000; }}"


def _symbols(file: Path, which: str) -> set[str]:
    done = subprocess.run(["nm", "-D", which, str(file)], capture_output=True, text=True, check=False, timeout=60)
    fields = (line.split() for line in done.stdout.splitlines())
    return {field[-1].split("@")[0] for field in fields if field and not (which == "--undefined-only" and "w" in field)}


def _needed(file: Path) -> set[str]:
    done = subprocess.run(["readelf", "-d", str(file)], capture_output=True, text=True, check=True, timeout=60)
    return {line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line}


def _in_system(name: str) -> Path | None:
    """Where the compiler's system has a library; None where it has not."""
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True, timeout=60)
    found = Path(done.stdout.strip())
    return found if found.is_absolute() else None


if __name__ == "__main__":
    json.dump(build(Path(sys.argv[1]), Path(sys.argv[2])), sys.stdout)
