"""Kernel text to a device binary: bisheng, then its linker; the result is kept on disk.

One command serves vector, cube and mixed kernels: `__vector__`, `__cube__` and `__mix__` in the text say which cores a
kernel runs on. A binary is kept under the hash of what the compiler read and was told, and of the compiler itself.

Source: options as TileLang 0.1.15 and DeepSeek's DeepJIT pass them to CANN 9; none was run here.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deepinfer.backends.ascend950.host.cann import cann_home, target_folder
from deepinfer.ops.cache_dir import cache_dir
from deepinfer.ops.errors import BackendUnavailableError, DeviceError

ARCHITECTURE: Final = "dav-3510"
KERNELS: Final = Path(__file__).parents[1] / "kernels"
OPTIONS: Final = (
    "-O2",
    "-std=c++20",
    f"--npu-arch={ARCHITECTURE}",
    "--cce-aicore-only",
    "-mllvm",
    "-enable-hiipu-vf-loop-unroll",
    "-mllvm",
    "-cce-aicore-dcpreload-args=false",  # preloaded arguments can be stale on this chip
    "-ffp-contract=off",  # contracts count roundings: a product and a sum are two, as in the twin
)
LINK_OPTIONS: Final = ("-m", "aicorelinux", "-Ttext", "0", "--no-mmap-output-file")
_COMPILE_SECONDS: Final = 600


def cache_folder() -> Path:
    """Where device binaries are kept: `DEEPINFER_CACHE_DIR`, else the user's cache folder."""
    return cache_dir() / "ascend950"


@dataclass(frozen=True)
class Toolchain:
    """The compiler of one CANN installation.

    Attributes:
        compiler: bisheng.
        linker: the ld.lld beside it; others do not know the device.
        includes: folders with the headers that kernels name.
        version: what bisheng says of itself; part of every binary's key.
    """

    compiler: Path
    linker: Path
    includes: tuple[Path, ...]
    version: str

    def compile_command(self, source: Path, output: Path) -> list[str]:
        """From kernel text to an object that can be linked."""
        include = [f"-I{folder}" for folder in (KERNELS, *self.includes)]
        return [str(self.compiler), *OPTIONS, *include, str(source), "-o", str(output)]

    def link_command(self, object_file: Path, output: Path) -> list[str]:
        """From that to what AscendCL loads."""
        return [str(self.linker), *LINK_OPTIONS, str(object_file), "-o", str(output)]

    def build(self, source: Path) -> Path:
        """The device binary of a kernel file, made now or kept from before.

        Args:
            source: an .asc file; headers it shares with others are those beside it and in the folder `kernels`.

        Raises:
            DeviceError: it does not compile or link; the command and the compiler's own words are in the message.
        """
        kept = cache_folder() / f"{source.stem}-{ARCHITECTURE}-{self._key(source)[:32]}.o"
        if kept.exists():
            return kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            object_file, binary = Path(folder) / "kernel.rel.o", Path(folder) / "kernel.o"
            _run(self.compile_command(source, object_file), f"{source.name} does not compile")
            _run(self.link_command(object_file, binary), f"{source.name} does not link")
            os.replace(binary, kept)  # whole, whoever builds the same at this moment
        return kept

    def _key(self, source: Path) -> str:
        digest = hashlib.sha256(f"{self.version}\0{OPTIONS}\0{LINK_OPTIONS}".encode())
        for file in (source, *sorted({*KERNELS.rglob("*.h"), *source.parent.glob("*.h")})):
            content = file.read_bytes()
            digest.update(f"\0{file.name}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()


def find_toolchain() -> Toolchain:
    """The compiler to use: of the CANN installation, else the one on the PATH.

    Raises:
        BackendUnavailableError: bisheng or its linker is not there.
    """
    home = cann_home()
    compiler = _tool(home, "bisheng")
    if compiler is None:
        place = f"in {home} or on the PATH" if home else "on the PATH, and ASCEND_HOME_PATH names no folder"
        raise BackendUnavailableError(
            f"bisheng is not {place}; install the CANN 9.2 toolkit and run its set_env.sh in this shell"
        )
    linker = compiler.with_name("ld.lld")
    if not linker.is_file():
        raise BackendUnavailableError(f"{linker} is missing beside bisheng; install the CANN toolkit again")
    includes: tuple[Path, ...] = ()
    if home is not None:
        target = target_folder(home)
        wanted = (target / "include", target / "asc/include", target / "asc/include/adv_api")
        includes = tuple(folder for folder in wanted if folder.is_dir())
    return Toolchain(compiler, linker, includes, _run([str(compiler), "--version"], f"{compiler} does not run"))


def _tool(home: Path | None, name: str) -> Path | None:
    if home is not None:
        for folder in ("bin", "compiler/ccec_compiler/bin", "tools/bisheng_compiler/bin"):
            if (home / folder / name).is_file():
                return home / folder / name
    found = shutil.which(name)
    return Path(found).resolve() if found else None


def _run(command: Sequence[str], complaint: str) -> str:
    """What a command printed.

    Raises:
        DeviceError: it failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{complaint}: {error}") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip()
        raise DeviceError(f"{complaint} (status {done.returncode}):\n{shlex.join(command)}\n{words}")
    return done.stdout
