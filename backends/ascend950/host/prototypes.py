"""The part of AscendCL that this backend calls, as C declares it: functions, structures and numbers.

One table has two readers. `acl.py` turns it into ctypes declarations; a test turns it into C++ and compiles that
against the headers of the torch_npu wheel, so an argument of the wrong type, a field at the wrong place or a wrong
number does not compile. Nothing here is loaded or called.

Source: acl_rt.h and acl_base_rt.h as shipped in the torch_npu wheel, folder include/acl.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

SCALARS: Final[dict[str, type[Any]]] = {
    "aclError": ctypes.c_int,
    "char": ctypes.c_char,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "uint32_t": ctypes.c_uint32,
}
ENUMS: Final = (
    "aclmdlRICaptureMode",
    "aclmdlRICaptureStatus",
    "aclrtEventRecordedStatus",
    "aclrtLaunchKernelAttrId",
    "aclrtMemAttr",
    "aclrtMemMallocPolicy",
    "aclrtMemcpyKind",
)
"""Plain C enumerations: 32 bits, which the test checks."""
HANDLES: Final = ("aclmdlRI", "aclrtBinHandle", "aclrtContext", "aclrtEvent", "aclrtFuncHandle", "aclrtStream")
"""Opaque pointers."""


class LaunchAttrValue(ctypes.Union):
    """`aclrtLaunchKernelAttrValue`: what a launch attribute is set to."""

    _fields_ = (
        ("schemMode", ctypes.c_uint8),
        ("dynUBufSize", ctypes.c_uint32),
        ("timeout", ctypes.c_uint16),
        ("rsv", ctypes.c_uint32 * 4),
    )


class LaunchAttr(ctypes.Structure):
    """`aclrtLaunchKernelAttr`: one launch attribute."""

    _fields_ = (("id", ctypes.c_int), ("value", LaunchAttrValue))


class LaunchConfig(ctypes.Structure):
    """`aclrtLaunchKernelCfg`: the attributes of a launch."""

    _fields_ = (("attrs", ctypes.POINTER(LaunchAttr)), ("numAttrs", ctypes.c_size_t))


class PlaceHolder(ctypes.Structure):
    """`aclrtPlaceHolderInfo`: an argument that the driver fills in; none of our kernels has one."""

    _fields_ = (("addrOffset", ctypes.c_uint32), ("dataOffset", ctypes.c_uint32))


class BinaryOption(ctypes.Structure):
    """`aclrtBinaryLoadOption`: how a binary is loaded; we pass none."""

    _fields_ = (("type", ctypes.c_int), ("value", ctypes.c_uint32 * 4))


class BinaryOptions(ctypes.Structure):
    """`aclrtBinaryLoadOptions`: a list of them."""

    _fields_ = (("options", ctypes.POINTER(BinaryOption)), ("numOpt", ctypes.c_size_t))


STRUCTURES: Final[dict[str, type[ctypes.Structure | ctypes.Union]]] = {
    "aclrtLaunchKernelAttrValue": LaunchAttrValue,
    "aclrtLaunchKernelAttr": LaunchAttr,
    "aclrtLaunchKernelCfg": LaunchConfig,
    "aclrtPlaceHolderInfo": PlaceHolder,
    "aclrtBinaryLoadOption": BinaryOption,
    "aclrtBinaryLoadOptions": BinaryOptions,
}

CONSTANTS: Final[dict[str, int]] = {
    "ACL_SUCCESS": 0,
    "ACL_ERROR_REPEAT_INITIALIZE": 100002,
    "ACL_ERROR_BAD_ALLOC": 200000,
    "ACL_ERROR_RT_MEMORY_ALLOCATION": 207001,
    "ACL_EVENT_SYNC": 1,
    "ACL_EVENT_CAPTURE_STREAM_PROGRESS": 2,
    "ACL_EVENT_TIME_LINE": 8,
    "ACL_EVENT_RECORDED_STATUS_COMPLETE": 1,
    "ACL_HBM_MEM": 1,
    "ACL_MEMCPY_HOST_TO_DEVICE": 1,
    "ACL_MEMCPY_DEVICE_TO_HOST": 2,
    "ACL_MEMCPY_DEVICE_TO_DEVICE": 3,
    "ACL_MEM_MALLOC_HUGE_FIRST": 0,
    "ACL_MODEL_RI_CAPTURE_MODE_RELAXED": 2,
    "ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE": 1,
    "ACL_RT_LAUNCH_KERNEL_ATTR_SCHEM_MODE": 1,
    "ACL_RT_LAUNCH_KERNEL_ATTR_DYN_UBUF_SIZE": 2,
    "ACL_RT_LAUNCH_KERNEL_ATTR_TIMEOUT": 7,
}

PROTOTYPES: Final[dict[str, tuple[str, ...]]] = {
    # name: what it returns, then what it takes
    "aclInit": ("aclError", "const char*"),
    "aclGetRecentErrMsg": ("const char*",),
    "aclrtGetSocName": ("const char*",),
    "aclrtSetDevice": ("aclError", "int32_t"),
    "aclrtGetDevice": ("aclError", "int32_t*"),
    "aclrtGetDeviceCount": ("aclError", "uint32_t*"),
    "aclrtGetCurrentContext": ("aclError", "aclrtContext*"),
    "aclrtSetCurrentContext": ("aclError", "aclrtContext"),
    "aclrtSynchronizeDevice": ("aclError",),
    "aclrtGetMemInfo": ("aclError", "aclrtMemAttr", "size_t*", "size_t*"),
    "aclrtMalloc": ("aclError", "void**", "size_t", "aclrtMemMallocPolicy"),
    "aclrtFree": ("aclError", "void*"),
    "aclrtMallocHost": ("aclError", "void**", "size_t"),
    "aclrtFreeHost": ("aclError", "void*"),
    "aclrtMemcpyAsync": ("aclError", "void*", "size_t", "const void*", "size_t", "aclrtMemcpyKind", "aclrtStream"),
    "aclrtMemsetAsync": ("aclError", "void*", "size_t", "int32_t", "size_t", "aclrtStream"),
    "aclrtCreateStream": ("aclError", "aclrtStream*"),
    "aclrtDestroyStream": ("aclError", "aclrtStream"),
    "aclrtSynchronizeStream": ("aclError", "aclrtStream"),
    "aclrtStreamWaitEvent": ("aclError", "aclrtStream", "aclrtEvent"),
    "aclrtCreateEventExWithFlag": ("aclError", "aclrtEvent*", "uint32_t"),
    "aclrtDestroyEvent": ("aclError", "aclrtEvent"),
    "aclrtRecordEvent": ("aclError", "aclrtEvent", "aclrtStream"),
    "aclrtQueryEventStatus": ("aclError", "aclrtEvent", "aclrtEventRecordedStatus*"),
    "aclrtSynchronizeEvent": ("aclError", "aclrtEvent"),
    "aclrtEventElapsedTime": ("aclError", "float*", "aclrtEvent", "aclrtEvent"),
    "aclrtBinaryLoadFromFile": ("aclError", "const char*", "aclrtBinaryLoadOptions*", "aclrtBinHandle*"),
    "aclrtBinaryUnLoad": ("aclError", "aclrtBinHandle"),
    "aclrtBinaryGetFunction": ("aclError", "const aclrtBinHandle", "const char*", "aclrtFuncHandle*"),
    "aclrtLaunchKernelWithHostArgs": (
        "aclError",
        "aclrtFuncHandle",
        "uint32_t",
        "aclrtStream",
        "aclrtLaunchKernelCfg*",
        "void*",
        "size_t",
        "aclrtPlaceHolderInfo*",
        "size_t",
    ),
    "aclmdlRICaptureBegin": ("aclError", "aclrtStream", "aclmdlRICaptureMode"),
    "aclmdlRICaptureGetInfo": ("aclError", "aclrtStream", "aclmdlRICaptureStatus*", "aclmdlRI*"),
    "aclmdlRICaptureEnd": ("aclError", "aclrtStream", "aclmdlRI*"),
    "aclmdlRIExecuteAsync": ("aclError", "aclmdlRI", "aclrtStream"),
    "aclmdlRIDestroy": ("aclError", "aclmdlRI"),
}


def ctype(name: str) -> Any:
    """The ctypes type of a C type of this table.

    Raises:
        KeyError: the table does not know it.
    """
    name = name.removeprefix("const ").strip()
    if name == "char*":
        return ctypes.c_char_p
    if name == "void*" or name in HANDLES:
        return ctypes.c_void_p
    if name.endswith("*"):
        return ctypes.POINTER(ctype(name[:-1]))
    if name in ENUMS:
        return ctypes.c_int
    return STRUCTURES[name] if name in STRUCTURES else SCALARS[name]
