"""The compressor beyond conformance: long groups, states of any strides, more rows than cores, rows in either order."""

from __future__ import annotations

import shutil

import pytest
import torch

from deepinfer.backends.ascend950 import compress
from deepinfer.ops import compress as compress_ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


def _arguments(rows: int, width: int, ratio: int, ring: int) -> dict[str, object]:
    """Two sequences, the first `rows` long and in the middle of a group, the second of one row."""
    gen = torch.Generator().manual_seed(rows + width)
    first = 3 * ratio + 1
    return {
        "gate": torch.randn(rows + 1, width, generator=gen) * 4,
        "value": torch.randn(rows + 1, width, generator=gen),
        "state_slots": torch.tensor([2, 1], dtype=torch.int32),
        "positions": torch.cat((torch.arange(first, first + rows), torch.tensor([5 * ratio - 1]))).int(),
        "row_to_seq": torch.tensor([0] * rows + [1], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, rows, rows + 1], dtype=torch.int32),
        "ratio": ratio,
        "out_dtype": torch.float32,
    }


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize(("rows", "width", "ratio", "ring"), [(130, 512, 2, 8), (40, 512, 16, 17), (9, 70, 5, 64)])
def test_groups_of_any_length(
    rows: int, width: int, ratio: int, ring: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", order)
    states = [torch.randn(3, ring, 2, width, generator=torch.Generator().manual_seed(2)) for _ in range(2)]
    arguments = _arguments(rows, width, ratio, ring)
    got = compress.kv_compress(state=states[0], **arguments)
    want = compress_ops.kv_compress.reference(state=states[1], **arguments)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(states[0], states[1])


def test_a_state_with_channels_apart_and_more_of_them_than_a_copy_takes() -> None:
    width = 2500
    states = [torch.randn(width, 2, 3, 3, generator=torch.Generator().manual_seed(4)).permute(3, 2, 1, 0) for _ in "ab"]
    assert states[0].stride(3) > 1
    arguments = _arguments(4, width, 3, 3)
    got = compress.kv_compress(state=states[0], **arguments)
    want = compress_ops.kv_compress.reference(state=states[1], **arguments)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(states[0], states[1])


def test_a_gate_of_minus_infinity_and_one_of_nan() -> None:
    gate, value = torch.zeros(4, 8), torch.ones(4, 8)
    gate[0, 0], gate[2, 1], gate[2:, 2] = -torch.inf, torch.nan, -torch.inf
    value[0] = 7.0
    state = torch.zeros(2, 2, 2, 8)
    lists = {"state_slots": [1], "positions": [0, 1, 2, 3], "row_to_seq": [0] * 4, "cu_seqlens_q": [0, 4]}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in lists.items()}
    got = compress.kv_compress(gate, value, state, **tensors, ratio=2, out_dtype=torch.float32)
    assert got[1].tolist() == [1.0] + [4.0] * 7
    assert got[3, 0] == 1.0 and torch.isnan(got[3, 1:3]).all() and (got[3, 3:] == 1.0).all()
    assert (got[[0, 2]] == 0).all()
