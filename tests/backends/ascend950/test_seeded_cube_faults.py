"""Mistakes on the Cube path, one at a time: each is a fault by its kind or, where no rule forbids it, wrong values."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950.launch import Kernel, Program, TwinFault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

SEEDED = Program(Path(__file__).parent / "seeded_cube.asc")
PRODUCT = SEEDED.kernel("seeded_product", "a, b, c!, seed: i32", "cube")
SCALED = SEEDED.kernel("seeded_scaled", "a, sa, b, sb, c!, seed: i32", "cube")
MIX = SEEDED.kernel("seeded_mix", "a, b, c!, seed: i32", "mix")

WRONG = "wrong values"

PRODUCT_MISTAKES = {
    1: ("the sums are not cleared before the first step", "poison"),
    2: ("the sums are cleared at every step", WRONG),
    3: ("columns of blocks in L1 overlap", "poison"),
    4: ("a stage ends past L1", "bounds"),
    5: ("an operand ends past L0A", "bounds"),
    6: ("the sums end past L0C", "bounds"),
    7: ("no flag from the load to the operands", "race"),
    8: ("no flag from the operands to the product", "race"),
    9: ("no flag from the product to the copy out", "race"),
    10: ("operands are overwritten while the Cube reads them", "race"),
    11: ("a stage of L1 is overwritten while it is read", "race"),
    12: ("small products follow one another without a barrier", "race"),
    13: ("an operand is not aligned", "alignment"),
    14: ("B is transposed once too often", WRONG),
    15: ("the layout of the load is never set", "argument"),
    16: ("the layout of the copy out is never set", "argument"),
    17: ("the copy out steps by half of a column", WRONG),
    18: ("the copy out has a row too many", "bounds"),
    19: ("the copy out casts to another type than its target's", "argument"),
    20: ("the copy out waits for a unit flag that the product does not set", "deadlock"),
    21: ("a lock is taken inside itself", "lock"),
    22: ("a lock is never released", "lock"),
    23: ("every step reads the first columns of A", WRONG),
    24: ("a known instruction that is not modelled", "unimplemented"),
}
SCALED_MISTAKES = {
    1: ("scales of the row below", WRONG),
    2: ("the distance of scale fractals is that of one pair", WRONG),
    3: ("scales lie at half of their address", "poison"),
    4: ("k is not a multiple of 64", "argument"),
    5: ("the second step's scales are not loaded", "poison"),
    6: ("every step uses the first scales", WRONG),
}
MIX_MISTAKES = {
    1: ("the cube core does not wait for the vector cores", "poison"),
    2: ("the vector cores never signal", "deadlock"),
    3: ("the vector cores do not wait for the result", "poison"),
    4: ("the second vector core gets no signal", "deadlock"),
    5: ("blocks of two vector cores overlap in L1", "race"),
    6: ("an odd number of rows is split in two", "argument"),
    7: ("the second vector core's signal is taken from the first one's counter", "deadlock"),
}


def _product(seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    a, b = (torch.randn(rows, 128, generator=gen).bfloat16() for rows in (64, 32))
    c = torch.zeros(64, 32)
    PRODUCT(1, a, b, c, seed)
    return c, a.double() @ b.double().T


def _scaled(seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(4)
    codes = [torch.randn(rows, 128, generator=gen).to(torch.float8_e4m3fn) for rows in (32, 48)]
    scales = [torch.randint(124, 131, (rows, 4), generator=gen, dtype=torch.uint8) for rows in (32, 48)]
    c = torch.zeros(32, 48)
    SCALED(1, codes[0], scales[0], codes[1], scales[1], c, seed)
    wide = [
        x.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1) for x, s in zip(codes, scales, strict=True)
    ]
    return c, wide[0] @ wide[1].T


def _mix(seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(5)
    a, b = (torch.randn(32, 32, generator=gen).bfloat16() for _ in range(2))
    c = torch.zeros(32, 32)
    MIX(1, a, b, c, seed)
    return c, a.double() @ b.double().T


RUN = {PRODUCT: _product, SCALED: _scaled, MIX: _mix}
CASES = [
    pytest.param(kernel, seed, expected, id=words)
    for kernel, mistakes in ((PRODUCT, PRODUCT_MISTAKES), (SCALED, SCALED_MISTAKES), (MIX, MIX_MISTAKES))
    for seed, (words, expected) in mistakes.items()
]


def _close(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernel", RUN, ids=lambda kernel: kernel.entry)
def test_without_a_mistake_the_kernel_is_right(kernel: Kernel) -> None:
    assert _close(*RUN[kernel](0))


@pytest.mark.parametrize(("kernel", "seed", "expected"), CASES)
def test_each_mistake_is_caught(kernel: Kernel, seed: int, expected: str) -> None:
    if expected == WRONG:
        assert not _close(*RUN[kernel](seed))
        return
    with pytest.raises(TwinFault) as caught:
        RUN[kernel](seed)
    assert caught.value.kind == expected, str(caught.value)
    assert caught.value.kernel == kernel.entry
