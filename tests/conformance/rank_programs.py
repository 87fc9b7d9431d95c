"""What ranks do together in level 5, and what must come of it: each program runs on every rank of a group.

All ranks know what all others pass, so each can say for itself whether it got the right thing. Only "the same on every
rank" needs the others' answers: a check whose name begins with `SAME` carries a digest that is compared afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.conformance.rank_experts import EXPERT_PROGRAMS
from deepinfer.conformance.rank_place import Place, Program, equal, numbers, tag
from deepinfer.conformance.results import Check
from deepinfer.ops.backend import BindContext
from deepinfer.ops.errors import CollectiveError, CollectiveTimeoutError, DeviceError, OpArgumentError
from deepinfer.ops.registry import OpTable
from deepinfer.ops.step import shift

SAME: Final = "same on every rank: "
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOVED: Final = (torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32)
LATE_SECONDS: Final = 3.0
SHORT_TIMEOUT: Final = 1.0


def _sums(at: Place) -> Iterator[Check]:
    for dtype in (*FLOATS, torch.int64, torch.int32):
        parts = [numbers(rank, (5, 7), dtype) for rank in at.ranks]
        mine = at.there(parts[at.group.rank])
        got = at.here(at.group.all_reduce(mine))
        yield _near(f"sum {tag(dtype)}", got, parts)
        yield equal(f"input {tag(dtype)}", at.here(mine), parts[at.group.rank])
    yield equal("scalar", at.here(at.group.all_reduce(at.there(torch.tensor(2.0)))), torch.tensor(2.0 * len(at.ranks)))


def _maxima(at: Place) -> Iterator[Check]:
    for dtype in (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.int8):
        parts = [numbers(rank, (9,), dtype) for rank in at.ranks]
        if dtype.is_floating_point:
            parts[1][2], parts[0][3], parts[-1][4] = torch.nan, torch.inf, -torch.inf
        want = parts[0]
        for part in parts[1:]:
            want = torch.maximum(want, part)
        yield equal(f"max {tag(dtype)}", at.here(at.group.all_reduce(at.there(parts[at.group.rank]), "max")), want)


def _sums_repeat(at: Place) -> Iterator[Check]:
    """Each time another rank comes last, so a sum in the order of arrival shows."""
    for dtype in (torch.float32, torch.bfloat16):
        parts = [numbers(rank, (2000,), dtype) for rank in at.ranks]
        bits = set()
        for turn in range(2 * len(at.ranks)):
            if at.group.rank == turn % len(at.ranks):
                time.sleep(0.03)
            bits.add(_digest(at.here(at.group.all_reduce(at.there(parts[at.group.rank])))))
        yield Check(f"D0 {tag(dtype)}", len(bits) == 1, f"{2 * len(at.ranks)} runs gave {len(bits)} results")
        yield Check(f"{SAME}{tag(dtype)}", True, min(bits))


def _gather(at: Place) -> Iterator[Check]:
    for dtype in MOVED:
        parts = [numbers(rank, (3, 4), dtype) for rank in at.ranks]
        got = at.group.all_gather(at.there(parts[at.group.rank]))
        yield equal(f"rows {tag(dtype)}", at.here(got), torch.cat(parts))
    grids = [numbers(rank, (4, 6), torch.float32) for rank in at.ranks]
    strided = at.there(grids[at.group.rank])[:, 1::2]
    yield equal("strided", at.here(at.group.all_gather(strided)), torch.cat([grid[:, 1::2] for grid in grids]))


def _scatter(at: Place) -> Iterator[Check]:
    size = len(at.ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        parts = [numbers(rank, (2 * size, 3), dtype) for rank in at.ranks]
        shares = [part[2 * at.group.rank : 2 * at.group.rank + 2] for part in parts]
        yield _near(f"sum {tag(dtype)}", at.here(at.group.reduce_scatter(at.there(parts[at.group.rank]))), shares)
    parts = [numbers(rank, (2 * size, 3), torch.float32) for rank in at.ranks]
    largest = torch.stack(parts).amax(0)[2 * at.group.rank : 2 * at.group.rank + 2]
    yield equal("max", at.here(at.group.reduce_scatter(at.there(parts[at.group.rank]), "max")), largest)
    if size > 1:
        yield _refused("rows that do not divide", lambda: at.group.reduce_scatter(at.there(torch.ones(size + 1, 2))))


def _exchange(at: Place) -> Iterator[Check]:
    size, rank = len(at.ranks), at.group.rank
    tables = {
        "uneven splits": [[(3 * source + 5 * target) % 7 for target in at.ranks] for source in at.ranks],
        "zero rows to some": [
            [4 if target == (source + 1) % size else 0 for target in at.ranks] for source in at.ranks
        ],
        "all from one": [[2 + target if source == 0 else 0 for target in at.ranks] for source in at.ranks],
        "no rows at all": [[0] * size] * size,
    }
    for name, splits in tables.items():
        for dtype in (torch.uint8, torch.bfloat16):
            blocks = [[numbers(100 * s + t, (splits[s][t], 5), dtype) for t in at.ranks] for s in at.ranks]
            send, receive = splits[rank], [splits[source][rank] for source in at.ranks]
            got = at.group.all_to_all(at.there(torch.cat(blocks[rank])), send, receive)
            yield equal(f"{name} {tag(dtype)}", at.here(got), torch.cat([blocks[source][rank] for source in at.ranks]))


def _splits_refused(at: Place) -> Iterator[Check]:
    size = len(at.ranks)
    rows, even = at.there(torch.ones(2 * size, 3)), [2] * size
    wrong = {
        "a sum that is not the rows": ([3] + [2] * (size - 1), even),
        "a negative count": ([4] + [2] * (size - 2) + [0] if size > 2 else [5, -1], [-1, *even[1:]]),
        "too few": (even, even[1:]),
    }
    for name, (send, receive) in wrong.items():
        yield _refused(name, lambda send=send, receive=receive: at.group.all_to_all(rows, send, receive))  # type: ignore[misc]
    yield equal("the group goes on", at.here(at.group.all_to_all(rows, even, even)), torch.ones(2 * size, 3))


def _broadcasts(at: Place) -> Iterator[Check]:
    for root in at.ranks:
        for dtype in MOVED:
            parts = [numbers(rank, (2, 3), dtype) for rank in at.ranks]
            got = at.group.broadcast(at.there(parts[at.group.rank]), root)
            yield equal(f"from {root} {tag(dtype)}", at.here(got), parts[root])


def _nothing(at: Place) -> Iterator[Check]:
    rows = at.there(torch.empty(0, 4))
    results = {
        "all_reduce": at.group.all_reduce(rows),
        "all_gather": at.group.all_gather(rows),
        "reduce_scatter": at.group.reduce_scatter(rows),
        "broadcast": at.group.broadcast(rows),
    }
    for name, got in results.items():
        yield Check(name, tuple(got.shape) == (0, 4), f"{name} of no rows has shape {list(got.shape)}")


def _outputs(at: Place) -> Iterator[Check]:
    size, rank = len(at.ranks), at.group.rank
    parts = [torch.full((2, 3), float(r + 1)) for r in at.ranks]
    total = torch.full((2, 3), size * (size + 1) / 2)
    out = at.there(torch.full((2 * size, 3), torch.nan))
    returned = at.group.all_gather(at.there(parts[rank]), out=out)
    yield Check("out is the result", returned is out, "the tensor that came back is not `out`")
    yield equal("out is written", at.here(out), torch.cat(parts))
    mine = at.there(parts[rank])
    at.group.all_reduce(mine, out=mine)
    yield equal("in place", at.here(mine), total)
    rows = 1 << 18  # more than a connection holds: the last rows leave after the first ones have come
    table = at.there(torch.arange(rows * size) + rows * size * rank)
    at.group.all_to_all(table, [rows] * size, [rows] * size, out=table)
    came = [torch.arange(rows) + rows * (size * source + rank) for source in at.ranks]
    yield equal("all_to_all in place", at.here(table), torch.cat(came))
    other = at.there(torch.ones(7, 3))
    yield _refused("out of another shape", lambda: at.group.all_reduce(mine, out=other))


def _with_device_work(at: Place) -> Iterator[Check]:
    """Collectives see the ops before them and are seen by those behind them, on one stream and across two."""
    ops = OpTable(at.backend, BindContext(at.runtime.device, at.runtime), overrides={})
    add, size = ops.bind(shift), len(at.ranks)
    x, want = at.there(torch.tensor([at.group.rank], dtype=torch.int32)), sum(at.ranks)
    x = at.group.all_reduce(x)
    for _ in range(6):
        x, want = at.group.all_reduce(add(x, 1)), size * (want + 1)
    yield equal("on one stream", at.here(x), torch.tensor([want], dtype=torch.int32))
    side, there, back = at.runtime.stream(), at.runtime.event(), at.runtime.event()
    for _ in range(4):
        x = add(x, 1)
        there.record()
        with at.runtime.use_stream(side):
            there.wait()
            y = at.group.all_gather(x)
            back.record()
        back.wait()
        x = add(y, 2)[: x.shape[0]]
        want += 3
    yield equal("across streams", at.here(x), torch.tensor([want], dtype=torch.int32))
    back.record()
    back.synchronize()  # what the side stream used is let go only now


def _subgroups(at: Place) -> Iterator[Check]:
    size, rank = len(at.ranks), at.group.rank
    members = [place for place in at.ranks if place != 1]
    if rank != 1:
        part = at.group.subgroup(members)
        yield Check("rank", part.rank == members.index(rank), f"rank {part.rank} of {members} on rank {rank}")
        yield Check("group", part.group == tuple(at.group.group[m] for m in members), f"group is {part.group}")
        got = at.here(part.all_reduce(at.there(torch.tensor([float(rank)]))))
        yield equal("sum", got, torch.tensor([float(sum(members))]))
        part.close()
    whole = at.here(at.group.all_reduce(at.there(torch.tensor([1]))))
    yield equal("the whole group goes on", whole, torch.tensor([size]))


def _late(at: Place) -> Iterator[Check]:
    """The last rank stays away for longer than the others wait."""
    late = at.ranks[-1]
    at.group.barrier()  # so that nobody else is late
    if at.group.rank == late:
        time.sleep(LATE_SECONDS)
    error, seconds = _failure(at, lambda: at.group.all_reduce(at.there(torch.ones(4)), timeout=SHORT_TIMEOUT))
    if at.group.rank == late:
        yield Check("the late rank does not go on", isinstance(error, DeviceError), f"it got {error!r}")
        return
    right = isinstance(error, CollectiveTimeoutError) and error.rank == at.group.group[late]
    yield Check("names the late rank", right, f"got {error!r}, not a CollectiveTimeoutError of rank {late}")
    yield bounded(seconds, SHORT_TIMEOUT)


def _left(at: Place) -> Iterator[Check]:
    """Rank 1 has an error of its own and leaves."""
    at.group.barrier()
    if at.group.rank == 1:
        at.group.close()
        return
    error, seconds = _failure(at, lambda: at.group.all_gather(at.there(torch.ones(2))))
    yield named(error, at.group.group[1])
    yield bounded(seconds, at.group.timeout)
    again, _ = _failure(at, at.group.barrier)
    yield Check("stays broken", isinstance(again, DeviceError), f"a call after the failure got {again!r}")


def _disagree(at: Place) -> Iterator[Check]:
    """Rank 0 sends rank 1 more rows than rank 1 expects."""
    size, rank = len(at.ranks), at.group.rank
    send = [1, 3, *[1] * (size - 2)] if rank == 0 else [1] * size
    rows = at.there(torch.ones(sum(send), 2))

    def call() -> None:
        at.group.all_to_all(rows, send, [1] * size, timeout=3.0)
        at.group.barrier(timeout=3.0)

    error, _ = _failure(at, call)
    typed = isinstance(error, OpArgumentError | DeviceError)
    yield Check("nobody goes on as if it fitted", typed, f"rank {rank} got {error!r}")


PROGRAMS: Final[Mapping[str, Program]] = {
    "all_reduce sums every dtype": _sums,
    "all_reduce takes maxima, and NaN": _maxima,
    "sums have the same bits whoever comes last": _sums_repeat,
    "all_gather keeps the order of ranks": _gather,
    "reduce_scatter gives each rank its rows": _scatter,
    "all_to_all with uneven splits and zero rows": _exchange,
    "wrong splits are refused": _splits_refused,
    "broadcast from every root": _broadcasts,
    "no rows": _nothing,
    "results go where out says": _outputs,
    "collectives stand in the order of streams": _with_device_work,
    "a subgroup is a group of its own": _subgroups,
    "splits that do not fit end in an error": _disagree,
    **EXPERT_PROGRAMS,
    "a late rank is named": _late,
    "a rank that leaves is named": _left,
}
"""Programs that end with every rank alive, by the name of their case."""
FOR_SEVERAL: Final = frozenset(
    {
        "all_reduce takes maxima, and NaN",
        "splits that do not fit end in an error",
        "a late rank is named",
        "a rank that leaves is named",
    }
)
"""Those that a group of one cannot run."""


def named(error: BaseException | None, rank: int) -> Check:
    """Whether a failure says which rank it was."""
    right = isinstance(error, CollectiveError) and error.rank == rank
    return Check("names the rank", right, f"got {error!r}, not a CollectiveError of rank {rank}")


def bounded(seconds: float, timeout: float) -> Check:
    """Whether a failure came in time; five seconds of grace are for slow machines."""
    return Check("in time", seconds <= timeout + 5.0, f"{seconds:.1f} s, with a timeout of {timeout:g} s")


def failure_of(call: Callable[[], object]) -> tuple[BaseException | None, float]:
    """What a call raised, and after how many seconds."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # which one is the question
        return error, time.monotonic() - began
    return None, time.monotonic() - began


def _failure(at: Place, call: Callable[[], object]) -> tuple[BaseException | None, float]:
    """As `failure_of`, with what comes when the host waits."""

    def both() -> None:
        call()
        at.runtime.synchronize()

    return failure_of(both)


def _refused(name: str, call: Callable[[], object]) -> Check:
    error, _ = failure_of(call)
    return Check(name, isinstance(error, OpArgumentError), f"got {error!r}, not an OpArgumentError at the call")


def _near(name: str, got: Tensor, parts: Sequence[Tensor]) -> Check:
    """Whether a sum is right up to roundings: one per addition, of the sum of magnitudes."""
    want = torch.stack([part.double() for part in parts]).sum(0)
    if not got.dtype.is_floating_point:
        return equal(name, got.double(), want)
    allowed = len(parts) * torch.finfo(got.dtype).eps * torch.stack([part.double().abs() for part in parts]).sum(0)
    if got.shape != want.shape or got.dtype != parts[0].dtype:
        return Check(
            name,
            False,
            f"{tag(got.dtype)} {list(got.shape)}, not {tag(parts[0].dtype)} {list(want.shape)}",
        )
    off = (got.double() - want).abs() - allowed
    return Check(name, bool((off <= 0).all()), f"off by {off.max().item():.3g} more than roundings allow")


def _digest(tensor: Tensor) -> str:
    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def settle_same(checks: Sequence[Sequence[Check]]) -> list[Check]:
    """The checks of all ranks as one list: names carry the rank, and `SAME` checks are compared."""
    settled = [
        Check(f"rank {rank}: {check.name}", check.ok, check.detail)
        for rank, own in enumerate(checks)
        for check in own
        if not check.name.startswith(SAME)
    ]
    shared: dict[str, set[Any]] = {}
    for own in checks:
        for check in own:
            if check.name.startswith(SAME):
                shared.setdefault(check.name, set()).add(check.detail)
    return settled + [Check(name, len(bits) == 1, f"{len(bits)} results") for name, bits in shared.items()]
