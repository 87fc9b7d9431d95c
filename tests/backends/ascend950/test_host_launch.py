"""Launching through the driver: how arguments lie in memory, launch attributes, loading, refusals."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950.host.launcher import launch, pack
from deepinfer.backends.ascend950.launch import Program
from deepinfer.ops.errors import DeviceError, LaunchError

TEXT = """
extern "C" __global__ __vector__ void scale(__gm__ float* x, int32_t n, float by) {}
extern "C" __global__ __mix__(1, 2) void attend(__gm__ float* x) {}
"""


@pytest.fixture
def source(tmp_path: Path, fake_cann: Path) -> Path:
    file = tmp_path / "family.asc"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize(
    ("values", "form", "length"),
    [
        ([ctypes.c_void_p(0x1122334455667788)], "<Q", 8),
        ([ctypes.c_int32(-1)], "<i4x", 8),
        ([ctypes.c_int32(-1), ctypes.c_float(1.5)], "<if", 8),
        ([ctypes.c_int32(5), ctypes.c_int64(-7)], "<i4xq", 16),
        ([ctypes.c_float(2.0), ctypes.c_void_p(None), ctypes.c_int32(3)], "<f4xQi4x", 24),
        ([], "<", 0),
    ],
)
def test_arguments_are_aligned_and_padded_as_the_kernel_reads_them(values: list, form: str, length: int) -> None:
    packed = pack(values)
    assert len(packed) == length
    assert list(struct.unpack(form, packed)) == [value.value or 0 for value in values]


def test_a_launch_runs_on_the_current_stream_with_its_arguments(runtime, launcher, fake_acl, source: Path) -> None:
    seen: list[tuple[str, int, tuple]] = []
    fake_acl.on_kernel(lambda name, blocks, packed: seen.append((name, blocks, struct.unpack("<Qif", packed))))
    x = runtime.zeros((4,), torch.float32)
    arguments = [ctypes.c_void_p(x.data_ptr()), ctypes.c_int32(4), ctypes.c_float(0.5)]
    other = runtime.stream()
    with runtime.use_stream(other):
        launcher.launch(source, "scale", 3, arguments)
    arguments[1].value = 99  # the launch has its own copy
    runtime.current_stream().synchronize()
    assert not seen
    other.synchronize()
    assert seen == [("scale", 3, (x.data_ptr(), 4, 0.5))]


def test_a_file_is_compiled_and_loaded_once(runtime, launcher, fake_acl, source: Path) -> None:
    fake_acl.log()
    for _ in range(2):
        launcher.launch(source, "scale", 1, [ctypes.c_void_p(0), ctypes.c_int32(0), ctypes.c_float(0)])
        launcher.launch(source, "attend", 1, [ctypes.c_void_p(0)])
    log = fake_acl.log()
    assert log.count("aclrtBinaryLoadFromFile") == 1
    assert [line for line in log if "GetFunction" in line] == [
        "aclrtBinaryGetFunction scale",
        "aclrtBinaryGetFunction attend",
    ]
    assert sum("LaunchKernel" in line for line in log) == 4


def test_attributes_are_passed_when_a_kernel_asks_for_them(runtime, launcher, fake_acl, source: Path) -> None:
    launcher.load(source)
    runtime.current_stream()
    fake_acl.log()
    launcher.launch(source, "attend", 32, [ctypes.c_void_p(0)], all_at_once=True, dynamic_ub_bytes=4096)
    launcher.launch(source, "attend", 2, [ctypes.c_void_p(0)])
    assert fake_acl.log() == [
        "aclrtLaunchKernelWithHostArgs attend blocks=32 bytes=8 seconds=120 schedule=1 ub=4096",
        "aclrtLaunchKernelWithHostArgs attend blocks=2 bytes=8 seconds=120",
    ]


def test_a_captured_launch_runs_with_every_replay(runtime, launcher, fake_acl, source: Path) -> None:
    seen: list[str] = []
    fake_acl.on_kernel(lambda name, blocks, packed: seen.append(name))
    replay = runtime.capture(lambda: launcher.launch(source, "attend", 1, [ctypes.c_void_p(0)]))
    runtime.synchronize()
    assert not seen
    replay()
    replay()
    runtime.synchronize()
    assert seen == ["attend", "attend"]


def test_a_refused_launch_is_an_error_of_that_launch(runtime, launcher, fake_acl, source: Path) -> None:
    fake_acl.fail_next("aclrtLaunchKernelWithHostArgs", 107003)
    with pytest.raises(LaunchError, match="attend on 8 blocks: aclrtLaunchKernelWithHostArgs failed with 107003"):
        launcher.launch(source, "attend", 8, [ctypes.c_void_p(0)])
    launcher.launch(source, "attend", 8, [ctypes.c_void_p(0)])


def test_a_kernel_that_the_file_does_not_have_is_named_with_those_it_has(launcher, source: Path) -> None:
    with pytest.raises(DeviceError, match=r"family\.asc has no kernel 'absent'; it has scale, attend"):
        launcher.launch(source, "absent", 1, [])


def test_tensors_of_two_devices_are_refused() -> None:
    kernel = Program(Path("family.asc")).kernel("both", "x, y!")
    with pytest.raises(DeviceError, match="both: its tensors are on cpu, meta, not on one device"):
        launch(kernel, 1, [torch.zeros(1), torch.zeros(1, device="meta")])


def test_a_binary_that_does_not_load_is_named(runtime, launcher, fake_acl, source: Path) -> None:
    fake_acl.fail_next("aclrtBinaryLoadFromFile", 107000)
    with pytest.raises(DeviceError, match=r"family\.asc: aclrtBinaryLoadFromFile failed with 107000: injected"):
        launcher.load(source)
