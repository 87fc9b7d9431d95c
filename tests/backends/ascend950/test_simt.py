"""SIMT functions in the twin: warps, atomics, conversions and axes, against plain Python and torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950.launch import Program

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

PROGRAM = Program(Path(__file__).with_name("simt_kernels.asc"))
WARPS = PROGRAM.kernel("warps", "x, y!, n: i32")
HISTOGRAM = PROGRAM.kernel("histogram", "x, counts!, ends!, n: i32, num_bins: i32")
CONVERSIONS = PROGRAM.kernel("conversions", "x, halves!, small!, whole!, codes!, back!, n: i32")
AXES = PROGRAM.kernel("axes", "y!")


@pytest.fixture(params=["checked", "fast"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN", request.param)
    return str(request.param)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def test_warp_functions(mode: str) -> None:
    n = 80  # the third warp has half of its lanes
    x = torch.randint(-50, 50, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    y = torch.full((14, n), -999, dtype=torch.int32)
    WARPS(1, x, y, n)
    values = x.tolist()
    for i in range(n):
        first = i // 32 * 32
        lanes = values[first : first + 32]
        lane = i - first

        def at(index: int, inside: bool = True, lanes: list[int] = lanes, lane: int = lane) -> int:
            return lanes[index] if inside and index < len(lanes) else lanes[lane]

        even = values[i] % 2 == 0
        alike = [j for j, v in enumerate(lanes) if (v % 2 == 0) == even]
        expected = [
            at(5),
            at(lane // 8 * 8 + 3),
            at(max(lane - 2, 0), lane >= 2),
            at(max(lane - 3, 0), lane - 3 >= lane // 16 * 16),
            at(lane + 4, lane + 4 < 32),
            at(lane + 1, lane + 1 < (lane // 4 + 1) * 4),
            at(lane ^ 7),
            sum(lanes),
            max(lanes),
            min(lanes),
            _signed(sum(1 << j for j, v in enumerate(lanes) if v > 0)),
            int(any(v > 40 for v in lanes)),
            int(all(v > -90 for v in lanes)),
            _signed(sum(1 << j for j in alike)) if even else len(alike),
        ]
        assert y[:, i].tolist() == expected, i


def test_atomics_count_every_value(mode: str) -> None:
    x = torch.randint(0, 37, (1000,), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    counts, ends = torch.zeros(37, dtype=torch.int32), torch.tensor([-1, 99], dtype=torch.int32)
    HISTOGRAM(1, x, counts, ends, 1000, 37)
    assert torch.equal(counts, torch.bincount(x, minlength=37).int())
    assert ends.tolist() == [int(x.max()), int(x.min())]


def test_conversions_round_as_torch_does(mode: str) -> None:
    gen = torch.Generator().manual_seed(5)
    x = torch.cat((torch.randn(300, generator=gen) * 300, torch.arange(-8, 8) + 0.5, torch.tensor([0.0, -0.0, 1e-30])))
    n = x.numel()
    halves, small = torch.zeros(n, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.float16)
    whole, back = torch.zeros(3, n, dtype=torch.int32), torch.zeros(n)
    codes = torch.zeros(n, dtype=torch.uint16)
    CONVERSIONS(1, x, halves, small, whole, codes, back, n)
    assert torch.equal(halves.view(torch.int16), x.bfloat16().view(torch.int16))
    assert torch.equal(small.view(torch.int16), x.half().view(torch.int16))
    assert torch.equal(whole[0], x.round().int())
    assert torch.equal(whole[1], x.floor().int())
    assert torch.equal(whole[2], x.view(torch.int32))
    assert torch.equal(back, x.bfloat16().float() + x.half().float())
    bytes_of = codes.view(torch.uint8).view(n, 2)
    expected = torch.stack((x, -x), 1).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(bytes_of, expected)


def test_threads_know_their_place(mode: str) -> None:
    y = torch.zeros(3, 24, dtype=torch.int32)
    AXES(3, y)
    place = torch.arange(24)
    expected = place % 2 + 10 * (place // 2 % 3) + 100 * (place // 6) + 3000
    assert torch.equal(y, expected.int().expand(3, 24))
