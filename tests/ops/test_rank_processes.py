"""Ranks that a launcher starts: they meet through its environment, and a death is seen by the survivor alone."""

import os
import signal
import socket
import subprocess
import sys

PROGRAM = """
import os, signal, sys
import torch
from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.errors import RankLostError
from deepinfer.ops.host import HostRuntime

group = HostRuntime().communicator(Rendezvous.from_environment(timeout=20.0))
total = group.all_reduce(torch.tensor([group.rank + 1]))
print(group.rank, group.world_size, total.item(), flush=True)
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.barrier()
except RankLostError as error:
    print(error.rank, error.op, error.seconds < 20.0, flush=True)
    group.close()
    sys.exit(7)
"""


def test_pa_2_ranks_meet_through_the_environment_and_the_survivor_names_the_dead_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = []
    for rank in range(2):
        names = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in names.items()}
        command = [sys.executable, "-c", PROGRAM]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [7, -signal.SIGKILL]
    assert outputs == [["0 2 3", "1 barrier True"], ["1 2 3"]]
