"""`python -m deepinfer.backends.ascend950.host.build`: every kernel file through bisheng, with no device needed.

The first thing to run where CANN is installed: it says of each file which kernels came out of it, or what the compiler
said. Binaries stay in the cache, so later launches find them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deepinfer.backends.ascend950.host.elf import kernel_names
from deepinfer.backends.ascend950.host.jit import KERNELS, find_toolchain
from deepinfer.ops.errors import BackendUnavailableError, DeviceError


def build_all(sources: Sequence[Path]) -> int:
    """Compile kernel files one after another and print a line for each; gives how many did not compile.

    Raises:
        BackendUnavailableError: bisheng or its linker is not there.
    """
    toolchain = find_toolchain()
    print(toolchain.version.strip())
    failed = 0
    for source in sources:
        began = time.monotonic()
        try:
            names = kernel_names(toolchain.build(source))
        except DeviceError as error:
            failed += 1
            print(f"FAILED {source.name}: {error}")
        else:
            print(f"ok     {source.name} ({time.monotonic() - began:.1f} s): {', '.join(names)}")
    print(f"{len(sources) - failed} of {len(sources)} files compiled for the device")
    return failed


def main() -> int:
    """Compile all kernel files of the package; the exit status is 0 when all compile, 1 when not, 2 without bisheng."""
    try:
        return 1 if build_all(sorted(KERNELS.rglob("*.asc"))) else 0
    except BackendUnavailableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
