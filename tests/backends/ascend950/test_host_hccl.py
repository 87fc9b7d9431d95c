"""Ranks over HCCL: a stand-in for torch_npu makes gloo groups; joining, options and sums are those of the real path."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.errors import CollectiveTimeoutError


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """Timeouts of the groups made."""
    timeouts: list[timedelta] = []

    class ProcessGroupHCCL:
        class Options:
            _timeout = timedelta(seconds=1800)

        def __new__(cls, store: Any, rank: int, world_size: int, options: Options) -> Any:
            timeouts.append(options._timeout)
            return ProcessGroupGloo(store, rank, world_size, options._timeout)

    groups = SimpleNamespace(ProcessGroupHCCL=ProcessGroupHCCL)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")  # what the import changes is undone after the test
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=groups)))
    return timeouts


def test_ranks_join_and_add_in_rank_order(made: list[timedelta], runtime, fake_acl) -> None:
    store, results = HashStore(), {}

    def rank(place: int) -> None:
        comm = runtime.communicator(Rendezvous(rank=place, world_size=2, store=store, timeout=20.0))
        results[place] = comm.all_reduce(torch.tensor([1.0, float(place)])), comm.capturable
        comm.barrier()
        comm.close()

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [(sums.tolist(), capturable) for sums, capturable in results.values()] == [([2.0, 1.0], True)] * 2
    assert made == [timedelta(seconds=20)] * 2
    assert fake_acl.log().count("aclrtSynchronizeStream") == 2  # a barrier waits for the device


def test_a_rank_that_does_not_come_is_named(made: list[timedelta], runtime) -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
        runtime.communicator(Rendezvous(rank=0, world_size=2, store=HashStore(), timeout=0.2))


def test_one_rank_needs_no_library(runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert runtime.communicator(None).world_size == 1
