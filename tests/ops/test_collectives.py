"""Collectives over host memory: values, order of sums, shapes, splits, failures and who is named."""

import json
import socket
import threading
import time

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.defaults import RuntimeDefaults
from deepinfer.ops.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    DeviceError,
    OpArgumentError,
    RankLostError,
)
from deepinfer.ops.exchange import HostCommunicator, Verdict
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.reductions import reduce_in_rank_order
from deepinfer.testing.ranks import run_ranks


def ranks(world_size, program, **options):
    return run_ranks([HostRuntime() for _ in range(world_size)], lambda _, group: program(group), **options)


def together(world_size, program, **options):
    """What each rank got; its error if it has one."""
    outcomes = ranks(world_size, program, **options)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def numbers(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    scale = torch.randint(-12, 8, shape, generator=generator).float().exp2()  # so that the order of additions shows
    return (torch.randn(shape, generator=generator) * scale * 100).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_of_every_collective(world_size):
    def program(group):
        rank = group.rank
        mine = torch.arange(6).reshape(3, 2) + 100 * rank
        rows = torch.arange(2 * world_size).reshape(-1, 1) + 1000 * rank
        return (
            group.all_reduce(mine).tolist(),
            group.all_reduce(mine, "max").tolist(),
            group.all_gather(mine).tolist(),
            group.reduce_scatter(rows).tolist(),
            group.broadcast(mine, world_size - 1).tolist(),
            group.barrier(),
        )

    every = [torch.arange(6).reshape(3, 2) + 100 * rank for rank in range(world_size)]
    rows = sum(torch.arange(2 * world_size).reshape(-1, 1) + 1000 * rank for rank in range(world_size))
    for rank, got in enumerate(together(world_size, program)):
        assert got == (
            sum(every).tolist(),
            every[-1].tolist(),
            torch.cat(every).tolist(),
            rows[2 * rank : 2 * rank + 2].tolist(),
            every[-1].tolist(),
            None,
        )


SPLITS = [[0, 3, 1], [2, 0, 0], [4, 0, 5]]
"""Row s, column r: rows that s sends to r; nothing at all from 1 to two of three."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_uneven_all_to_all_moves_rows_of_every_dtype(dtype):
    def rows(source, target):
        count = SPLITS[source][target]
        return (torch.arange(count * 2).reshape(count, 2) + 10 * source + 3 * target).to(dtype)

    def program(group):
        sent = torch.cat([rows(group.rank, r) for r in range(3)])
        return group.all_to_all(sent, SPLITS[group.rank], [row[group.rank] for row in SPLITS])

    for rank, got in enumerate(together(3, program)):
        want = torch.cat([rows(s, rank) for s in range(3)])
        assert got.dtype == dtype
        assert got.view(torch.uint8).tolist() == want.view(torch.uint8).tolist()


def test_zero_rows_everywhere():
    def program(group):
        nothing = torch.empty(0, 5)
        return [
            tuple(group.all_to_all(nothing, [0, 0], [0, 0]).shape),
            tuple(group.all_gather(nothing).shape),
            tuple(group.reduce_scatter(nothing).shape),
            tuple(group.all_reduce(nothing).shape),
            tuple(group.broadcast(nothing).shape),
        ]

    assert together(2, program) == [[(0, 5)] * 5] * 2


def test_a_scalar_is_reduced_and_strided_inputs_are_read_by_their_strides():
    def program(group):
        grid = torch.arange(12).reshape(3, 4) * (group.rank + 1)
        return (
            group.all_reduce(torch.tensor(group.rank + 1.0)).item(),
            group.all_gather(grid.T).tolist(),
            group.all_reduce(grid[:, 1::2]).tolist(),
            group.broadcast(torch.tensor([7]).expand(3), 1).tolist(),
        )

    grid = torch.arange(12).reshape(3, 4)
    want = (3.0, torch.cat([grid.T, 2 * grid.T]).tolist(), (3 * grid[:, 1::2]).tolist(), [7, 7, 7])
    assert together(2, program) == [want, want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_made_in_rank_order_and_rounded_once(dtype):
    parts = [numbers(rank, 999, dtype=dtype) for rank in range(4)]
    wide = parts[0].float()
    for part in parts[1:]:
        wide = wide + part.float()
    backwards = ((parts[3].float() + parts[2].float()) + parts[1].float()) + parts[0].float()
    assert not torch.equal(wide, backwards)  # the order shows
    for got in together(4, lambda group: group.all_reduce(parts[group.rank])):
        assert torch.equal(got, wide.to(dtype))


def test_reduce_scatter_equals_its_share_of_all_reduce():
    def program(group):
        mine = numbers(group.rank, 6, 5)
        return torch.equal(group.reduce_scatter(mine), group.all_reduce(mine)[2 * group.rank : 2 * group.rank + 2])

    assert together(3, program) == [True] * 3


def test_max_lets_nan_through_and_takes_the_larger_zero_of_integers():
    a, b = torch.tensor([1.0, torch.nan, -torch.inf]), torch.tensor([2.0, 5.0, -torch.inf])
    for parts in ([a, b], [b, a]):
        got = reduce_in_rank_order(parts, "max")
        assert got[0] == 2 and got[1].isnan() and got[2] == -torch.inf
    assert a[0] == 1  # inputs are left alone


def test_out_is_written_and_may_be_the_input():
    def program(group):
        mine = torch.full((2, 2), float(group.rank + 1))
        out = torch.empty(4, 2)
        assert group.all_gather(mine, out=out) is out
        assert group.all_reduce(mine, out=mine) is mine
        assert group.broadcast(mine, out=mine) is mine
        return out.tolist(), mine.tolist()

    want = ([[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2, [[3.0, 3.0]] * 2)
    assert together(2, program) == [want, want]


def test_all_to_all_in_place_sends_what_was_there_before():
    """Messages too big for a connection's buffers: the last rows leave after the first ones have arrived."""
    rows = 1 << 20

    def program(group):
        data = torch.arange(3 * rows) + 10 * rows * group.rank
        want = group.all_to_all(data, [rows] * 3, [rows] * 3)
        assert group.all_to_all(data, [rows] * 3, [rows] * 3, out=data) is data
        return int((data != want).sum())

    assert together(3, program) == [0, 0, 0]


REFUSED = {
    "reduction": (lambda g: g.all_reduce(torch.ones(2), "mean"), "reduction 'mean'; there are sum, max"),
    "dtype": (lambda g: g.all_reduce(torch.ones(2, dtype=torch.bool)), "sum of torch.bool"),
    "bytes": (lambda g: g.all_reduce(torch.ones(2, dtype=torch.uint8)), "sum of torch.uint8"),
    "scalar": (lambda g: g.all_gather(torch.tensor(1)), "all_gather of a scalar"),
    "rows": (lambda g: g.reduce_scatter(torch.ones(3, 2)), "3 rows among 2 ranks"),
    "root": (lambda g: g.broadcast(torch.ones(2), 2), "broadcast from rank 2; ranks run from 0 to 1"),
    "sum of splits": (lambda g: g.all_to_all(torch.ones(3), [1, 1], [1, 1]), "add up to 2, the tensor has 3 rows"),
    "negative split": (lambda g: g.all_to_all(torch.ones(3), [4, -1], [1, 1]), r"send_splits is \[4, -1\]"),
    "number of splits": (lambda g: g.all_to_all(torch.ones(3), [2, 1], [3]), r"recv_splits is \[3\]; it takes 2"),
    "own split": (lambda g: g.all_to_all(torch.ones(3), [1, 2], [2, 1]), "sends itself [12] rows and expects [12]"),
    "out shape": (lambda g: g.all_gather(torch.ones(1, 2), out=torch.ones(1, 2)), r"the result is .* \[2, 2\]"),
    "out dtype": (lambda g: g.all_reduce(torch.ones(2), out=torch.ones(2).int()), "out is torch.int32"),
    "out strides": (lambda g: g.all_reduce(torch.ones(2), out=torch.ones(4)[::2]), "out is strided"),
    "device": (lambda g: g.all_reduce(torch.ones(2, device="meta")), "takes tensors of the host"),
    "subgroup": (lambda g: g.subgroup([1, 0]), r"subgroup \[1, 0\]"),
    "subgroup without me": (lambda g: g.subgroup([1 - g.rank]), "the caller's among them"),
}


def test_wrong_arguments_are_refused_and_do_not_harm_the_group():
    def program(group):
        for call, text in REFUSED.values():
            with pytest.raises(OpArgumentError, match=text):
                call(group)
        return group.all_reduce(torch.tensor([1])).item()

    assert together(2, program) == [2, 2]


DISAGREEMENTS = {
    "ops": lambda g: g.all_gather(torch.ones(2)) if g.rank else g.all_reduce(torch.ones(2)),
    "shapes": lambda g: g.all_reduce(torch.ones(2 + g.rank)),
    "dtypes": lambda g: g.all_reduce(torch.ones(2, dtype=[torch.float32, torch.float64][g.rank])),
    "reductions": lambda g: g.all_reduce(torch.ones(2), ["sum", "max"][g.rank]),
    "splits": lambda g: g.all_to_all(torch.ones(5 - g.rank), [2, 2] if g.rank else [2, 3], [2, 2]),
    "roots": lambda g: g.broadcast(torch.ones(2), g.rank),
    "number of calls": lambda g: [g.barrier() for _ in range(1 + g.rank)] and g.all_reduce(torch.ones(2)),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_so(what):
    outcomes = ranks(2, lambda group: [DISAGREEMENTS[what](group), group.barrier()], timeout=20)
    for outcome in outcomes:
        assert isinstance(outcome, OpArgumentError), outcomes
        assert "sends" in str(outcome) and "expects" in str(outcome)


def test_a_rank_that_leaves_is_named_at_once_by_all():
    def program(group):
        group.barrier()
        if group.rank == 1:
            raise KeyError("something else went wrong")
        group.all_reduce(torch.ones(2))

    began = time.monotonic()
    outcomes = ranks(3, program, timeout=30)
    assert time.monotonic() - began < 15  # the timeout did not have to pass
    assert isinstance(outcomes[1], KeyError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, RankLostError)
        assert (outcome.rank, outcome.op) == (1, "all_reduce sum")


def test_those_who_follow_from_a_failure_name_its_cause():
    """Rank 0 needs only rank 1, which leaves because of rank 2."""

    def program(group):
        pair = group.subgroup([0, 1]) if group.rank < 2 else None
        if group.rank == 2:
            return None
        if group.rank == 1:
            group.all_reduce(torch.ones(2))  # rank 2 has gone
        return group.broadcast(torch.ones(2), 1) if pair is None else group.all_reduce(torch.ones(2))

    outcomes = ranks(3, program, timeout=5)
    assert [getattr(outcome, "rank", None) for outcome in outcomes] == [2, 2, None]


def test_a_late_rank_is_named_when_the_time_is_over():
    given_up = threading.Semaphore(0)

    def program(group):
        group.barrier()
        if group.rank == 2:
            assert all(given_up.acquire(timeout=60) for _ in range(2))  # late, however long the others take
        try:
            group.all_gather(torch.ones(2), timeout=1.0)
        finally:
            given_up.release()

    outcomes = ranks(3, program, timeout=20)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, CollectiveTimeoutError)
        assert (outcome.rank, outcome.op) == (2, "all_gather")
        assert outcome.seconds >= 1.0
        assert "rank 2 did not take part in time" in str(outcome)
    assert isinstance(outcomes[2], CollectiveError)
    assert outcomes[2].rank == 2  # it is told that it was the late one


def test_after_an_error_the_group_is_of_no_use_and_says_why():
    def program(group):
        group.barrier()
        if group.rank == 0:
            return None
        with pytest.raises(RankLostError) as first:
            group.barrier()
        with pytest.raises(RankLostError) as again:
            group.all_reduce(torch.ones(1))
        return again.value is first.value

    assert ranks(2, program) == [None, True]


def test_a_subgroup_is_a_group_of_its_own_and_names_ranks_of_the_job():
    def program(group):
        if group.rank == 1:
            return None
        half = group.subgroup([0, 2])
        again = half.subgroup([0, 1])
        total = half.all_reduce(torch.tensor([group.rank])).item()
        alone = group.subgroup([group.rank])
        assert alone.all_gather(torch.tensor([5])).tolist() == [5]
        if group.rank == 2:
            again.close()
            return half.rank, half.group, total
        with pytest.raises(RankLostError) as caught:
            again.barrier()
        assert caught.value.rank == 2
        return half.rank, half.group, total

    assert together(3, program) == [(0, (0, 2), 2), None, (1, (0, 2), 2)]


def test_one_ranks_failure_does_not_touch_another_group():
    def program(group):
        other = group.subgroup([0, 1])
        if group.rank == 1:
            other.close()
        else:
            with pytest.raises(RankLostError):
                other.barrier()
        return group.all_reduce(torch.tensor([1])).item()

    assert together(2, program) == [2, 2]


def test_an_abort_tells_the_others_its_reason():
    def program(group):
        group.barrier()
        if group.rank == 1:
            group.abort(Verdict("failed", 1, "ran out of luck"))
            group.barrier()
        group.barrier()

    for outcome in ranks(2, program):
        assert type(outcome) is CollectiveError
        assert outcome.rank == 1
        assert "rank 1 ran out of luck" in str(outcome)


def test_a_closed_communicator_says_so_and_closes_twice():
    group = HostRuntime().communicator()
    group.close()
    group.close()
    with pytest.raises(DeviceError, match="was closed"):
        group.barrier()


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(CollectiveTimeoutError, match="join: rank 0 did not come") as caught:
        HostRuntime().communicator(Rendezvous(1, 2, HashStore(), timeout=0.2))
    assert (caught.value.rank, caught.value.op) == (0, "join")


def test_a_stranger_that_connects_and_says_nothing_does_not_hold_up_the_group(monkeypatch):
    monkeypatch.setattr("deepinfer.ops.sockets._HELLO_SECONDS", 1.0)  # the second rank's too, on a busy machine
    store, outcomes = HashStore(), [None, None]

    def rank(place):
        group = HostRuntime().communicator(Rendezvous(place, 2, store, 20.0))
        outcomes[place] = group.all_reduce(torch.tensor([place + 1])).item()
        group.close()

    first, second = (threading.Thread(target=rank, args=(place,)) for place in range(2))
    first.start()
    cards = PrefixStore("deepinfer", store)
    cards.wait(["here/0"])
    with socket.create_connection(json.loads(cards.get("here/0"))["address"]):
        second.start()
        first.join()
        second.join()
    assert outcomes == [3, 3]


def test_big_messages_pass_in_both_directions_at_once():
    def program(group):
        mine = numbers(group.rank, 1 << 20)
        return group.all_gather(mine)

    want = torch.cat([numbers(rank, 1 << 20) for rank in range(2)])
    assert all(torch.equal(got, want) for got in together(2, program))


def test_a_group_of_one_is_the_identity_and_makes_new_tensors():
    group = HostRuntime().communicator()
    assert isinstance(group, Communicator)
    x = torch.tensor([[1.0, 2.0]])
    results = (
        group.all_reduce(x),
        group.all_gather(x),
        group.reduce_scatter(x),
        group.all_to_all(x, [1], [1]),
        group.broadcast(x),
    )
    for got in results:
        assert torch.equal(got, x)
        assert got.data_ptr() != x.data_ptr()
    assert isinstance(group.subgroup([0]), HostCommunicator)


def test_a_runtime_without_ranks_refuses_more_than_one():
    runtime = RuntimeDefaults()
    assert runtime.communicator(Rendezvous()).world_size == 1
    with pytest.raises(NotImplementedError, match=r"capabilities\.collectives is False"):
        runtime.communicator(Rendezvous(0, 2, HashStore()))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 of 2; ranks run from 0 to 1"),
        ({"rank": -1}, "rank -1 of 1"),
        ({"world_size": 2}, "need a store"),
        ({"timeout": 0.0}, "must be a finite number above 0"),
        ({"timeout": float("inf")}, "must be a finite number above 0"),
    ],
)
def test_a_rendezvous_checks_itself(fields, text):
    with pytest.raises(OpArgumentError, match=text):
        Rendezvous(**fields)


def test_a_half_set_environment_names_what_is_missing(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Rendezvous.from_environment().world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(OpArgumentError, match="RANK, MASTER_PORT not"):
        Rendezvous.from_environment()
