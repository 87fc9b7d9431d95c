"""Every Triton kernel compiles for three generations without a GPU, in registers, with the MMA it is made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from deepinfer.ops.catalog import defined_ops

TARGETS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a"}
BLACKWELL = (100, 103)
STACK_ALLOWED = {"_sparse_attn": 64, "_select": 16}
"""Bytes of a thread outside registers that the assembler does not call spills: addresses and counters it puts aside."""
PLAIN = "kind::f16"
SCALED = "kind::mxf8f6f4.block_scale"


@dataclass(frozen=True)
class Expected:
    """What a kernel's machine code must have.

    Attributes:
        hopper: its matrix instruction there; empty for a kernel that Hopper does not have.
        blackwell: likewise.
        kind: what the `tcgen05.mma` of its PTX multiply; empty where there is none.
        constants: which of its forms this is said of.
    """

    hopper: str
    blackwell: str
    kind: str
    constants: tuple[tuple[str, str], ...] = ()


BF16 = (("WIDE", "bf16"),)
FLOAT32 = (("WIDE", "fp32"),)
TABLE = {
    "dense": [Expected("HGMMA", "UTCHMMA", PLAIN, BF16), Expected("", "", "", FLOAT32)],
    "grouped": [Expected("HGMMA", "UTCHMMA", PLAIN, BF16), Expected("", "", "", FLOAT32)],
    "dense_scaled": [Expected("", "UTCQMMA", SCALED)],
    "grouped_scaled": [Expected("", "UTCQMMA", SCALED)],
    "_stored": [Expected("HGMMA", "UTCHMMA", PLAIN, BF16), Expected("", "", "", FLOAT32)],
    "_ragged": [Expected("HGMMA", "UTCHMMA", PLAIN, BF16), Expected("", "", "", FLOAT32)],
    # 64 heads are rows enough for one instruction of a warpgroup; the shared tile has 32, which stay in registers
    "_sparse_attn": [
        Expected("", "UTCHMMA", PLAIN, (*BF16, ("HEADS", "64"))),
        Expected("HMMA", "HMMA", "", (*BF16, ("HEADS", "32"))),
        Expected("", "", "", FLOAT32),
    ],
    "_mix_parts": [Expected("HGMMA", "UTCHMMA", PLAIN)],
    "_attend": [Expected("HGMMA", "UTCHMMA", PLAIN)],
    "_markov": [Expected("HMMA", "HMMA", "")],
}
"""Kernels that multiply matrices; all others must have no matrix instruction."""


def expected(entry: dict[str, Any]) -> Expected | None:
    """The row of the table that a compiled form falls under; None for a kernel that multiplies nothing."""
    rows = TABLE.get(entry["kernel"])
    if rows is None:
        return None
    for row in rows:
        if all(entry["constants"].get(name) == value for name, value in row.constants):
            return row
    raise AssertionError(f"the table says nothing of {entry['kernel']} with {entry['constants']}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", TARGETS)
def test_every_op_compiles(capability: int, compiled_kernels: list[dict[str, Any]]) -> None:
    made = [entry for entry in compiled_kernels if entry["capability"] == capability]
    assert {entry["op"] for entry in made} == set(defined_ops())
    failed = [f"{entry['op']} {entry['kernel']}: {entry['error'][:500]}" for entry in made if entry["error"]]
    assert not failed, "\n".join(failed)
    assert {entry["target"] for entry in made} == {TARGETS[capability]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_spills(compiled_kernels: list[dict[str, Any]]) -> None:
    spilling = {
        f"{entry['op']} {entry['kernel']} sm_{entry['capability']}: {entry['spilled_bytes']} bytes, "
        f"{entry['stack_bytes']} of stack"
        for entry in compiled_kernels
        if entry.get("spilled_bytes") or entry.get("stack_bytes", 0) > STACK_ALLOWED.get(entry["kernel"], 0)
    }
    assert not spilling, sorted(spilling)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", TARGETS)
def test_kernels_have_the_instructions_they_are_made_for(
    capability: int, compiled_kernels: list[dict[str, Any]]
) -> None:
    wrong = []
    for entry in compiled_kernels:
        if entry["capability"] != capability or entry["error"]:
            continue
        row = expected(entry)
        unit = "" if row is None else row.blackwell if capability in BLACKWELL else row.hopper
        kind = row.kind if row is not None and capability in BLACKWELL else ""
        if entry["matrix"] != [unit] * bool(unit) or entry["kinds"] != [kind] * bool(kind):
            wrong.append(f"{entry['op']} {entry['kernel']}: {entry['matrix']} {entry['kinds']}, not {unit} {kind}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_row_of_the_table_was_met(compiled_kernels: list[dict[str, Any]]) -> None:
    """Float32 forms may be missing: the model's shapes have few."""
    met = {
        (entry["kernel"], rows.index(row))
        for entry in compiled_kernels
        for rows in [TABLE.get(entry["kernel"], [])]
        for row in rows
        if row == expected(entry)
    }
    missing = [
        (kernel, row) for kernel, rows in TABLE.items() for place, row in enumerate(rows) if (kernel, place) not in met
    ]
    assert [(kernel, row) for kernel, row in missing if row.constants != FLOAT32] == []
