"""Faults of vector code, planted one at a time in kernels that are right: each is caught, and says what it is.

A wrong mask, part or layout gives wrong numbers, which a comparison finds; what a device would leave undefined is a
fault of the twin.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950.launch import Program, TwinFault
from deepinfer.backends.ascend950.twin_build import missing_compiler

PROGRAM = Program(Path(__file__).with_name("vector_faults.asc"))
QUANTIZE = PROGRAM.kernel("quantize", "codes!, scales!, rows, count: i32, mutation: i32")
TAIL = PROGRAM.kernel("tail", "out!, input, index, n: i32, mutation: i32")

WRONG_NUMBERS = {
    1: "the mask of a widening conversion is one of 32-bit lanes",
    2: "a conversion reads the other part",
    3: "a maximum under the mask of one lane",
    4: "a minimum instead of a maximum",
    5: "a reduction by blocks instead of one over the register",
    6: "the result of a reduction is read from the highest lane",
    7: "a conversion without saturation overflows",
    8: "a conversion writes a part that the store does not keep",
    9: "a store packs halves instead of quarters",
    10: "an offset counts bytes where it should count words",
}
FAULTS = {
    11: ("poison", "asc_axpy", "nothing has written"),
    12: ("race", "asc_loadalign", "no asc_mem_bar between"),
    13: ("alignment", "asc_loadalign", "not a multiple of 32"),
    14: ("bounds", "asc_loadalign", "not an address of UB|end past"),
}
TAIL_FAULTS = {
    16: ("poison", "asc_add", "nothing has written"),
    18: ("argument", "asc_storealign_pack", "a hole"),
    19: ("argument", "asc_scatter", "same index 7"),
    21: ("core", "asc_loadalign", "outside of a vector function"),
}


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("DEEPINFER_TWIN", "checked")


def quantized(mutation: int) -> bool:
    """Run `quantize`; whether codes and scales are right."""
    rows = torch.randn(4, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    rows[:, 0] = torch.tensor([9.0, -0.5, 6.0, 8.0])  # the largest are neither in the last lane nor all even
    rows[1, 77] = -7.0
    codes, scales = torch.full((4, 128), 0x55, dtype=torch.uint8), torch.full((4,), -1.0)
    QUANTIZE(1, codes, scales, rows, 4, mutation)
    wanted = rows.float().abs().amax(1) * (1.0 / 448.0)
    exact = (rows.float() / wanted[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.equal(scales, wanted) and torch.equal(codes, exact)


def doubled(mutation: int, n: int = 37) -> bool:
    """Run `tail`; whether the first n numbers are at their places and nothing else changed."""
    generator = torch.Generator().manual_seed(6)
    given, places = torch.randn(64, generator=generator), torch.randperm(64, generator=generator)
    out = torch.full((64,), -3.0)
    TAIL(1, out, given, places.int(), n, mutation)
    wanted = torch.full((64,), -3.0)
    wanted[places[:n]] = 2 * given[:n]
    return torch.equal(out, wanted)


def test_the_kernels_are_right_without_a_mutation() -> None:
    assert quantized(0)
    assert doubled(0)


@pytest.mark.parametrize("mutation", WRONG_NUMBERS, ids=WRONG_NUMBERS.get)
def test_a_wrong_mask_part_or_layout_gives_wrong_numbers(mutation: int) -> None:
    try:
        right = quantized(mutation)
    except TwinFault as fault:
        assert fault.kind == "poison"  # numbers that were never stored cannot leave the core
    else:
        assert not right


@pytest.mark.parametrize("mutation", [15])
def test_a_lane_too_many_gives_wrong_numbers(mutation: int) -> None:
    assert not doubled(mutation)


@pytest.mark.parametrize("mutation", FAULTS)
def test_what_is_undefined_on_a_device_is_a_fault(mutation: int) -> None:
    kind, intrinsic, words = FAULTS[mutation]
    with pytest.raises(TwinFault, match=words) as caught:
        quantized(mutation)
    assert (caught.value.kind, caught.value.intrinsic) == (kind, intrinsic)


@pytest.mark.parametrize("mutation", TAIL_FAULTS)
def test_misused_predicates_and_indices_are_faults(mutation: int) -> None:
    kind, intrinsic, words = TAIL_FAULTS[mutation]
    with pytest.raises(TwinFault, match=words) as caught:
        doubled(mutation)
    assert (caught.value.kind, caught.value.intrinsic) == (kind, intrinsic)
