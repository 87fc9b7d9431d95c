"""Index scores in CUDA C++: right on the CPU thread by thread, in registers on Hopper, divided as rows are few."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of these kernels")

from cpu_programs import on_cpu

from deepinfer.backends.cuda_sm90 import scores
from deepinfer.backends.nvidia.ahead import resource_usage
from deepinfer.ops import index as index_ops
from deepinfer.ops.cases.common import cache_of, quantised, tables
from deepinfer.ops.formats import PagedCache, QTensor

SHARED_OF_MULTIPROCESSOR = 228 << 10
REGISTERS = 65536


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def score(
    library: ctypes.CDLL, form: scores.Form, q: QTensor, weights: Tensor, columns: int, chunk: int, **given: Any
) -> Tensor:
    rows = q.shape[0]
    out = torch.full((rows, columns), 7e7)
    places = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in given.items()}
    params = scores._Params(
        q=q.data.data_ptr(),
        q_scales=q.scale.data_ptr(),
        weights=weights.data_ptr(),
        weights_pitch=weights.stride(0),
        out=out.data_ptr(),
        rows=rows,
        columns=columns,
        chunk=chunk,
        **places,
    )
    assert library.params_bytes() == ctypes.sizeof(params)
    grid = (-(-rows // form.rows), -(-columns // chunk))
    library.launch(ctypes.byref(params), *grid, 1, 128, form.shared_bytes)
    return out


def stored(seed: int, rows: int, sort: bool) -> tuple[QTensor, PagedCache, Tensor, Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    cache = cache_of(gen, "index", 128, 16, 64, poison="nan")
    row_to_seq = torch.randint(0, 3, (rows,), generator=gen, dtype=torch.int32)
    return (
        quantised(gen, rows, 32, 128, fmt="mxfp4"),
        cache,
        torch.randn(rows, 32, generator=gen).bfloat16(),
        torch.randint(0, 301, (rows,), generator=gen, dtype=torch.int32),
        tables(gen, 3, 5, 16, holes=False).int(),
        row_to_seq.sort().values if sort else row_to_seq,
    )


def from_pages(cache: PagedCache, visible: Tensor, table: Tensor, row_to_seq: Tensor) -> dict[str, Any]:
    return {
        "keys": cache.data,
        "ends": visible,
        "block_table": table,
        "row_to_seq": row_to_seq,
        "page_bytes": cache.data.stride(0),
        "table_pitch": table.stride(0),
        "table_columns": table.shape[1],
    }


@pytest.mark.parametrize("sort", [False, True])
def test_scores_on_the_cpu_are_the_contracts(sort: bool, tmp_path: Path) -> None:
    """Runs of rows of one sequence and rows of their own, a ragged last tile, chunks with nothing to see."""
    q, cache, weights, visible, table, row_to_seq = stored(5, 7, sort)
    want = index_ops.index_logits_paged(q, cache, weights, visible, table, row_to_seq, 301)
    for rows in (1, 4):
        form = scores.Form("paged", 64, rows=rows)
        library = on_cpu(form.program(), tmp_path)
        for chunk in (64, 1024):
            got = score(library, form, q, weights, 301, chunk, **from_pages(cache, visible, table, row_to_seq))
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5)


def test_scores_have_the_same_bits_beside_heads_and_keys_of_any_scale(tmp_path: Path) -> None:
    """What a row's own heads, or a key's own groups, do not need must not show in its scores; NaN is theirs alone."""
    q, cache, weights, visible, table, row_to_seq = stored(9, 7, True)
    visible.fill_(301)
    form = scores.Form("paged", 64, rows=4)
    library = on_cpu(form.program(), tmp_path)
    pages = from_pages(cache, visible, table, row_to_seq)
    want = score(library, form, q, weights, 301, 1024, **pages)
    gen = torch.Generator().manual_seed(10)
    others = torch.arange(7) % 2 == 1
    q.scale[others] = torch.randint(90, 160, q.scale[others].shape, generator=gen).to(torch.uint8)
    q.scale[1, 3, 2] = 255
    key_scales = cache.data[:, 64 * 64 :].unflatten(1, (64, 4))  # of page 0 to the last
    key_scales[:, ::5] = torch.randint(60, 200, key_scales[:, ::5].shape, generator=gen).to(torch.uint8)
    key_scales[:, 10, 1] = 255
    got = score(library, form, q, weights, 301, 1024, **pages)
    kept = torch.arange(301) % 64 % 5 != 0
    assert torch.equal(got[~others][:, kept], want[~others][:, kept])
    assert got[:, 10].isnan().all() and got[1].isnan().all()
    assert not got[[0, 2, 3, 4, 5, 6]][:, kept].isnan().any()
    alone = scores.Form("paged", 64)
    again = score(on_cpu(alone.program(), tmp_path), alone, q, weights, 301, 64, **pages)
    torch.testing.assert_close(again, got, rtol=0, atol=0, equal_nan=True)
    reference = index_ops.index_logits_paged(q, cache, weights, visible, table, row_to_seq, 301)
    torch.testing.assert_close(got, reference, rtol=2**-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("candidate", [3, 8, 16])
def test_scores_of_candidates_have_the_bits_of_all(candidate: int, tmp_path: Path) -> None:
    q, cache, weights, visible, table, row_to_seq = stored(6, 3, False)
    pages = from_pages(cache, visible, table, row_to_seq)
    every = scores.Form("paged", 64)
    want = score(on_cpu(every.program(), tmp_path), every, q, weights, 320, 1024, **pages)
    gen = torch.Generator().manual_seed(7)
    blocks = torch.randint(-1, 320 // candidate, (3, 25), generator=gen, dtype=torch.int32).sort(1).values
    form = scores.Form("blocks", 64, candidate)
    width = 25 * candidate
    got = score(on_cpu(form.program(), tmp_path), form, q, weights, width, 64, blocks=blocks, num_blocks=25, **pages)
    position = (blocks.long()[..., None] * candidate + torch.arange(candidate)).flatten(1)
    there = (blocks >= 0).repeat_interleave(candidate, 1)
    picked = torch.where(there, want.gather(1, position.clamp(min=0)), -torch.inf)
    assert torch.equal(got, picked)


def test_scores_of_dense_keys_on_the_cpu_hold_any_scale(tmp_path: Path) -> None:
    gen = torch.Generator().manual_seed(8)
    q, k = quantised(gen, 4, 32, 128, fmt="mxfp4"), quantised(gen, 150, 128, fmt="mxfp4")
    q.scale.copy_(torch.randint(70, 185, q.scale.shape, generator=gen))
    k.scale.copy_(torch.randint(80, 170, k.scale.shape, generator=gen))  # above 128 one factor does not hold them
    weights = torch.randn(4, 32, generator=gen).bfloat16()
    starts = torch.randint(0, 80, (4,), generator=gen, dtype=torch.int32)
    ends = torch.tensor([150, 80, 149, 120], dtype=torch.int32)
    form = scores.Form("ragged")
    want = index_ops.index_logits_ragged(q, k, weights, starts, ends)
    library = on_cpu(form.program(), tmp_path)
    got = score(library, form, q, weights, want.shape[1], 64, keys=k.data, scales=k.scale, starts=starts, ends=ends)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        scores.Form("paged", 64),
        scores.Form("paged", 64, rows=4),
        scores.Form("blocks", 128, 8),
        scores.Form("blocks", 64, 3),
        scores.Form("ragged"),
    ],
    ids=str,
)
def test_scores_stay_in_registers(form: scores.Form) -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(form.program().compile("sm_90a"))
    assert local_bytes == 0
    assert registers * 128 * form.resident <= REGISTERS
    assert (form.shared_bytes + 1024) * form.resident <= SHARED_OF_MULTIPROCESSOR


@pytest.mark.parametrize(
    ("rows", "columns", "chunk"), [(1, 32768, 64), (64, 32768, 4096), (64, 16384, 2048), (8192, 16384, 4096)]
)
def test_few_rows_take_short_chunks(rows: int, columns: int, chunk: int) -> None:
    assert scores.Form("paged", 64).chunk(rows, columns, 132) == chunk
