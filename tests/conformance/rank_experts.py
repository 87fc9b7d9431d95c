"""Experts divided among ranks, in level 5: dispatch and combine must have the bits of one rank with all tokens.

What every rank passes is drawn from seeds, so each rank knows the whole: what its experts must get is a stretch of what
the reference dispatches on one rank, and what comes back is held to the backend's own combine on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.conformance.rank_place import Place, Program, equal, numbers, tag
from deepinfer.conformance.results import Check
from deepinfer.ops.backend import BindContext
from deepinfer.ops.expert_ranks import ExpertRanks
from deepinfer.ops.formats import QTensor
from deepinfer.ops.moe import DispatchHandle, ep_combine, ep_dispatch
from deepinfer.ops.quant import quantize
from deepinfer.ops.registry import BoundOp, OpTable
from deepinfer.ops.trees import map_tensors, tensors_of

KINDS: Final = ("bf16", "mxfp8")
HIDDEN: Final = 64
CHOICES: Final = 3
EACH: Final = 3
"""Experts of a rank."""
EVEN_ROWS: Final = 6


@dataclass(frozen=True)
class Tokens:
    """What all ranks dispatch, in rank order, and what one rank would make of it.

    Attributes:
        counts: tokens of each rank.
        x: [T, HIDDEN] of all ranks, on the host; plain rows hold a NaN and an Inf.
        expert_ids: [T, CHOICES].
        weights: [T, CHOICES].
    """

    counts: tuple[int, ...]
    x: Tensor | QTensor
    expert_ids: Tensor
    weights: Tensor

    @property
    def num_experts(self) -> int:
        """Over all ranks."""
        return EACH * len(self.counts)

    def own(self, rank: int) -> slice:
        """The rows of a rank."""
        return slice(sum(self.counts[:rank]), sum(self.counts[: rank + 1]))

    def on_one_rank(self) -> tuple[Tensor | QTensor, Tensor, Tensor, DispatchHandle]:
        """What the reference dispatches."""
        return ep_dispatch(self.x, self.expert_ids, self.weights, self.num_experts)

    def stretch(self, rank: int) -> slice:
        """Where the rows of a rank's experts stand among those of all."""
        ends = [0, *self.on_one_rank()[2].tolist()]
        return slice(ends[rank * EACH], ends[(rank + 1) * EACH])


def draw(kind: str, counts: Sequence[int], routing: str = "spread", seed: int = 0) -> Tokens:
    """Tokens of all ranks.

    Args:
        kind: "bf16" or "mxfp8" rows.
        counts: how many each rank has.
        routing: "spread" over all experts, "one" for all to the last expert, "holes" for choices of -1 and a token
            without any.
        seed: of everything.
    """
    total, experts = sum(counts), EACH * len(counts)
    x = numbers(seed, (total, HIDDEN), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(total, experts, generator=generator).argsort(1)[:, :CHOICES].contiguous()
    if routing == "one":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = experts - 1
    elif routing == "holes":
        ids[::2, 1] = -1
        ids[::3] = -1
    if kind == "bf16" and total > 1:
        x[0, 1], x[1, 2] = torch.nan, torch.inf
    rows = x.bfloat16() if kind == "bf16" else quantize(x, "mxfp8")
    return Tokens(tuple(counts), rows, ids, torch.rand(total, CHOICES, generator=generator) + 0.1)


def _uneven(at: Place) -> dict[str, tuple[list[int], str]]:
    """Numbers of tokens and routing, by what is special about them."""
    size = len(at.ranks)
    return {
        "uneven": ([5 + 3 * rank % 4 for rank in at.ranks], "spread"),
        "a rank without tokens": ([0, *range(3, size + 2)], "spread"),
        "one expert takes all": ([4 + rank for rank in at.ranks], "one"),
        "choices of nobody": ([7 - rank for rank in at.ranks], "holes"),
        "no tokens at all": ([0] * size, "spread"),
    }


def _even(at: Place) -> dict[str, tuple[list[int], str]]:
    size = len(at.ranks)
    return {
        "as many as may be": ([EVEN_ROWS] * size, "spread"),
        "fewer": ([2] * size, "spread"),
        "one expert takes all": ([4] * size, "one"),
        "choices of nobody": ([5] * size, "holes"),
        "one row": ([1] * size, "spread"),
    }


@dataclass(frozen=True)
class Ranks:
    """Dispatch and combine over the ranks of a case, and combine on one."""

    dispatch: BoundOp[Any, Any]
    combine: BoundOp[Any, Any]
    combine_on_one: BoundOp[Any, Any]

    @staticmethod
    def of(at: Place, even_rows: int) -> Ranks:
        """Bound on this rank."""
        context = BindContext(at.runtime.device, at.runtime, expert_ranks=ExpertRanks(at.group, even_rows))
        table = OpTable(at.backend, context, overrides={})
        combined = {"hidden": HIDDEN, "k": CHOICES}
        return Ranks(
            table.bind(ep_dispatch, experts=EACH * len(at.ranks), k=CHOICES),
            table.bind(ep_combine, **combined),
            table.bind_here(ep_combine, **combined),
        )


def _own(at: Place, tokens: Tokens) -> tuple[Tensor | QTensor, Tensor, Tensor, int]:
    """The arguments of this rank's dispatch."""
    own = tokens.own(at.group.rank)
    mine = map_tensors((tokens.x, tokens.expert_ids, tokens.weights), lambda whole: at.there(whole[own]))
    return (*mine, tokens.num_experts)


def _dispatched(at: Place, name: str, tokens: Tokens, got: Any) -> Iterator[Check]:
    """Whether the experts of this rank have the rows they would have on one rank."""
    rows, weights, psum, _ = tokens.on_one_rank()
    stretch = tokens.stretch(at.group.rank)
    ends = psum[at.group.rank * EACH : (at.group.rank + 1) * EACH] - stretch.start
    yield equal(f"{name}: ends", at.here(got[2]), ends)
    count = stretch.stop - stretch.start
    for part, mine, want in zip(("rows", "scales"), tensors_of(got[0]), tensors_of(rows), strict=False):
        yield equal(f"{name}: {part}", at.here(mine)[:count], want[stretch])
    yield equal(f"{name}: weights", at.here(got[1])[:count], weights[stretch])


def _combined(at: Place, ranks: Ranks, name: str, tokens: Tokens, got: Any) -> Iterator[Check]:
    """Whether results come home with the bits that one rank gives them; what nobody asked for is NaN."""
    _, _, psum, handle = tokens.on_one_rank()
    own, stretch = tokens.own(at.group.rank), tokens.stretch(at.group.rank)
    num_rows, room = int(psum[-1]), tensors_of(got[0])[0].shape[0]
    for dtype, out_dtype, has_bias in (
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float32, torch.float32, False),
    ):
        y = numbers(7, (sum(tokens.counts) * CHOICES, HIDDEN), dtype)
        y[: min(num_rows, 1), 3] = torch.nan
        bias = numbers(8, (sum(tokens.counts), HIDDEN), dtype) if has_bias else None
        mine = torch.full((room, HIDDEN), torch.nan, dtype=dtype)
        mine[: stretch.stop - stretch.start] = y[stretch]
        own_bias = None if bias is None else at.there(bias[own])
        came = at.here(ranks.combine(at.there(mine), got[3], own_bias, out_dtype))
        arguments = map_tensors((y, handle, bias), at.there)
        want = at.here(ranks.combine_on_one(*arguments, out_dtype))
        yield equal(f"{name} {tag(dtype)}", came, want[own])


def _dispatch(at: Place) -> Iterator[Check]:
    ranks = Ranks.of(at, even_rows=0)
    for kind in KINDS:
        for name, (counts, routing) in _uneven(at).items():
            tokens = draw(kind, counts, routing)
            yield from _dispatched(at, f"{name}, {kind}", tokens, ranks.dispatch(*_own(at, tokens)))


def _combine(at: Place) -> Iterator[Check]:
    ranks = Ranks.of(at, even_rows=0)
    for name, (counts, routing) in _uneven(at).items():
        tokens = draw("bf16", counts, routing)
        yield from _combined(at, ranks, name, tokens, ranks.dispatch(*_own(at, tokens)))


def _without_host(at: Place) -> Iterator[Check]:
    """The host waits for nothing in steps with the same rows everywhere; longer ones, and no rows, are counted."""
    ranks = Ranks.of(at, even_rows=EVEN_ROWS)
    for kind in KINDS:
        for name, (counts, routing) in _even(at).items():
            tokens = draw(kind, counts, routing)
            arguments = _own(at, tokens)
            waits = at.runtime.sync_guard.permitted.total()
            with at.runtime.sync_guard.forbid("an even step"):
                got = ranks.dispatch(*arguments)
            waits = at.runtime.sync_guard.permitted.total() - waits
            yield Check(f"{name}, {kind}: waits", not waits, f"the host waited {waits} time(s)")
            yield from _dispatched(at, f"{name}, {kind}", tokens, got)
            yield from _combined(at, ranks, f"{name}, {kind}", tokens, got)
        longer = draw(kind, [0 if rank == 1 else EVEN_ROWS + 1 + rank for rank in at.ranks])
        got = ranks.dispatch(*_own(at, longer))
        yield from _dispatched(at, f"longer, {kind}", longer, got)
        yield from _combined(at, ranks, f"longer, {kind}", longer, got)


def _captured(at: Place) -> Iterator[Check]:
    """Where collectives can be captured an exchange can; elsewhere it must not say so."""
    counted, ranks = Ranks.of(at, even_rows=0), Ranks.of(at, even_rows=EVEN_ROWS)
    for name, op in (("dispatch", counted.dispatch), ("combine", counted.combine)):
        yield Check(f"a counted {name} is in no graph", not op.capturable, "it waits for the host, but says not")
    can = at.group.capturable and at.runtime.capabilities.graphs
    for name, op in (("dispatch", ranks.dispatch), ("combine", ranks.combine)):
        yield Check(f"an even {name} promises no more than its group", can or not op.capturable, "it is capturable")
    if not (can and ranks.dispatch.capturable and ranks.combine.capturable):
        return
    counts = [EVEN_ROWS] * len(at.ranks)
    first, second = (draw("mxfp8", counts, "holes", seed) for seed in (1, 2))
    arguments = _own(at, first)
    y = at.there(numbers(9 + at.group.rank, (sum(counts) * CHOICES, HIDDEN), torch.bfloat16))
    results: list[Any] = []

    def step() -> None:
        got = ranks.dispatch(*arguments)
        results.append((got, ranks.combine(y, got[3], None, torch.bfloat16)))

    step()
    replay = at.runtime.capture(step)
    for target, source in zip(tensors_of(arguments), tensors_of(_own(at, second)), strict=True):
        at.runtime.write(target, at.here(source))
    step()
    replay()
    yield from _dispatched(at, "replayed", second, results[1][0])
    yield equal("replayed sums", at.here(results[1][1]), at.here(results[2][1]))
    at.runtime.synchronize()
    del replay


EXPERT_PROGRAMS: Final[Mapping[str, Program]] = {
    "experts: dispatch over ranks is that of one rank": _dispatch,
    "experts: combine over ranks has the bits of one rank": _combine,
    "experts: steps with the same rows everywhere need no host": _without_host,
    "experts: such a step is captured where collectives are": _captured,
}
"""Programs of ranks that divide experts, by the name of their case."""
