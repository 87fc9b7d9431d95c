"""Several ranks in one process: a thread each, which meet in a store that lives in memory.

For unit tests and software devices. Real ranks are processes (`deepinfer.conformance.rank_process`): only a process can
die.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import HashStore

from deepinfer.ops.collectives import Communicator, Rendezvous
from deepinfer.ops.runtime import Runtime

Program = Callable[[Runtime, Communicator], Any]


def run_ranks(runtimes: Sequence[Runtime], program: Program, *, timeout: float = 10.0) -> list[Any]:
    """Run a program once per runtime, each in a thread of its own, all joined in one group.

    Args:
        runtimes: one per rank.
        program: called with its rank's runtime and communicator, which is closed when it returns.
        timeout: seconds that collectives wait.

    Returns:
        What each rank returned, or the exception that it raised, in rank order.
    """
    store = HashStore()
    outcomes: list[Any] = [None] * len(runtimes)

    def body(rank: int, runtime: Runtime) -> None:
        try:
            communicator = runtime.communicator(Rendezvous(rank, len(runtimes), store, timeout))
            try:
                outcomes[rank] = program(runtime, communicator)
                runtime.synchronize()
            finally:
                communicator.close()
        except Exception as error:  # it is this rank's outcome
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=pair, name=f"rank-{pair[0]}") for pair in enumerate(runtimes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
