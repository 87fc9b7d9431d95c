"""Which kernels a compiled file holds: bisheng leaves a section named after each.

A kernel for both core kinds leaves two, one per kind; AscendCL wants the name that they share.

Source: the section prefix is that of the public asc-devkit and runtime sources of CANN 9.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

from deepinfer.ops.errors import DeviceError

_PREFIX: Final = ".ascend.meta."
_CORE_SUFFIXES: Final = ("_mix_aic", "_mix_aiv")
_HEADER: Final = struct.Struct("<16s2HIQQQI6H")
_SECTION: Final = struct.Struct("<2I4Q2I2Q")


def kernel_names(file: Path) -> tuple[str, ...]:
    """Names of the kernels in a device binary, each once, in the file's order.

    Raises:
        DeviceError: it is not a whole ELF file of 64 bits, or names no kernel.
    """
    try:
        sections = _section_names(file.read_bytes())
    except (struct.error, IndexError, ValueError) as error:
        raise DeviceError(f"{file} is not a whole ELF file: {error}") from error
    names = []
    for section in sections:
        if section.startswith(_PREFIX):
            name = section.removeprefix(_PREFIX)
            for suffix in _CORE_SUFFIXES:
                name = name.removesuffix(suffix)
            names.append(name)
    if not names:
        raise DeviceError(f"{file} names no kernel: it has no section {_PREFIX}*; was it compiled with --npu-arch?")
    return tuple(dict.fromkeys(names))


def _section_names(content: bytes) -> list[str]:
    ident, _, _, _, _, _, start, _, _, _, _, size, count, strings = _HEADER.unpack_from(content)
    if ident[:6] != b"\x7fELF\x02\x01":
        raise ValueError("it does not begin like one of 64 bits, little endian")
    if count and size != _SECTION.size:
        raise ValueError(f"its section headers have {size} bytes, not {_SECTION.size}")
    headers = [_SECTION.unpack_from(content, start + place * size) for place in range(count)]
    if not headers:
        return []
    table, length = headers[strings][4], headers[strings][5]
    if table + length > len(content):
        raise ValueError("its table of names is cut off")
    names = content[table : table + length]
    return [names[header[0] : names.index(b"\0", header[0])].decode(errors="replace") for header in headers]
