"""Declaring, compiling and launching kernels: what is checked before one runs, and what a recorder sees."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950 import twin_build
from deepinfer.backends.ascend950.emulation import emulate
from deepinfer.backends.ascend950.launch import Program, TwinFault, recording
from deepinfer.ops.errors import BackendUnavailableError, DeviceError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

TEXT = """
#include "rows.h"
extern "C" __global__ __vector__ void shift(__gm__ float* x, __gm__ float* y, int64_t n, float by) {
  asc_init();
  for (int64_t i = asc_get_block_idx(); i < n; i += asc_get_block_num()) y[i] = (x == nullptr ? 0.0f : x[i]) + by;
}
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setenv("DEEPINFER_TWIN", "checked")
    path = tmp_path / "shift.asc"
    path.write_text(TEXT)
    return Program(path)


def test_arguments_arrive_and_absent_tensors_are_null(program: Program) -> None:
    shift = program.kernel("shift", "x, y!, n: i64, by: f32")
    x, y = torch.arange(9.0), torch.zeros(9)
    shift(4, x, y, 9, 0.5)
    assert torch.equal(y, x + 0.5)
    shift(2, None, y, 9, -1.0)
    assert torch.equal(y, torch.full((9,), -1.0))
    shift(0, x, y, 9, 7.0)
    assert torch.equal(y, torch.full((9,), -1.0))
    with pytest.raises(TypeError, match="shift takes 4 arguments, got 3"):
        shift(1, x, y, 9)


def test_tensors_of_host_and_device_together_are_refused(program: Program) -> None:
    shift = program.kernel("shift", "x, y!, n: i64, by: f32")
    for x, y in (("cpu", "meta"), ("meta", "cpu")):
        with pytest.raises(DeviceError, match="shift: its tensors are on cpu, meta, not on one device"):
            shift(1, torch.zeros(3, device=x), torch.zeros(3, device=y), 3, 0.0)


def test_regions_are_what_tensors_span(program: Program) -> None:
    shift = program.kernel("shift", "x, y!, n: i64, by: f32")
    memory = torch.zeros(4, 8)
    column = memory[:, 2]  # 25 elements from its first to its last
    shift(1, torch.ones(25), column, 25, 1.0)
    assert torch.equal(memory.flatten()[2:27], torch.full((25,), 2.0))
    with pytest.raises(TwinFault, match="past the end of 'y'") as caught:
        shift(1, torch.ones(26), column, 26, 1.0)
    assert caught.value.kind == "bounds"
    assert caught.value.address == column.data_ptr() + 100
    empty = torch.zeros(0)
    with pytest.raises(TwinFault, match="dereferences"):  # an empty tensor has no memory at all
        shift(1, torch.ones(1), empty, 1, 1.0)


def test_a_signature_that_differs_is_refused(program: Program) -> None:
    shift = program.kernel("shift", "x, y!, n: i32, by: f32")
    with pytest.raises(DeviceError, match="declared with parameters 'ppif' and its text has 'pplf'"):
        shift(1, torch.zeros(1), torch.zeros(1), 1, 0.0)


def test_text_that_does_not_compile_says_why(tmp_path: Path) -> None:
    path = tmp_path / "wrong.asc"
    path.write_text(TEXT.replace("asc_get_block_num()", "asc_get_number_of_blocks()"))
    wrong = Program(path).kernel("shift", "x, y!, n: i64, by: f32")
    with pytest.raises(DeviceError, match=r"wrong\.asc does not compile for the twin:[^$]*asc_get_number_of_blocks"):
        wrong(1, torch.zeros(1), torch.zeros(1), 1, 0.0)


def test_a_recorder_sees_launches_with_or_without_running_them(program: Program) -> None:
    shift = program.kernel("shift", "x, y!, n: i64, by: f32")
    x, y = torch.ones(5), torch.zeros(5)
    with recording() as planned:
        shift(3, x, y, 5, 1.0)
    assert [(launch.kernel, launch.blocks, launch.measured) for launch in planned] == [(shift, 3, None)]
    assert torch.equal(y, torch.zeros(5))
    with recording(run=True) as made:
        shift(3, x, y, 5, 1.0)
    assert torch.equal(y, x + 1)
    assert made[0].measured is not None
    assert made[0].measured.highest["UB"] == 0


def test_measured_bytes_are_those_that_pipes_move() -> None:
    from deepinfer.backends.ascend950.norm import rms_norm

    x = torch.randn(3, 100)
    with recording(run=True) as made:
        rms_norm(x, None, 1e-6)
    (launch,) = made
    assert launch.blocks == 3
    assert launch.measured is not None
    assert launch.measured.bytes["MTE2"] == launch.measured.bytes["MTE3"] == x.numel() * 4
    assert launch.measured.instructions["MTE2"] == 3
    assert 0 < launch.measured.highest["UB"] <= 248 * 1024


def test_threads_of_the_host_take_turns(program: Program) -> None:
    shift = program.kernel("shift", "x, y!, n: i64, by: f32")
    x = torch.arange(3000.0)
    results = [torch.zeros(3000) for _ in range(8)]

    def work(number: int) -> None:
        for _ in range(5):
            shift(4, x, results[number], 3000, float(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for number, result in enumerate(results):
        assert torch.equal(result, x + number)


def test_libraries_are_kept_by_content(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    shift = program.kernel("shift", "x, y!, n: i64, by: f32")
    shift(1, torch.zeros(1), torch.zeros(1), 1, 0.0)
    kept = list((tmp_path / "cache" / "twin").iterdir())
    assert [path.suffix for path in kept] == [".so"]
    twice = Program(program.path).kernel("shift", "x, y!, n: i64, by: f32")
    twice(1, torch.zeros(1), torch.zeros(1), 1, 0.0)
    assert list((tmp_path / "cache" / "twin").iterdir()) == kept


def test_modes_and_compilers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN", "quick")
    with pytest.raises(ValueError, match="'checked' or 'fast'"):
        twin_build.mode()
    with pytest.raises(BackendUnavailableError, match="DEEPINFER_TWIN='quick'"):
        emulate()
    monkeypatch.setenv("DEEPINFER_TWIN", "")
    assert twin_build.mode() == "checked"
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(BackendUnavailableError, match="'no-such-compiler' is not there"):
        emulate()
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(DeviceError, match="CXX='g\\+\\+ \"' is no command line"):
        emulate()
    monkeypatch.setenv("CXX", "")
    assert twin_build.missing_compiler() is None


def test_a_compiler_that_does_not_work_is_named_before_any_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, text = tmp_path / "cc", tmp_path / "text"
    script.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    text.write_text("no program")
    for path in (script, text):
        path.chmod(0o755)
    for named, said in (
        ("false", "false ends with status 1"),
        ("true", "true ends without a result"),
        (str(script), "ends with status 3 where a line of C\\+\\+20 is compiled; CXX names another compiler\nno room"),
        (str(text), "does not run"),
        ("g++ -std=c++20 -Dprobe=", "ends with status"),
    ):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(BackendUnavailableError, match=said):
            emulate()


def test_orders_of_blocks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, backwards in (("", False), ("forwards", False), ("backwards", True)):
        monkeypatch.setenv("DEEPINFER_TWIN_ORDER", named)
        assert twin_build.runs_backwards() is backwards
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", "random")
    with pytest.raises(BackendUnavailableError, match="DEEPINFER_TWIN_ORDER='random': 'forwards' or 'backwards'"):
        emulate()


def test_a_place_for_libraries_is_asked_for_before_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="name a folder by DEEPINFER_CACHE_DIR"):
        emulate()


def test_the_model_of_the_machine_compiles_without_warnings() -> None:
    text = '#include "c_api/asc_simd.h"\n#include "simt_api/asc_simt.h"\n#include "launch.h"\n'
    warnings = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")
    command = ("g++", "-std=c++20", *warnings, "-fsyntax-only", f"-I{twin_build.INCLUDE}", "-x", "c++", "-")
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
