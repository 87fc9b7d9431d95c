"""Every op's kernel against its reference without a GPU: a few cases each, interpreted with exact arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.ops.catalog import defined_ops


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("op", sorted(defined_ops()))
def test_kernel_agrees_with_its_reference(op: str, emulated_cases: list[dict[str, Any]]) -> None:
    results = [entry for entry in emulated_cases if entry["op"] == op]
    assert results, "no case was chosen"
    assert all(entry["native"] for entry in results), "no implementation took these dimensions"
    failed = [f"{entry['case']}: {entry['detail']}" for entry in results if entry["status"] not in ("pass", "slow")]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_most_ops_also_ran_in_other_layouts_and_batches(emulated_cases: list[dict[str, Any]]) -> None:
    whole = {entry["op"] for entry in emulated_cases if entry["checks"] > 5}
    assert len(whole) > len(defined_ops()) // 2, sorted(set(defined_ops()) - whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("linear_mx", "linear_mx_scaled"),
        ("moe_grouped_gemm", "moe_grouped_gemm_scaled"),
        ("sparse_attn", "sparse_attn_tcgen05"),
    ],
)
def test_kernels_of_blackwell_agree_with_their_reference(
    op: str, kernel: str, emulated_blackwell_cases: list[dict[str, Any]]
) -> None:
    results = [entry for entry in emulated_blackwell_cases if entry["op"] == op]
    assert {entry["implementation"] for entry in results} == {f"cuda_sm100.{kernel}"}
    failed = [f"{entry['case']}: {entry['detail']}" for entry in results if entry["status"] not in ("pass", "slow")]
    assert not failed, "\n".join(failed)
