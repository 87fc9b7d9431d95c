"""The ctypes declarations against the C headers of torch_npu: a wrong type, place or number does not compile."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from deepinfer.backends.ascend950.host import prototypes
from deepinfer.backends.ascend950.host.prototypes import CONSTANTS, ENUMS, HANDLES, PROTOTYPES, SCALARS, STRUCTURES


def _program() -> str:
    """C++ that compiles only if the table and the headers say the same."""
    lines = ["#include <cstddef>", "#include <type_traits>", '#include "acl/acl.h"']
    for name, (result, *arguments) in PROTOTYPES.items():
        lines.append(f"{result} (*check_{name})({', '.join(arguments)}) = &{name};")
    sizes = {name: ctypes.sizeof(kind) for name, kind in (STRUCTURES | SCALARS).items()}
    sizes |= dict.fromkeys(ENUMS, ctypes.sizeof(ctypes.c_int)) | dict.fromkeys(HANDLES, ctypes.sizeof(ctypes.c_void_p))
    for name, size in sizes.items():
        lines.append(f'static_assert(sizeof({name}) == {size}, "size of {name}");')
    lines += [f'static_assert(std::is_enum_v<{name}>, "{name}");' for name in ENUMS]
    lines += [f'static_assert(std::is_same_v<{name}, void*>, "{name}");' for name in HANDLES]
    for name, kind in STRUCTURES.items():
        for field, _ in kind._fields_:
            lines.append(
                f'static_assert(offsetof({name}, {field}) == {getattr(kind, field).offset}, "{name}.{field}");'
            )
            lines.append(f'static_assert(sizeof({name}::{field}) == {getattr(kind, field).size}, "{name}.{field}");')
    lines += [f'static_assert((long long){name} == {value}, "{name}");' for name, value in CONSTANTS.items()]
    return "\n".join(lines) + "\n"


def _compile(wheel: Path, tmp_path: Path, program: str) -> str:
    """What the compiler complains of."""
    source = tmp_path / "check.cpp"
    source.write_text(program)
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", str(wheel / "include"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == ("error:" not in done.stderr), done.stderr
    return done.stderr if done.returncode else ""


def test_the_table_says_what_the_headers_say(npu_wheel: Path, tmp_path: Path) -> None:
    assert not _compile(npu_wheel, tmp_path, _program())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("void*, size_t, const void*, size_t, aclrtMemcpyKind", "check_aclrtMemcpyAsync"),
        ("offsetof(aclrtLaunchKernelCfg, numAttrs) == 8", "aclrtLaunchKernelCfg.numAttrs"),
        ("ACL_RT_LAUNCH_KERNEL_ATTR_TIMEOUT == 7", "ACL_RT_LAUNCH_KERNEL_ATTR_TIMEOUT"),
        ("sizeof(aclrtMemAttr) == 4", "size of aclrtMemAttr"),
    ],
)
def test_a_wrong_declaration_is_found(npu_wheel: Path, tmp_path: Path, change: str, complaint: str) -> None:
    wrong = {"void*, size_t": "void*, uint32_t", "== 8": "== 4", "== 7": "== 8", "== 4": "== 8"}
    before, after = next((old, new) for old, new in wrong.items() if old in change)
    program = _program()
    assert change in program
    errors = _compile(npu_wheel, tmp_path, program.replace(change, change.replace(before, after, 1)))
    assert complaint.split(".")[0] in errors


def test_every_name_of_the_table_has_a_ctypes_type() -> None:
    for name, types in PROTOTYPES.items():
        for kind in types:
            assert prototypes.ctype(kind) is not None, name
    with pytest.raises(KeyError):
        prototypes.ctype("aclTensor")
