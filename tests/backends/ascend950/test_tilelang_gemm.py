"""A product with ReLU as TileLang lowers it, over its own gemm.h: Cube, both vector cores and SIMT in one kernel."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from deepinfer.backends.ascend950.launch import Program, recording

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++"),
    pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang makes this text"),
]

M, N, K = 256, 448, 512
TILE_N, TILE_K = 224, 128

# Generated text includes much that this kernel does not use, the driver's headers among it.
_COMMON = '#pragma once\n#include "c_api/asc_simd.h"\n#include "simt_api/asc_simt.h"\n'


def _lowered() -> str:
    import tilelang
    import tilelang.ascend.language as T
    from tilelang.ascend.target import _make_ascend_target

    @T.prim_func
    def rectified(x: T.Tensor((M, K), T.bfloat16), w: T.Tensor((N, K), T.bfloat16), y: T.Tensor((M, N), T.float32)):  # type: ignore[no-untyped-def]
        with T.Kernel(N // TILE_N) as block:
            x_l1 = T.alloc_l1((M, TILE_K), T.bfloat16)
            w_l1 = T.alloc_l1((TILE_N, TILE_K), T.bfloat16)
            sums = T.alloc_l0c((M, TILE_N), T.float32)
            half = T.alloc_shared((M // 2, TILE_N), T.float32)
            for k in T.Pipelined(K // TILE_K, num_stages=2):
                T.copy(x[0, k * TILE_K], x_l1)
                T.copy(w[block * TILE_N, k * TILE_K], w_l1)
                T.gemm(x_l1, w_l1, sums, transpose_B=True, clear_accum=(k == 0))
            T.dual_copy(sums, half)
            with T.SimtVF(threads=128):
                for i, j in T.Parallel(M // 2, TILE_N):
                    half[i, j] = T.max(half[i, j], 0)
            T.dual_copy(half, y[0:M, block * TILE_N : (block + 1) * TILE_N])

    target = _make_ascend_target()
    with tilelang.tvm.transform.PassContext(opt_level=3), target:
        return str(tilelang.lower(rectified, target=target, enable_device_compile=False).kernel_source)


def test_a_lowered_product_with_relu_runs_unchanged(tmp_path: Path) -> None:
    spec = find_spec("tilelang")
    assert spec is not None and spec.origin is not None
    headers = tmp_path / "tl_templates" / "ascend"
    headers.mkdir(parents=True)
    (headers / "gemm.h").symlink_to(Path(spec.origin).parent / "src" / "tl_templates" / "ascend" / "gemm.h")
    (headers / "common.h").write_text(_COMMON)
    (headers / "debug.h").write_text("#pragma once\n")
    text = tmp_path / "rectified.asc"
    text.write_text(_lowered())
    kernel = Program(text, zero_is_ub=True).kernel("rectified_kernel", "w, x, y!", "mix")
    gen = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, K, generator=gen).bfloat16() for rows in (M, N))
    y = torch.full((M, N), -1.0)
    with recording(run=True) as launches:
        kernel(N // TILE_N, w, x, y)
    torch.testing.assert_close(y.double(), (x.double() @ w.double().T).relu(), rtol=1e-5, atol=1e-3)
    assert launches[0].measured is not None
    assert launches[0].measured.cube_cycles == (M // 16) * (N // 16) * (K // 16)
