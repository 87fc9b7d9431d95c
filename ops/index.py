"""Choosing positions: window slots, index scores, candidate blocks, exact top-k, and logical positions to slots.

Source: the lightning indexer and candidate pool of DeepSeek-V4.1-Flash (model specification, section 6.6).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.cases import choosing, lists
from deepinfer.ops.contract import Rules
from deepinfer.ops.formats import PagedCache, QTensor, QuantFormat
from deepinfer.ops.numeric import plain, round_like
from deepinfer.ops.quant import quantize, read_records
from deepinfer.ops.results import New, int32_like, nothing, plain_or_codes, rows_like
from deepinfer.ops.rope import rope
from deepinfer.ops.spec import EXACT, Tolerance, define_op
from deepinfer.ops.touches import at_records, at_rows

SCORES = Tolerance(
    2**-7, 1e-5, sim=1e-5, single=(1e-4, 1e-4), why="fp32 dot products in another order, bf16 rounding points"
)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=lists.build_swa_index_cases,
    dims={"window": "window"},
    results=lambda new, a: new((a.positions.shape[0], a.window), torch.int32),
)
def build_swa_index(
    positions: Tensor,
    row_to_seq: Tensor,
    window_tables: Tensor,
    window_first_page: Tensor,
    window_page: int,
    window: int,
) -> Tensor:
    """Slots of the sliding window of each row, oldest first.

    Args:
        positions: [T] int32.
        row_to_seq: [T] int32.
        window_tables: [S, P] int32 page ids; column c holds page `window_first_page + c` of the sequence.
        window_first_page: [S] int32.
        window_page: tokens per page.
        window: positions a row sees, itself included.

    Returns:
        [T, window] int32: column c is position `t - window + 1 + c`; -1 before the sequence's start and where the page
        is a hole (page 0).
    """
    offset = torch.arange(window, device=positions.device)
    position = positions.long()[:, None] - (window - 1) + offset
    seq = row_to_seq.long()[:, None]
    column = position.clamp(min=0) // window_page - window_first_page.long()[seq]
    held = (position >= 0) & (column >= 0) & (column < window_tables.shape[1])
    page = window_tables[seq, column.clamp(0, max(window_tables.shape[1] - 1, 0))].long()
    slot = page * window_page + position % window_page
    return torch.where(held & (page > 0), slot, -1).int()


@define_op(
    mutates=("indices",),
    tolerance=EXACT,
    determinism="D2",
    cases=choosing.clip_window_cases,
    results=nothing,
)
def clip_window(indices: Tensor, positions: Tensor, row_to_seq: Tensor, starts: Tensor) -> None:
    """Hide from each row's window the positions before its sequence's start, in place.

    Args:
        indices: [T, window] int32 from `build_swa_index`: column c is position `t - window + 1 + c`. What stands for a
            position below the start becomes -1.
        positions: [T] int32.
        row_to_seq: [T] int32.
        starts: [S] int32, the first visible position of each sequence; 0 hides nothing.

    Source: bounded replay of DeepSeek-V4.1-Flash (model specification, section 9).
    """
    if indices.shape[0] == 0:
        return
    window = indices.shape[1]
    offset = torch.arange(window, device=indices.device)
    position = positions.long()[:, None] - (window - 1) + offset
    hidden = position < starts.long()[row_to_seq.long()][:, None]
    indices.masked_fill_(hidden, -1)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=lists.build_dense_index_cases,
    results=lambda new, a: new((a.visible_lens.shape[0], a.num_columns), torch.int32),
)
def build_dense_index(visible_lens: Tensor, num_columns: int) -> Tensor:
    """Every visible compressed position of each row: 0, 1, ... then -1.

    Args:
        visible_lens: [T] int32.
        num_columns: width of the result.

    Returns:
        [T, num_columns] int32.
    """
    column = torch.arange(num_columns, device=visible_lens.device, dtype=torch.int32)
    return torch.where(column < visible_lens[:, None], column, -1).int()


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=lists.concat_index_cases,
    results=lambda new, a: new((a.first.shape[0], a.first.shape[1] + a.second.shape[1]), torch.int32),
)
def concat_index(first: Tensor, second: Tensor) -> Tensor:
    """Two index lists side by side.

    Args:
        first: [T, A] int32.
        second: [T, B] int32.

    Returns:
        [T, A + B] int32.
    """
    return torch.cat((first, second), dim=1)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=lists.visible_lens_cases,
    results=int32_like("positions"),
)
def visible_lens(positions: Tensor, ratio: int) -> Tensor:
    """Compressed entries that exist for each row: `(position + 1) // ratio`.

    Args:
        positions: [T] int32.
        ratio: tokens per entry.

    Returns:
        [T] int32.
    """
    return ((positions + 1) // ratio).int()


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=lists.uniform_lens_cases,
    results=lambda new, a: new((a.like.shape[0],), torch.int32),
)
def uniform_lens(like: Tensor, value: int) -> Tensor:
    """The same length for every row of `like`.

    Args:
        like: [T, ...] of any dtype; only its shape is read.
        value: the length.

    Returns:
        [T] int32.
    """
    return torch.full((like.shape[0],), value, dtype=torch.int32, device=like.device)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=lists.concat_rows_cases,
    results=lambda new, a: rows_like(new, a.parts[0], sum(p.shape[0] for p in a.parts)),
)
def concat_rows(parts: tuple[Tensor, ...]) -> Tensor:
    """Rows of several [Ti, N] tensors of one dtype below each other: [sum Ti, N]."""
    return torch.cat(parts)


@define_op(
    mutates=("indices",),
    tolerance=EXACT,
    determinism="D2",
    cases=choosing.logical_to_slot_cases,
    results=nothing,
)
def logical_to_slot(indices: Tensor, block_size: int, block_table: Tensor, row_to_seq: Tensor) -> None:
    """Turn positions within a sequence into physical cache slots, in place.

    Args:
        indices: [T, topk] int32. A position on entry, its slot on return; -1 stays -1.
        block_size: records per block of the cache these indices address.
        block_table: [S, max_blocks] int32.
        row_to_seq: [T] int32, the sequence of each row.

    Source: the block tables of PagedAttention (arXiv:2309.06180, section 4).
    """
    position = indices.clamp(min=0).long()
    column = (position // block_size).clamp(max=max(block_table.shape[1] - 1, 0))
    block_id = block_table[row_to_seq.long()].gather(1, column).long()
    slot = block_id * block_size + position % block_size
    indices.copy_(torch.where(indices >= 0, slot, -1))


@define_op(
    tolerance=Tolerance(2**-7, 1e-6, off_by_one=1e-3, single=(1e-5, 1e-6), why="rope, one rounding, then exact codes"),
    determinism="D2",
    cases=choosing.index_q_quant_cases,
    dims={"heads": "q:1", "dim": "q:2", "fmt": "fmt|f32"},
    touches={"cos_sin": at_rows("positions")},
    results=plain_or_codes("q"),
)
def index_q_quant(q: Tensor, positions: Tensor, cos_sin: Tensor, fmt: QuantFormat | None) -> Tensor | QTensor:
    """Rotate the index heads and quantise them like index keys.

    Args:
        q: [T, heads, D].
        positions: [T] int32.
        cos_sin: [P, Dr] float32.
        fmt: "mxfp4", or None where the cache keeps float32 records.

    Returns:
        Quantised [T, heads, D], or the rotated tensor.
    """
    turned = rope(q, positions, cos_sin)
    return turned if fmt is None else quantize(turned, fmt)


def _scores(q: Tensor, keys: Tensor, weights: Tensor, activation: torch.dtype) -> Tensor:
    """Scores [T, n] of q [T, heads, D] against keys [T, n, D] with the rounding points of the activation dtype."""
    dots = round_like(torch.einsum("thd,tnd->thn", q, keys), activation)
    gated = round_like(dots.relu() * weights.to(dots.dtype)[..., None], activation)
    return round_like(gated.sum(1), activation)


def _slots(index: Tensor, cache: PagedCache, block_table: Tensor, row_to_seq: Tensor) -> Tensor:
    """Slots of compressed positions [T, n] in each row's sequence; -1 stays -1."""
    slots = index.clone()
    logical_to_slot(slots, cache.records, block_table, row_to_seq)
    return slots


def _candidates(visible: Tensor, blocks: Tensor, candidate_block: int) -> Tensor:
    """[T, B * candidate_block] int32 visible positions of candidate blocks, -1 elsewhere."""
    offset = torch.arange(candidate_block, device=blocks.device)
    position = (blocks.long()[..., None] * candidate_block + offset).flatten(1)
    valid = (blocks >= 0).repeat_interleave(candidate_block, 1) & (position < visible.long()[:, None])
    return torch.where(valid, position, -1).int()


def _visible_slots(a: Any) -> Tensor:
    return _slots(build_dense_index(a.visible, a.num_columns), a.cache, a.block_table, a.row_to_seq)


def _candidate_slots(a: Any) -> Tensor:
    return _slots(_candidates(a.visible, a.blocks, a.candidate_block), a.cache, a.block_table, a.row_to_seq)


@define_op(
    tolerance=SCORES,
    determinism="D2",
    cases=choosing.index_logits_ragged_cases,
    dims={"heads": "q:1", "dim": "q:2", "fmt": "q|f32"},
)
def index_logits_ragged(
    q: Tensor | QTensor, k: Tensor | QTensor, weights: Tensor, starts: Tensor, ends: Tensor
) -> Tensor:
    """Index scores against dense keys: `sum_h weights_h * relu(q_h . k_j)`.

    Args:
        q: [T, heads, D], plain or quantised.
        k: [S, D], plain or quantised.
        weights: [T, heads] bfloat16 or float32; bfloat16 asks for the model's rounding points (dot, product, sum).
        starts: [T] int32, first key of each row.
        ends: [T] int32, one past its last key.

    Returns:
        [T, max(ends - starts)] float32: column c is key `starts + c`; -inf beyond the row's last key.
    """
    wide = torch.float64 if weights.dtype == torch.float64 else torch.float32
    num_columns = max(int((ends - starts).max()), 0) if len(starts) else 0
    column = torch.arange(k.shape[0], device=weights.device)  # a row's sums must not depend on the widest row
    index = starts.long()[:, None] + column
    valid = index < ends.long()[:, None]
    keys = plain(k, wide)
    picked = keys[index.clamp(max=max(len(keys) - 1, 0))] if len(keys) else keys.new_zeros(*index.shape, keys.shape[-1])
    scores = _scores(plain(q, wide), picked, weights, weights.dtype)
    return scores.masked_fill(~valid, -torch.inf).to(wide)[:, :num_columns].clone()


@define_op(
    tolerance=SCORES,
    determinism="D2",
    cases=choosing.index_logits_paged_cases,
    dims={"heads": "q:1", "dim": "q:2", "fmt": "q|f32"},
    touches={"cache": at_records(_visible_slots)},
    results=lambda new, a: new((a.q.shape[0], a.num_columns), torch.float32),
)
def index_logits_paged(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    block_table: Tensor,
    row_to_seq: Tensor,
    num_columns: int,
) -> Tensor:
    """Index scores against every visible stored key of the row's sequence.

    Args:
        q: [T, heads, D], plain or quantised.
        cache: [slots, D] index key records.
        weights: [T, heads]; bfloat16 asks for the model's rounding points.
        visible: [T] int32, keys each row may see; at most `num_columns`.
        block_table: [S, max_blocks] int32.
        row_to_seq: [T] int32.
        num_columns: width of the result.

    Returns:
        [T, num_columns] float32; column j is compressed position j, -inf from `visible` on.
    """
    return _stored_scores(q, cache, weights, build_dense_index(visible, num_columns), block_table, row_to_seq)


@define_op(
    tolerance=SCORES,
    determinism="D2",
    cases=choosing.index_logits_blocks_cases,
    dims={"heads": "q:1", "dim": "q:2", "fmt": "q|f32", "block": "candidate_block"},
    touches={"cache": at_records(_candidate_slots)},
    results=lambda new, a: new((a.q.shape[0], a.blocks.shape[1] * a.candidate_block), torch.float32),
)
def index_logits_blocks(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    visible: Tensor,
    blocks: Tensor,
    candidate_block: int,
    block_table: Tensor,
    row_to_seq: Tensor,
) -> Tensor:
    """Index scores of candidate blocks only, packed in block order; equal bits to `index_logits_paged` there.

    Args:
        q: [T, heads, D], plain or quantised.
        cache: [slots, D] index key records.
        weights: [T, heads].
        visible: [T] int32.
        blocks: [T, B] int32 ascending candidate block numbers, -1 for none.
        candidate_block: positions per candidate block.
        block_table: [S, max_blocks] int32.
        row_to_seq: [T] int32.

    Returns:
        [T, B * candidate_block] float32; -inf where the block is -1 or the position is not visible.
    """
    index = _candidates(visible, blocks, candidate_block)
    return _stored_scores(q, cache, weights, index, block_table, row_to_seq)


def _stored_scores(
    q: Tensor | QTensor,
    cache: PagedCache,
    weights: Tensor,
    index: Tensor,
    block_table: Tensor,
    row_to_seq: Tensor,
) -> Tensor:
    wide = torch.float64 if weights.dtype == torch.float64 else torch.float32
    slots = _slots(index, cache, block_table, row_to_seq)
    keys = read_records(cache, slots.clamp(min=0), wide)
    scores = _scores(plain(q, wide), keys, weights, weights.dtype)
    return scores.masked_fill(slots < 0, -torch.inf).to(wide)


def _block_scores(new: New, a: Any) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = a.logits.shape
    return new((num_rows, -(-num_columns // a.block)), torch.float32), new((num_rows,), torch.int32)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=choosing.block_max_cases,
    dims={"block": "block"},
    rules=Rules(nan="counts as -inf"),
    results=_block_scores,
)
def block_max(logits: Tensor, lens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Best score of each candidate block; the block with the newest visible entry is forced in.

    Args:
        logits: [T, C] float32.
        lens: [T] int32, valid columns.
        block: columns per candidate block.

    Returns:
        scores [T, ceil(C / block)] float32: +inf for the last block with a valid column, the maximum for those before
        (a maximum of -inf or NaN becomes the lowest finite float32), -inf after; and the number of blocks with a valid
        column, [T] int32.
    """
    num_rows, num_columns = logits.shape
    num_blocks = -(-num_columns // block)
    column = torch.arange(num_columns, device=logits.device)
    masked = torch.where(column < lens[:, None], logits, -torch.inf)
    padded = torch.nn.functional.pad(masked, (0, num_blocks * block - num_columns), value=-torch.inf)
    best = padded.reshape(num_rows, num_blocks, block)
    best = torch.where(best.isnan(), -torch.inf, best).amax(-1).clamp(min=torch.finfo(torch.float32).min)
    valid_blocks = -(-lens.long() // block)
    number = torch.arange(num_blocks, device=logits.device)
    best = torch.where(number == valid_blocks[:, None] - 1, torch.inf, best)
    return torch.where(number < valid_blocks[:, None], best, -torch.inf).float(), valid_blocks.int()


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=choosing.topk_select_cases,
    dims={"k": "k"},
    rules=Rules(nan="counts as -inf"),
    results=lambda new, a: new((a.x.shape[0], a.k), torch.int32),
)
def topk_select(x: Tensor, k: int, lens: Tensor) -> Tensor:
    """Exact top-k of the first `lens` columns of each row; ties go to the smaller index; NaN counts as -inf.

    Columns that hold -inf are unreachable and are not selected.

    Args:
        x: [T, C] float32 or bfloat16.
        k: how many.
        lens: [T] int32, columns that take part.

    Returns:
        [T, k] int32, ascending, -1 behind the last.
    """
    num_columns = x.shape[1]
    column = torch.arange(num_columns, device=x.device)
    value = torch.where(x.isnan() | (column >= lens[:, None]), -torch.inf, x.float())
    width = min(k, num_columns)
    order = torch.sort(value, dim=1, descending=True, stable=True)
    chosen = torch.where(order.values > -torch.inf, order.indices, num_columns)[:, :width].sort(1).values
    chosen = torch.where(chosen < num_columns, chosen, -1).int()
    return torch.nn.functional.pad(chosen, (0, k - width), value=-1)


@define_op(
    tolerance=EXACT,
    determinism="D2",
    cases=choosing.blocks_to_positions_cases,
    dims={"block": "block"},
    results=int32_like("indices"),
)
def blocks_to_positions(indices: Tensor, blocks: Tensor, block: int) -> Tensor:
    """Columns of packed candidate scores back to compressed positions.

    Args:
        indices: [T, k] int32 columns of `index_logits_blocks`, -1 for none.
        blocks: [T, B] int32 candidate blocks.
        block: positions per candidate block.

    Returns:
        [T, k] int32; -1 stays -1. Ascending when `indices` and `blocks` are.
    """
    column = indices.clamp(min=0).long()
    position = blocks.long().gather(1, column // block) * block + column % block
    return torch.where(indices >= 0, position, -1).int()
