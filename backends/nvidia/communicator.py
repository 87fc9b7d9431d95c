"""Collectives between GPUs: NCCL behind the communicator of `deepinfer.ops.process_groups`."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.process_groups import GroupCommunicator


def join(device: torch.device, rendezvous: Rendezvous) -> Communicator:
    """This rank's end of an NCCL group over the ranks of a rendezvous.

    Raises:
        CollectiveTimeoutError: a rank did not come in time; it is named.
    """
    from torch.distributed import ProcessGroupNCCL

    def nccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroup:
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        made = ProcessGroupNCCL(store, rank, world_size, options)
        return cast("ProcessGroup", made)

    def settle() -> None:
        torch.cuda.current_stream(device).synchronize()

    assert rendezvous.store is not None  # a rendezvous of several ranks has one
    store = PrefixStore(rendezvous.name, rendezvous.store)
    group = tuple(range(rendezvous.world_size))
    return GroupCommunicator(device, store, group, rendezvous.rank, rendezvous.timeout, nccl, settle, capturable=True)
