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
