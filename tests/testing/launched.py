"""Ranks as processes of a program, with the environment that a launcher such as torchrun gives them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def launch_ranks(program: str, *arguments: str, count: int = 2, timeout: float) -> tuple[list[int], list[str]]:
    """Run a Python program once per rank, side by side, and wait for all of them.

    Args:
        program: its text; `Rendezvous.from_environment` finds the other ranks.
        arguments: of every rank, from `sys.argv[1]` on.
        count: ranks.
        timeout: seconds for each to end once the one before it has.

    Returns:
        Exit statuses and standard outputs, in rank order.
    """
    started = []
    with socket.socket() as kept:
        # Bound and not listening: rank 0 can have the port, and the system gives it to nobody else meanwhile.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        for rank in range(count):
            names = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in names.items()}
            command = [sys.executable, "-c", program, *arguments]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=timeout)[0] for process in started]
    return [process.returncode for process in started], outputs
