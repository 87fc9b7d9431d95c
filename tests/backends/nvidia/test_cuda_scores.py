"""Index scores in CUDA C++: right on the CPU thread by thread, in registers on Hopper, divided as rows are few."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the fallback of these kernels")

from cuda_on_cpu import on_cpu

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
    form = scores.Form("paged", 64)
    library = on_cpu(form.program(), tmp_path)
    want = index_ops.index_logits_paged(q, cache, weights, visible, table, row_to_seq, 301)
    for chunk in (64, 1024):
        got = score(library, form, q, weights, 301, chunk, **from_pages(cache, visible, table, row_to_seq))
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("candidate", [3, 8])
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


@pytest.mark.parametrize("form", [scores.Form("paged", 64), scores.Form("blocks", 128, 8), scores.Form("ragged")])
def test_scores_stay_in_registers(form: scores.Form) -> None:
    pytest.importorskip("cuda.core")
    registers, local_bytes = resource_usage(form.program().compile("sm_90a"))
    assert local_bytes == 0
    assert registers * 128 * form.resident <= REGISTERS
    assert (form.shared_bytes + 1024) * form.resident <= SHARED_OF_MULTIPROCESSOR


@pytest.mark.parametrize(
    ("rows", "columns", "chunk"), [(1, 32768, 64), (64, 32768, 1024), (1024, 8192, 1024), (1, 17, 64)]
)
def test_few_rows_take_short_chunks(rows: int, columns: int, chunk: int) -> None:
    assert scores.Form("paged", 64).chunk(rows, columns, 132) == chunk
