"""Collectives between Ascend devices: HCCL behind the communicator of `deepinfer.ops.process_groups`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from deepinfer.backends.ascend950.host.torch_device import import_torch_npu
from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.process_groups import GroupCommunicator


def join(device: torch.device, rendezvous: Rendezvous, settle: Callable[[], object]) -> Communicator:
    """This rank's end of an HCCL group over the ranks of a rendezvous.

    Args:
        device: this rank's.
        rendezvous: of more than one rank.
        settle: blocks the host until the current stream is done.

    Raises:
        CollectiveTimeoutError: a rank did not come in time; it is named.
    """
    groups = import_torch_npu()._C._distributed_c10d

    def hccl(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroup:
        options = groups.ProcessGroupHCCL.Options()
        options._timeout = timeout
        made = groups.ProcessGroupHCCL(store, rank, world_size, options)
        return cast("ProcessGroup", made)

    assert rendezvous.store is not None  # a rendezvous of several ranks has one
    store = PrefixStore(rendezvous.name, rendezvous.store)
    group = tuple(range(rendezvous.world_size))
    return GroupCommunicator(device, store, group, rendezvous.rank, rendezvous.timeout, hccl, settle, capturable=True)
