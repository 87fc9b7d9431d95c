"""The communicator over process groups: order of sums, shapes, any dtype, who failed; over gloo, on the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo, Store

from deepinfer.ops.errors import CollectiveError, CollectiveTimeoutError, DeviceError, OpArgumentError, RankLostError
from deepinfer.ops.process_groups import GroupCommunicator

CPU = torch.device("cpu")


def _gloo(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroup:
    return ProcessGroupGloo(store, rank, world_size, timeout)


def _together(world_size: int, work: Callable[[GroupCommunicator], Any], timeout: float = 20.0) -> list[Any]:
    """`work` on every rank of a group, each in a thread; what it returned or raised."""
    store, results = HashStore(), [None] * world_size
    connected = threading.Barrier(world_size, timeout=60)

    def rank(place: int) -> None:
        try:
            comm = GroupCommunicator(CPU, store, range(world_size), place, timeout, _gloo)
            connected.wait()  # gloo fails where a rank leaves while another is still connecting to it
            results[place] = work(comm)
            comm.close()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_sums_are_in_rank_order_with_one_rounding() -> None:
    def parts(rank: int) -> torch.Tensor:
        return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)

    want = ((parts(0).float() + parts(1).float()) + parts(2).float()).to(torch.bfloat16)
    for got in _together(3, lambda comm: comm.all_reduce(parts(comm.rank))):
        assert torch.equal(got, want)


def test_reduce_scatter_keeps_the_rows_of_its_rank() -> None:
    def part(rank: int) -> torch.Tensor:
        return torch.arange(6, dtype=torch.int64).reshape(6, 1) * 10**rank

    results = _together(2, lambda comm: comm.reduce_scatter(part(comm.rank)))
    assert torch.equal(results[0], torch.tensor([[0], [11], [22]]))
    assert torch.equal(results[1], torch.tensor([[33], [44], [55]]))


def test_moves_take_every_dtype_and_no_rows() -> None:
    def work(comm: GroupCommunicator) -> Any:
        codes = torch.full((2, 2), comm.rank + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
        empty = torch.zeros(0, 4)
        root = torch.tensor([comm.rank == 1, True])
        return comm.all_gather(codes).view(torch.uint8), comm.all_gather(empty), comm.broadcast(root, 1)

    for codes, empty, root in _together(2, work):
        assert codes.tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]
        assert empty.shape == (0, 4)
        assert root.tolist() == [True, True]


def test_all_to_all_with_uneven_and_empty_splits() -> None:
    sends = {0: [1, 2], 1: [0, 1]}

    def work(comm: GroupCommunicator) -> torch.Tensor:
        rows = torch.arange(sum(sends[comm.rank]))[:, None].int() + 10 * comm.rank
        return comm.all_to_all(rows, sends[comm.rank], [sends[0][comm.rank], sends[1][comm.rank]])

    results = _together(2, work)
    assert results[0].tolist() == [[0]]
    assert results[1].tolist() == [[1], [2], [10]]


def test_all_to_all_in_place_sends_what_was_there_before() -> None:
    rows = 1 << 18

    def work(comm: GroupCommunicator) -> int:
        data = torch.arange(2 * rows) + 10 * rows * comm.rank
        want = comm.all_to_all(data, [rows] * 2, [rows] * 2)
        assert comm.all_to_all(data, [rows] * 2, [rows] * 2, out=data) is data
        return int((data != want).sum())

    assert _together(2, work) == [0, 0]


def test_results_go_where_the_caller_says() -> None:
    def work(comm: GroupCommunicator) -> bool:
        out = torch.empty(2)
        return comm.all_reduce(torch.ones(2), "max", out=out) is out and out.tolist() == [1.0, 1.0]

    assert _together(2, work) == [True, True]


def test_a_subgroup_counts_its_own_ranks_and_names_them_as_the_job_does() -> None:
    def work(comm: GroupCommunicator) -> Any:
        if comm.rank == 1:
            return None
        sub = comm.subgroup([0, 2])
        gathered = sub.all_gather(torch.tensor([comm.rank]))
        return sub.rank, sub.group, gathered.tolist()

    assert _together(3, work) == [(0, (0, 2), [0, 2]), None, (1, (0, 2), [0, 2])]


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
        GroupCommunicator(CPU, HashStore(), range(2), 0, 0.2, _gloo)


def test_a_rank_that_left_is_named_and_the_group_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.ops.process_groups._REPORT_SECONDS", 0.5)  # who left reports nothing

    def work(comm: GroupCommunicator) -> Any:
        if comm.rank == 1:
            return "left"
        with pytest.raises(RankLostError, match="all_gather: rank 1 is gone"):
            comm.all_gather(torch.ones(2))
        with pytest.raises(RankLostError):
            comm.all_gather(torch.ones(2))
        return "named"

    assert _together(2, work) == ["named", "left"]


def test_a_late_rank_is_named_within_the_timeout_of_the_call() -> None:
    over = threading.Event()

    def work(comm: GroupCommunicator) -> Any:
        if comm.rank == 1:
            over.wait(30)
            return "late"
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="all_reduce: rank 1 did not take part in time"):
            comm.all_reduce(torch.ones(2), timeout=0.3)
        seconds = time.monotonic() - began
        over.set()
        return seconds

    seconds, late = _together(2, work, timeout=60.0)
    assert late == "late"
    assert seconds < 30  # the call's own, and what ranks have for a report; not the group's 60


def test_a_late_rank_that_reports_a_failure_of_its_own_is_named_all_the_same() -> None:
    def work(comm: GroupCommunicator) -> Any:
        if comm.rank == 1:  # as it would where its peers' data went with them: gloo has it and fails nobody
            comm._store.wait(["failed 0"], timedelta(seconds=60))
            comm._store.set("failed 1", str(time.time() + 0.001))
            return None
        comm.all_reduce(torch.ones(2), timeout=0.4)

    error, _ = _together(2, work, timeout=60.0)
    assert isinstance(error, CollectiveTimeoutError) and error.rank == 1, error


def test_who_reports_and_came_in_time_is_not_named_for_one_who_never_came() -> None:
    over = threading.Event()

    def work(comm: GroupCommunicator) -> Any:
        if comm.rank == 1:
            comm._store.set("failed 1", str(time.time()))
        if comm.rank > 0:
            over.wait(60)
            return
        comm._store.wait(["failed 1"], timedelta(seconds=60))
        try:
            comm.all_reduce(torch.ones(2), timeout=0.4)
        finally:
            over.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer.ops.process_groups._REPORT_SECONDS", 0.5)
        error, *_ = _together(3, work, timeout=60.0)
    assert isinstance(error, CollectiveTimeoutError) and error.rank == 2, error


def test_a_collective_in_time_takes_its_timeout_without_harm() -> None:
    def work(comm: GroupCommunicator) -> Any:
        comm.barrier(timeout=20.0)
        return comm.all_gather(torch.tensor([comm.rank]), timeout=20.0).tolist()

    assert _together(2, work) == [[0, 1], [0, 1]]


def test_what_cannot_be_done_is_refused_before_anything_moves() -> None:
    def work(comm: GroupCommunicator) -> bool:
        with pytest.raises(OpArgumentError, match="they do not divide"):
            comm.reduce_scatter(torch.ones(3, 1))
        comm.close()
        with pytest.raises(DeviceError, match="was closed"):
            comm.broadcast(torch.ones(1))
        return True

    assert _together(2, work) == [True, True]


def test_a_barrier_waits_for_the_device_and_a_device_that_fails_there_is_named() -> None:
    waited: list[str] = []
    comm = GroupCommunicator(CPU, HashStore(), [0], 0, 1.0, _gloo, lambda: waited.append("settled"))
    comm.barrier()
    assert waited == ["settled"]

    def fail() -> None:
        raise DeviceError("the device is lost")

    comm = GroupCommunicator(CPU, HashStore(), [3], 0, 1.0, _gloo, fail)
    with pytest.raises(CollectiveError, match="barrier: rank 3"):
        comm.barrier()
