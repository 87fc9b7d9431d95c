"""Attention of the vision tower beyond conformance: many tiles and units, what stands behind images, broken patches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950 import twin_build, vision
from deepinfer.backends.ascend950.launch import Program, TwinFault
from deepinfer.ops import vision as vision_ops

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")

TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 3 / 128, "atol": 2e-3}}
SIGNATURE = (
    "out!, q, k, v, cu_seqlens, rows: i64, q_row: i64, q_head: i64, k_row: i64, k_head: i64, v_row: i64, v_head: i64, "
    "images: i32, heads: i32, dim: i32, scale: f32"
)


def _patches(rows: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, heads, dim, generator=gen).to(dtype) for _ in range(3))


def _ends(*sizes: int) -> torch.Tensor:
    return torch.tensor((0, *sizes)).cumsum(0).int()


@pytest.mark.parametrize("order", ["forwards", "backwards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_many_tiles_and_more_units_than_cores(
    dim: int, dtype: torch.dtype, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", order)
    q, k, v = _patches(300 + 3 + 129, 7, dim, dtype)
    ends = _ends(300, 3, 0, 129)
    got = vision.vision_attn(q, k, v, ends, dim**-0.5)
    torch.testing.assert_close(got, vision_ops.vision_attn.reference(q, k, v, ends, dim**-0.5), **TOLERANCE[dtype])


def test_heads_inside_wider_rows() -> None:
    wide = torch.randn(140, 3, 2, 40, generator=torch.Generator().manual_seed(2))
    q, k, v = (wide[:, i, :, 4:36] for i in range(3))
    got = vision.vision_attn(q, k, v, _ends(140), 0.2)
    want = vision_ops.vision_attn.reference(q, k, v, _ends(140), 0.2)
    torch.testing.assert_close(got, want, **TOLERANCE[torch.float32])


def test_patches_behind_the_last_image_are_zero() -> None:
    q, k, v = _patches(60, 2, 32, torch.bfloat16)
    out = torch.full_like(q, torch.nan)
    vision.vision_attn(q, k, v, _ends(20, 5), 0.2, out=out)
    assert (out[25:] == 0).all() and torch.isfinite(out[:25]).all()
    vision.vision_attn(q, k, v, _ends(), 0.2, out=out)
    assert (out == 0).all()


def test_a_patch_has_the_same_bits_wherever_its_image_stands() -> None:
    q, k, v = _patches(500, 2, 64, torch.bfloat16)
    whole = vision.vision_attn(q, k, v, _ends(70, 290, 140), 0.125)
    alone = vision.vision_attn(q[70:360], k[70:360], v[70:360], _ends(290), 0.125)
    assert torch.equal(whole[70:360], alone)


def test_broken_patches_break_their_own_image_alone() -> None:
    q, k, v = _patches(40, 1, 32, torch.float32)
    q[3, 0, 0] = torch.nan  # one query
    k[15:, 0, 0] = -torch.inf  # keys of the second image: scores of both signs of infinity
    ends = _ends(15, 25)
    got = vision.vision_attn(q, k, v, ends, 0.2)
    want = vision_ops.vision_attn.reference(q, k, v, ends, 0.2)
    torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCE[torch.float32])
    assert got[:15].isnan().any(-1).flatten().tolist() == [i == 3 for i in range(15)]


def test_a_tile_whose_scores_are_all_minus_infinity_weighs_nothing() -> None:
    q, k, v = (torch.ones(200, 1, 16) for _ in range(3))
    k[:128, 0, 0] = -torch.inf  # two whole tiles of float32 keys
    v[128:] = 5.0
    assert (vision.vision_attn(q, k, v, _ends(200), 0.25) == 5.0).all()


def test_weights_that_overwrite_those_of_the_tile_before_are_found(tmp_path: Path) -> None:
    text = (twin_build.KERNELS / "vision.asc").read_text()
    lost = "  if (step.number >= 2) asc_sync_intra_wait(PIPE_MTE3, kWeightsTaken);\n"
    assert text.count(lost) == 1
    source = tmp_path / "mistaken.asc"
    source.write_text(text.replace(lost, "").replace("asc_sync_intra_wait(PIPE_MTE3, kWeightsTaken);", "{}"))
    kernel = Program(source).kernel("attend_patches_bf16", SIGNATURE, core="mix")
    q, k, v = _patches(500, 1, 16, torch.bfloat16)
    with pytest.raises(TwinFault) as caught:
        kernel(1, torch.empty_like(q), q, k, v, _ends(500), 500, 16, 16, 16, 16, 16, 16, 1, 1, 16, 0.25)
    assert caught.value.kind in {"race", "flag"}
