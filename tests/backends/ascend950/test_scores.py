"""Index scores beyond conformance: equal bits of the three ops, all shapes of tiles, roundings, seeded mistakes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer.backends.ascend950 import budget, scores, twin_build
from deepinfer.backends.ascend950.launch import Program, TwinFault, recording
from deepinfer.conformance.compare import compare
from deepinfer.ops import index as index_ops
from deepinfer.ops.cases.common import cache_of, quantised
from deepinfer.ops.errors import OpArgumentError
from deepinfer.ops.formats import CacheFormat, PagedCache, QTensor
from deepinfer.ops.quant import quantize, read_records

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the twin compiles kernels with g++")


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DEEPINFER_TWIN_ORDER", request.param)
    return str(request.param)


@dataclass(frozen=True)
class Problem:
    """Rows of some sequences against their stored keys."""

    q: Tensor | QTensor
    cache: PagedCache
    weights: Tensor
    visible: Tensor
    table: Tensor
    sequence: Tensor

    def paged(self, columns: int) -> Tensor:
        return scores.index_logits_paged(
            self.q, self.cache, self.weights, self.visible, self.table, self.sequence, columns
        )

    def expected(self, columns: int) -> Tensor:
        return index_ops.index_logits_paged.reference(
            self.q, self.cache, self.weights, self.visible, self.table, self.sequence, columns
        )


def _problem(
    rows: int, heads: int, dim: int, *, kind: str = "index", dtype: torch.dtype = torch.bfloat16, pages: int = 9
) -> Problem:
    gen = torch.Generator().manual_seed(heads * dim + rows)
    records, sequences = 48, 3
    cache = cache_of(gen, "index" if kind == "index" else "f32", dim, sequences * pages + 1, records, poison="nan")
    table = (torch.randperm(sequences * pages, generator=gen) + 1).reshape(sequences, pages).int()
    q: Tensor | QTensor = torch.randn(rows, heads, dim, generator=gen)
    if kind == "index":
        q = quantised(gen, rows, heads, dim, fmt="mxfp4")
    visible = torch.randint(0, records * pages + 1, (rows,), generator=gen).int()
    sequence = torch.arange(rows).mul(sequences).div(max(rows, 1), rounding_mode="floor").int()
    return Problem(q, cache, torch.randn(rows, heads, generator=gen).to(dtype), visible, table, sequence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["index", "f32"])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(7, 32, 128), (5, 128, 64), (3, 5, 96), (19, 1, 32), (9, 48, 128)])
def test_heads_and_widths_of_any_number(
    rows: int, heads: int, dim: int, kind: str, dtype: torch.dtype, order: str
) -> None:
    problem = _problem(rows, heads, dim, kind=kind, dtype=dtype)
    outcome = compare(problem.paged(432), problem.expected(432), index_ops.SCORES)
    assert outcome.failures == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["index", "f32"])
def test_the_three_ops_give_equal_bits(kind: str, dtype: torch.dtype) -> None:
    problem = _problem(7, 32, 128, kind=kind, dtype=dtype)
    paged = problem.paged(432)
    for candidate in (3, 8):
        picked = torch.randperm(432 // candidate, generator=torch.Generator().manual_seed(1))[:50].sort().values.int()
        blocks = picked.repeat(7, 1)
        blocks[2, 10:20] = -1
        got = scores.index_logits_blocks(
            problem.q, problem.cache, problem.weights, problem.visible, blocks, candidate, problem.table,
            problem.sequence,
        )  # fmt: skip
        place = (blocks.long()[..., None] * candidate + torch.arange(candidate)).flatten(1)
        assert torch.equal(got, torch.where(place >= 0, paged.gather(1, place.clamp(min=0)), -torch.inf))
    starts = torch.tensor([0, 0, 0, 5, 5, 40, 431], dtype=torch.int32)
    for row in range(7):
        slots = problem.table[problem.sequence[row].long()].long()[:, None] * 48 + torch.arange(48)
        keys = _records(problem.cache, slots.flatten())
        ends = torch.maximum(problem.visible[row].expand(7), starts).int()
        dense = scores.index_logits_ragged(problem.q, keys, problem.weights, starts, ends)
        first, count = int(starts[row]), int(ends[row] - starts[row])
        assert torch.equal(dense[row, :count], paged[row, first : first + count])


def _records(cache: PagedCache, slots: Tensor) -> Tensor | QTensor:
    if cache.format.kind == "f32":
        return read_records(cache, slots, torch.float32)
    page, offset = slots // cache.records, slots % cache.records
    codes, scales = cache.format.code_bytes, cache.format.scale_bytes
    data = cache.data[:, : cache.records * codes].reshape(-1, cache.records, codes)[page, offset]
    scale = cache.data[:, cache.records * codes :].reshape(-1, cache.records, scales)[page, offset]
    return QTensor(data.contiguous(), scale.contiguous(), "mxfp4")


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    problem = _problem(21, 32, 128)
    whole = problem.paged(432)
    for row in (0, 3, 4, 20):
        one = slice(row, row + 1)
        q = problem.q[one]
        alone = Problem(
            q, problem.cache, problem.weights[one], problem.visible[one], problem.table, problem.sequence[one]
        )
        assert torch.equal(alone.paged(432), whole[one])


def test_neighbours_of_one_sequence_read_its_keys_once() -> None:
    problem = _problem(4, 32, 128)
    together = Problem(
        problem.q, problem.cache, problem.weights, torch.full((4,), 256).int(), problem.table, torch.zeros(4).int()
    )
    apart = Problem(
        problem.q, problem.cache, problem.weights, together.visible, problem.table, torch.tensor([0, 1, 0, 1]).int()
    )
    moved = []
    for one in (together, apart):
        with recording(run=True) as launches:
            one.paged(256)
        assert launches[0].measured is not None
        moved.append(launches[0].measured.bytes["MTE2"])
    assert moved[1] - moved[0] == 3 * 256 * 68


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["mxfp4", "f32"])
def test_memories_are_used_as_planned(kind: str, dtype: torch.dtype) -> None:
    problem = _problem(256, 16, 128, kind="index" if kind == "mxfp4" else "f32", dtype=dtype)
    problem.visible.fill_(432)
    with recording(run=True) as launches:
        problem.paged(432)
    plan = budget.budgets()[f"index_scores_{kind}_{'bf16' if dtype == torch.bfloat16 else 'f32'}"]
    assert launches[0].measured is not None
    for name in ("ub", "l1", "l0a", "l0b", "l0c"):
        planned, touched = getattr(plan, name), launches[0].measured.highest[name.upper()]
        assert planned * 0.98 - 256 <= touched <= planned, (name, planned, touched)


def test_more_tiles_than_cores_and_rows_that_see_nothing(order: str) -> None:
    problem = _problem(150, 4, 32)
    problem.visible[::3] = 0
    problem.visible[40:90] = 0
    assert compare(problem.paged(432), problem.expected(432), index_ops.SCORES).failures == []


def test_queries_and_keys_of_other_formats_are_scored_as_float32() -> None:
    gen = torch.Generator().manual_seed(5)
    weights, starts, ends = torch.randn(3, 8, generator=gen), torch.zeros(3).int(), torch.tensor([70, 0, 31]).int()
    plain = torch.randn(3, 8, 64, generator=gen)
    for q in (plain.bfloat16(), quantize.reference(plain, "mxfp8")):
        for k in (torch.randn(70, 64, generator=gen).bfloat16(), quantised(gen, 70, 64, fmt="mxfp4")):
            got = scores.index_logits_ragged(q, k, weights, starts, ends)
            want = index_ops.index_logits_ragged.reference(q, k, weights, starts, ends)
            assert compare(got, want, index_ops.SCORES).failures == []


def test_records_that_no_kernel_scores_are_named() -> None:
    problem = _problem(2, 4, 32)
    plain = torch.zeros(2, 4, 32)
    with pytest.raises(OpArgumentError, match="no kernel scores float32 queries against index-32-sectioned records"):
        scores.index_logits_paged(
            plain, problem.cache, problem.weights, problem.visible, problem.table, problem.sequence, 8
        )
    other = PagedCache(torch.zeros(2, 8 * 33, dtype=torch.uint8), CacheFormat("fp8", 32), 8)
    with pytest.raises(OpArgumentError, match="against fp8-32-interleaved records"):
        scores.index_logits_paged(
            problem.q, other, problem.weights, problem.visible, problem.table, problem.sequence, 8
        )


MISTAKES = {
    1: ("if (job.keys) asc_sync_intra_wait(PIPE_V, kDotsReady + turn);", "the vector cores do not wait for products"),
    2: ("asc_sync_intra_wait(PIPE_MTE1, 16 + kScalesReady + turn);", "the Cube does not wait for half of the scales"),
    3: ("if (job.keys) asc_sync_intra_arrive(PIPE_V, kDotsFree + turn);", "products are never said to be used up"),
    4: ("asc_sync_wait(PIPE_MTE1, PIPE_MTE2, turn);\n    load_operands", "operands are overwritten while in use"),
}
"""What is left out where the seed, in the place of a number that paged scores do not use, is this."""


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Program:
    text = (twin_build.KERNELS / "scores.asc").read_text()
    for seed, (right, _) in MISTAKES.items():
        assert text.count(right) == 1, right
        text = text.replace(right, f"if (p.num_blocks != {seed}) {right}")
    path = tmp_path_factory.mktemp("mistaken") / "scores_mistaken.asc"
    path.write_text(text)
    return Program(path)


@pytest.mark.parametrize("seed", MISTAKES)
def test_seeded_mistakes_are_faults(seed: int, mistaken: Program) -> None:
    kernel = mistaken.kernel("index_scores_mxfp4_bf16", scores._SIGNATURE, "mix")
    problem = _problem(200, 4, 32)
    problem.visible.fill_(300)
    q = problem.q
    assert isinstance(q, QTensor)
    out = torch.empty(200, 300)
    with pytest.raises(TwinFault):
        kernel(
            2, q.data, q.scale, problem.cache.data, None, problem.weights, problem.sequence, problem.visible, None,
            problem.table, out, 200, 4, 16, 1, 300, 256, 8, 48, problem.cache.data.stride(0), 9, 9, seed, 0,
        )  # fmt: skip
