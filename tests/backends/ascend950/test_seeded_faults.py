"""Mistakes that the twin has to find, each in a kernel that is right without it, and by the right name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.backends.ascend950.launch import Program, TwinFault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

PROGRAM = Program(Path(__file__).with_name("seeded.asc"))
PIPELINE = PROGRAM.kernel("pipeline", "x, y!, rows: i64, width: i32, seed: i32")
NEIGHBOURS = PROGRAM.kernel("neighbours", "x, y!, width: i32, seed: i32")
THREADS = PROGRAM.kernel("threads", "x, y!, n: i32, seed: i32")
CORES = PROGRAM.kernel("cores", "x, y!, width: i32, seed: i32", core="mix")
MEETING = PROGRAM.kernel("meeting", "x, y!, z!, width: i32, seed: i32", together=True)
COUNTED = PROGRAM.kernel("counted", "y!, n: i32, seed: i32")
APART = Program(PROGRAM.path)
MEETING_APART = APART.kernel("meeting", "x, y!, z!, width: i32, seed: i32")

ROWS, WIDTH = 5, 100


def _pipeline(seed: int, blocks: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
    y = torch.zeros_like(x)
    PIPELINE(blocks, x, y, ROWS, WIDTH, seed)
    return x, y


def _caught(kind: str, words: str, call: Any, *args: Any) -> TwinFault:
    with pytest.raises(TwinFault) as caught:
        call(*args)
    assert caught.value.kind == kind, str(caught.value)
    assert words in str(caught.value)
    return caught.value


def test_right_kernels_pass() -> None:
    x, y = _pipeline(0)
    assert torch.equal(y, x + 1)
    rows, out = torch.randn(4, 40), torch.zeros(4, 40)
    NEIGHBOURS(4, rows, out, 40, 0)
    assert torch.equal(out, rows)
    line, turned = torch.randn(64), torch.zeros(64)
    THREADS(1, line, turned, 64, 0)
    assert torch.equal(turned, line.flip(0))
    pair, copied = torch.randn(2, 40), torch.zeros(2, 40)
    CORES(1, pair, copied, 40, 0)
    assert torch.equal(copied, pair)
    there, shifted = torch.zeros(4, 40), torch.zeros(4, 40)
    MEETING(4, rows, there, shifted, 40, 0)
    assert torch.equal(shifted, rows.roll(-1, 0))


@pytest.mark.parametrize(
    ("seed", "kind", "words"),
    [
        pytest.param(1, "race", "before the write of pipe MTE2", id="no flag from MTE2 to V"),
        pytest.param(2, "flag", "which nothing has set", id="lost notify from MTE2 to V"),
        pytest.param(3, "race", "before the write of pipe MTE2", id="lost wait of V for MTE2"),
        pytest.param(4, "race", "before the write of pipe V", id="no flag from V to MTE3"),
        pytest.param(5, "flag", "which nothing has set", id="lost notify from V to MTE3"),
        pytest.param(6, "race", "before the write of pipe V", id="lost wait of MTE3 for V"),
        pytest.param(7, "race", "overwrites UB+4096 before the read of pipe MTE3", id="no flag from MTE3 to V"),
        pytest.param(8, "flag", "which nothing has set", id="lost notify from MTE3 to V"),
        pytest.param(10, "race", "overwrites UB+0 before the read of pipe V", id="no flag from V to MTE2"),
        pytest.param(11, "flag", "which nothing has set", id="lost notify from V to MTE2"),
        pytest.param(20, "bounds", "end past its 253952 bytes", id="buffer past the end of UB"),
        pytest.param(21, "alignment", "UB+4 is not a multiple of 32", id="copy to an odd place in UB"),
        pytest.param(22, "bounds", "offset 253952 of a unified buffer", id="place outside of UB"),
        pytest.param(23, "bounds", "end past its 2000 bytes", id="last row read one element too far"),
        pytest.param(24, "race", "two copies of pipe MTE2 write", id="two copies onto the same bytes"),
        pytest.param(25, "flag", "is set again before a wait took it", id="flag set twice"),
        pytest.param(26, "argument", "flag id 9", id="flag that does not exist"),
        pytest.param(27, "argument", "pipe V signals itself", id="flag to oneself"),
        pytest.param(28, "argument", "takes no barrier", id="barrier of the scalar pipe"),
        pytest.param(30, "poison", "UB+4492, which nothing has written", id="more stored than computed"),
        pytest.param(31, "read-only", "writes 'x', which is an input", id="input overwritten"),
        pytest.param(33, "bounds", "end past its 2000 bytes", id="last row written one element too far"),
        pytest.param(34, "alignment", "a stride of 20 bytes in UB", id="wrong stride in UB"),
        pytest.param(35, "bounds", "which is in no argument", id="wrong stride in global memory"),
        pytest.param(36, "alignment", "a plain copy of 20 bytes", id="plain copy of an odd length"),
        pytest.param(37, "argument", "at most 32 each", id="too much padding"),
        pytest.param(38, "race", "reads 'y' before the write of pipe MTE3", id="result read back too early"),
        pytest.param(39, "bounds", "dereferences 0x40", id="offset dereferenced"),
        pytest.param(41, "bounds", "past the end of 'x'", id="one row too many"),
    ],
)
def test_mistakes_of_a_pipeline(seed: int, kind: str, words: str) -> None:
    fault = _caught(kind, words, _pipeline, seed)
    assert fault.kernel == "pipeline"
    assert fault.core == "AIV0"


def test_a_wait_that_is_lost_leaves_a_flag() -> None:
    _caught("flag", "flag V to MTE2, id 1, is still set when the kernel ends", _pipeline, 12, ROWS)


def test_blocks_that_step_too_little_write_the_same_rows() -> None:
    fault = _caught("blocks", "overwrites bytes of 'y' that block 0 wrote", _pipeline, 40, 3)
    assert fault.block > 0


def test_scalar_code_waits_for_pipes() -> None:
    fault = _caught("race", "before the write of pipe MTE2", _pipeline, 32)
    assert (fault.intrinsic, fault.pipe) == ("load", "S")


def test_a_result_that_is_too_short_is_not_written_past() -> None:
    x, memory = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS * WIDTH)
    fault = _caught("bounds", "end past its 1996 bytes", PIPELINE, 1, x, memory[:-1], ROWS, WIDTH, 0)
    assert (fault.intrinsic, fault.pipe) == ("asc_copy_ub2gm_align", "MTE3")
    assert memory[-1] == 0


def _neighbours(seed: int) -> None:
    NEIGHBOURS(4, torch.randn(4, 40), torch.zeros(4, 40), 40, seed)


def test_blocks_do_not_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _caught("blocks", "reads bytes of 'y' that block 0 wrote", _neighbours, 1)
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", "backwards")
    _caught("blocks", "reads bytes of 'y' that block 3 wrote", _neighbours, 2)


@pytest.mark.parametrize(
    ("seed", "kind", "words"),
    [
        pytest.param(1, "threads", "the others have ended", id="a thread leaves before the barrier"),
        pytest.param(2, "threads", "no asc_syncthreads between", id="missing barrier before a write"),
        pytest.param(3, "threads", "thread 1 writes a byte that thread 0 wrote", id="two threads write one byte"),
        pytest.param(4, "threads", "no asc_syncthreads between", id="missing barrier before a read"),
        pytest.param(5, "poison", "which nothing has written", id="read of poison"),
        pytest.param(6, "bounds", "past the end of 'y'", id="thread past the result"),
        pytest.param(7, "threads", "thread 1 writes a byte that thread 0 wrote", id="all threads write one word"),
        pytest.param(8, "poison", "which nothing has written", id="sum that starts from nothing"),
        pytest.param(9, "race", "before the write of pipe MTE2", id="threads do not wait for the copy"),
        pytest.param(10, "bounds", "SIMT functions leave 221184", id="no room for the cache of SIMT code"),
        pytest.param(11, "argument", "2049 threads", id="too many threads"),
    ],
)
def test_mistakes_of_threads(seed: int, kind: str, words: str) -> None:
    fault = _caught(kind, words, THREADS, 1, torch.randn(64), torch.zeros(64), 64, seed)
    assert fault.pipe == "V" or seed == 9


@pytest.mark.parametrize(
    ("seed", "kind", "words"),
    [
        pytest.param(1, "flag", "1 signals of id 17 between cores are left", id="a signal nobody takes"),
        pytest.param(2, "deadlock", "AIV0 in asc_sync_intra_wait, id 2", id="a signal nobody sends"),
        pytest.param(3, "core", "a cube core has no unified buffer", id="vector memory on the cube core"),
        pytest.param(4, "flag", "counter 1 would pass 15", id="too many signals"),
        pytest.param(5, "argument", "id 16 of AIV0", id="a counter that vector cores do not have"),
        pytest.param(7, "race", "overwrites 'y' before the write of pipe MTE3", id="both vector cores write one row"),
    ],
)
def test_mistakes_between_cores(seed: int, kind: str, words: str) -> None:
    _caught(kind, words, CORES, 1, torch.randn(2, 40), torch.zeros(2, 40), 40, seed)


def _meeting(kernel: Any, seed: int) -> None:
    kernel(4, torch.randn(4, 40), torch.zeros(4, 40), torch.zeros(4, 40), 40, seed)


def test_mistakes_between_blocks() -> None:
    _caught("blocks", "reads bytes of 'y' that block", _meeting, MEETING, 1)
    fault = _caught("deadlock", "asc_sync_inter_wait, id 3", _meeting, MEETING, 2)
    assert "block 0 AIV0" in str(fault)
    assert "block 3 AIV0" in str(fault)
    _caught("argument", "blocks that run together", _meeting, MEETING_APART, 0)


def test_a_launch_after_a_fault_starts_afresh() -> None:
    _caught("flag", "is set again", _pipeline, 25)
    x, y = _pipeline(0)
    assert torch.equal(y, x + 1)


def test_a_copy_waits_for_what_scalar_code_stored() -> None:
    y = torch.full((9,), -1, dtype=torch.int32)
    COUNTED(1, y, 9, 0)
    assert torch.equal(y, torch.arange(9, dtype=torch.int32))
    _caught("race", "pipe S", COUNTED, 1, y, 9, 1)
