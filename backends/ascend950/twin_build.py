"""Compiling kernel text for the twin: the same file that a device's compiler reads, with the machine's model in front.

A library is one `.asc` file with the kernels that Python declares of it. It is kept on disk under a hash of everything
that went in, so a changed header or another compiler makes a new one and nothing else does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deepinfer.ops.cache_dir import cache_dir
from deepinfer.ops.errors import DeviceError

ROOT: Final = Path(__file__).parent
INCLUDE: Final = ROOT / "twin"
KERNELS: Final = ROOT / "kernels"

_FLAGS: Final = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a contract counts roundings
    "-fno-strict-aliasing",  # registers are read as other types, as on the device
    "-fno-threadsafe-statics",  # one host thread runs a launch
    "-w",  # a device's compiler judges kernels; our own headers are compiled with warnings by a test
)
_CHECK_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "checked": (
        "-DTWIN_CHECKED=1",
        "-fsanitize=thread",  # calls of ours at loads and stores of kernels (twin/watch.h); no library is linked
        "--param=tsan-instrument-func-entry-exit=0",
        "-freorder-functions",  # functions of kernels into one section (twin/sections.ld)
        "-fno-reorder-blocks-and-partition",
    ),
    "fast": ("-DTWIN_CHECKED=0",),
}


def mode() -> str:
    """What the twin looks for: "checked", or "fast" for results only (`DEEPINFER_TWIN`).

    Raises:
        ValueError: another word.
    """
    named = os.environ.get("DEEPINFER_TWIN") or "checked"
    if named not in ("checked", "fast"):
        raise ValueError(f"DEEPINFER_TWIN={named!r}: 'checked' or 'fast'")
    return named


def runs_backwards() -> bool:
    """Whether the twin runs the last block first (`DEEPINFER_TWIN_ORDER`).

    Raises:
        ValueError: another word.
    """
    named = os.environ.get("DEEPINFER_TWIN_ORDER") or "forwards"
    if named not in ("forwards", "backwards"):
        raise ValueError(f"DEEPINFER_TWIN_ORDER={named!r}: 'forwards' or 'backwards'")
    return named == "backwards"


def missing_compiler() -> str | None:
    """Why nothing can be compiled here, which would be every kernel's fault otherwise; None where it can."""
    command = _compiler()
    if shutil.which(command[0]) is None:
        return f"the twin compiles kernels with a C++20 compiler, and {command[0]!r} is not there (CXX names another)"
    return _fault_of(command)


def cache_folder() -> Path:
    """Where libraries are kept: `DEEPINFER_CACHE_DIR`, else the user's cache folder."""
    return cache_dir() / "twin"


def made_cache_folder() -> Path:
    """`cache_folder`, made where it is not there.

    Raises:
        DeviceError: it cannot be made.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(
            f"no place for the kernels that are compiled for the twin: {error}; name a folder by DEEPINFER_CACHE_DIR"
        ) from error
    return folder


def library(source: Path, entries: Sequence[str], checks: str) -> ctypes.CDLL:
    """The compiled form of a kernel file, loaded; from the disk where it was made before.

    Args:
        source: an `.asc` file.
        entries: its kernels, declared `extern "C"`.
        checks: "checked" or "fast".

    Raises:
        DeviceError: it does not compile; the compiler's own words are in the message.
    """
    flags = (*_FLAGS, *_CHECK_FLAGS[checks])
    identity = (*_compiler(), _compiler_version(), *flags, _headers_hash(), *entries, source.read_text())
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    kept = cache_folder() / f"{source.stem}-{checks}-{key}.so"
    if not kept.exists():
        _compile(_text(source, entries), source, flags, kept)
    return ctypes.CDLL(str(kept))


def _text(source: Path, entries: Sequence[str]) -> str:
    lines = [f'#include "{source}"', '#include "launch.h"', *(f"TWIN_ENTRY({name})" for name in entries)]
    return "\n".join(lines) + "\n"


def _compile(text: str, source: Path, flags: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made_cache_folder()) as folder:
        unit, part, whole = (Path(folder) / name for name in ("unit.cpp", "unit.o", "unit.so"))
        unit.write_text(text)
        includes = (f"-I{INCLUDE}", f"-I{KERNELS}", f"-I{source.parent}")
        _run((*_compiler(), *flags, *includes, "-c", str(unit), "-o", str(part)), source)
        # linked without the sanitizer's flag, which would bring its own library
        _run((*_compiler(), "-shared", f"-Wl,-T,{INCLUDE / 'sections.ld'}", str(part), "-o", str(whole)), source)
        os.replace(whole, target)


def _run(command: Sequence[str], source: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = "\n".join(done.stderr.strip().splitlines()[:40])
        raise DeviceError(f"{source.name} does not compile for the twin:\n{words}")


@functools.cache
def _fault_of(command: tuple[str, ...]) -> str | None:
    """What a compiler that is there does wrong with a line of C++20; None where it does well."""
    with tempfile.TemporaryDirectory() as folder:
        unit, whole = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        unit.write_text('template <typename T> concept any = true;\nextern "C" any auto probe() { return 0; }\n')
        try:
            done = subprocess.run(
                (*command, *_FLAGS, "-shared", str(unit), "-o", str(whole)), capture_output=True, text=True, check=False
            )
        except OSError as error:
            return f"{shlex.join(command)} does not run: {error}; CXX names another compiler"
        if done.returncode == 0 and whole.exists():
            return None
        words = "".join(f"\n{line}" for line in done.stderr.strip().splitlines()[:8])
        how = f"with status {done.returncode}" if done.returncode else "without a result"
        return f"{shlex.join(command)} ends {how} where a line of C++20 is compiled; CXX names another compiler{words}"


def _compiler() -> tuple[str, ...]:
    named = os.environ.get("CXX", "")
    try:
        return tuple(shlex.split(named)) or ("g++",)
    except ValueError as error:
        raise DeviceError(f"CXX={named!r} is no command line: {error}") from error


@functools.cache
def _compiler_version() -> str:
    done = subprocess.run((*_compiler(), "--version"), capture_output=True, text=True, check=False)
    if done.returncode:
        command = shlex.join(_compiler())
        raise DeviceError(f"{command} --version ends with status {done.returncode}; CXX names another compiler")
    return done.stdout


@functools.cache
def _headers_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted((*INCLUDE.rglob("*.h"), *INCLUDE.rglob("*.ld"), *KERNELS.rglob("*.h"))):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
