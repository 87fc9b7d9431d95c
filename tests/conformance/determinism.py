"""D0, D1 and D2, proven by running: repeats, other batches, other chunks; always bit against bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from deepinfer.conformance.batches import CHUNKS, STATE, Arguments, RowBatch, Rows, Variant, batch_of
from deepinfer.conformance.results import Check
from deepinfer.conformance.values import first_difference, plain_leaves, same_bits
from deepinfer.ops.spec import Case, OpSpec

Run = Callable[[Arguments], Any]
Fresh = Callable[[], Arguments]
MAX_ROWS = 96


def check_repeat(op: OpSpec[..., Any], run: Run, fresh: Fresh, define: Callable[[Arguments, Any], Any]) -> Check:
    """D0: equal inputs, equal bits."""
    seen = []
    for _ in range(2):
        args = fresh()
        result = define(args, run(args))
        rows = dict(plain_leaves(result, "result"))
        rows |= {name + path: leaf for name in op.mutates for path, leaf in plain_leaves(args[name])}
        seen.append({path: leaf.clone() for path, leaf in rows.items()})
    return _compare("D0", "a repeat", seen[1], seen[0])


def check_batches(op: OpSpec[..., Any], case: Case, run: Run, fresh: Fresh, seed: int) -> Iterator[Check]:
    """D1 (and D2 where the op promises it): each row keeps its bits in every other batch."""
    if op.determinism == "D0":
        return
    batch = batch_of(op, case)
    if batch is None:
        return
    args = fresh()
    base = _kept(batch.canonical(args, run(args)))
    if batch.count(args) > MAX_ROWS:
        return
    for variants in _d1(batch, seed):
        yield from _outcomes("D1", base, variants, run, fresh)
    for size in CHUNKS if op.determinism == "D2" else (2, 7):
        level = op.determinism
        yield from _outcomes(level, base, partial(_chunked, batch, size), run, fresh)
        if size >= batch.count(args):
            break


def _chunked(batch: RowBatch, size: int, args: Arguments) -> list[Variant]:
    return [batch.chunked(args, size)]


def _d1(batch: RowBatch, seed: int) -> Iterator[Callable[[Arguments], list[Variant]]]:
    def permuted(args: Arguments) -> list[Variant]:
        return [batch.permuted(args, torch.Generator().manual_seed(seed))]

    yield permuted
    for index in range(2):

        def padded(args: Arguments, index: int = index) -> list[Variant]:
            return list(batch.padded(args, torch.Generator().manual_seed(seed)))[index : index + 1]

        yield padded


def _outcomes(
    level: str, base: Rows, variants: Callable[[Arguments], list[Variant]], run: Run, fresh: Fresh
) -> Iterator[Check]:
    for variant in variants(fresh()):
        rows = []
        for part in variant.parts:
            args = part.make()
            rows.append(_kept(part.restore(args, run(args))))
        if rows:
            yield _compare(level, variant.name, variant.join(rows), base)


def _kept(rows: Rows) -> Rows:
    """Rows with caches cut in parts and everything copied, since later calls may write in place."""
    kept: Rows = {}
    for path, value in rows.items():
        for leaf, tensor in plain_leaves(value, path):
            kept[leaf] = tensor.clone()
    return kept


def _compare(level: str, what: str, got: Rows, want: Rows) -> Check:
    if got.keys() != want.keys():
        return Check(level, False, f"{what}: results {sorted(got)} against {sorted(want)}")
    for path, tensor in want.items():
        if not same_bits(got[path], tensor):
            name = path.removeprefix(STATE)
            return Check(level, False, f"{what}: bits of {name} change: {first_difference(got[path], tensor)}")
    return Check(level, True, what)
