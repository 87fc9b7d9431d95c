"""Ranks that a launcher starts: they meet through its environment, and a death is seen by the survivor alone."""

import signal

from deepinfer.testing.launched import launch_ranks

PROGRAM = """
import os, signal, sys
import torch
from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.errors import RankLostError
from deepinfer.ops.host import HostRuntime

group = HostRuntime().communicator(Rendezvous.from_environment(timeout=60.0))
total = group.all_reduce(torch.tensor([group.rank + 1]))
print(group.rank, group.world_size, total.item(), flush=True)
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.barrier()
except RankLostError as error:
    print(error.rank, error.op, error.seconds < 60.0, flush=True)
    group.close()
    sys.exit(7)
"""


def test_pa_2_ranks_meet_through_the_environment_and_the_survivor_names_the_dead_one() -> None:
    statuses, outputs = launch_ranks(PROGRAM, timeout=120)
    assert statuses == [7, -signal.SIGKILL]
    assert [output.splitlines() for output in outputs] == [["0 2 3", "1 barrier True"], ["1 2 3"]]
