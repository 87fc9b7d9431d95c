"""Ranks as processes, for level 5: this module starts them, and is what they run.

`python -m deepinfer.conformance.rank_process` is one rank. It meets the others in a store that the suite holds, so that
the store outlives every rank, and writes a line of JSON per case; what it did not live to write is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepinfer.conformance.rank_place import Place
from deepinfer.conformance.rank_programs import PROGRAMS, bounded, failure_of, named
from deepinfer.conformance.results import Check
from deepinfer.conformance.subject import open_runtime
from deepinfer.ops.backend import Backend
from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.errors import CollectiveTimeoutError
from deepinfer.ops.registry import find_backend
from deepinfer.ops.runtime import Runtime

TIMEOUT = 10.0
"""Seconds that ranks of the suite wait for one another."""
LIFETIME = 300.0
"""Seconds after which the suite ends processes that are still there."""
JOIN_TIMEOUT = 2.0
RANKS = 3
"""Of the suite: with fewer, not every case can be run."""
STEPS = 3
ABSENT = "a rank that never comes is named"
KILLED_WAITED_FOR = "a rank that is killed while others wait is named by all"
KILLED = "PA-2 a rank that is killed is named by the survivor"
ENDINGS = (ABSENT, KILLED_WAITED_FOR, KILLED)
"""Cases that come last, in this order: there are fewer ranks after each."""
VICTIMS = {KILLED_WAITED_FOR: 1, KILLED: 2}
"""Which process dies in a case."""


@dataclass
class RankRun:
    """What became of one rank.

    Attributes:
        status: exit status, negative for a signal; None if it had to be ended.
        checks: by case; a case that it did not finish is missing.
        errors: what it wrote to its error stream.
    """

    status: int | None
    checks: dict[str, list[Check]] = field(default_factory=dict)
    errors: str = ""


def run_processes(backend: str, cases: Sequence[str], ranks: int = RANKS) -> list[RankRun]:
    """Run cases on so many processes, one after the other.

    Args:
        backend: name of an installed one.
        cases: names out of `PROGRAMS`, then out of `ENDINGS` in their order.
        ranks: how many processes.

    Returns:
        One run per process.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            task = json.dumps([backend, rank, ranks, store.port, str(_lines(folder, rank)), list(cases)])
            command = [sys.executable, "-m", "deepinfer.conformance.rank_process", task]
            with _errors(folder, rank).open("w") as errors:
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
                started.append(subprocess.Popen(command, env=environment, stdout=errors, stderr=errors))
        ends = time.monotonic() + LIFETIME
        return [_finish(process, folder, rank, ends) for rank, process in enumerate(started)]


def _finish(process: subprocess.Popen[bytes], folder: str, rank: int, ends: float) -> RankRun:
    try:
        status: int | None = process.wait(max(ends - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = None
    run = RankRun(status, errors=_errors(folder, rank).read_text(errors="replace"))
    if _lines(folder, rank).exists():
        for line in _lines(folder, rank).read_text(encoding="utf-8").splitlines():
            case, checks = json.loads(line)
            run.checks[case] = [Check(**check) for check in checks]
    return run


def _lines(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.jsonl"


def _errors(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.txt"


def _between_steps(at: Place) -> Iterator[Check]:
    """One of two dies without a word while the other goes on with its steps."""
    import torch

    for _ in range(STEPS):
        at.here(at.group.all_reduce(at.there(torch.ones(8))))
    if at.group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from _survive(at)


def _while_waited_for(at: Place) -> Iterator[Check]:
    """Rank 1 dies when the others have waited for it for a while; then they leave each other, too."""
    at.group.barrier()
    if at.group.rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    yield from _survive(at)


def _survive(at: Place) -> Iterator[Check]:
    import torch

    def steps() -> None:
        for _ in range(STEPS):
            at.here(at.group.all_reduce(at.there(torch.ones(8))))

    error, seconds = failure_of(steps)
    yield named(error, 1)
    yield bounded(seconds, at.group.timeout)


def _join_without_one(runtime: Runtime, here: Rendezvous) -> Iterator[Check]:
    """Wait for one rank more than there are."""
    missing = here.world_size
    assert here.store is not None  # where ranks meet
    here.store.set(f"{here.name}/{here.rank}", b"1")  # so that a late end of the case before does not count here
    here.store.wait([f"{here.name}/{other}" for other in range(missing)])
    rendezvous = replace(here, world_size=missing + 1, timeout=JOIN_TIMEOUT)
    error, seconds = failure_of(lambda: runtime.communicator(rendezvous))
    right = isinstance(error, CollectiveTimeoutError) and error.rank == missing
    yield Check("names the absent rank", right, f"got {error!r}, not a CollectiveTimeoutError of rank {missing}")
    yield bounded(seconds, rendezvous.timeout)


_OWN = {KILLED: _between_steps, KILLED_WAITED_FOR: _while_waited_for}


def _run(case: str, backend: Backend, runtime: Runtime, rendezvous: Rendezvous) -> list[Check]:
    checks: list[Check] = []
    try:
        if case == ABSENT:
            return list(_join_without_one(runtime, rendezvous))
        if case == KILLED:  # rank 1 may be gone, and two are enough
            if rendezvous.rank not in (0, VICTIMS[KILLED]):
                return []
            rendezvous = replace(rendezvous, rank=rendezvous.rank // 2, world_size=2)
        group = runtime.communicator(rendezvous)
        try:
            for check in (_OWN.get(case) or PROGRAMS[case])(Place(backend, runtime, group)):
                checks.append(check)
        finally:
            group.close()
    except Exception as error:  # whatever a backend raises, the report must say it
        checks.append(Check("runs", False, f"{type(error).__name__}: {error}"))
    return checks


def main(task: str) -> None:
    """One rank: run the cases, each in a group of its own, and write what came of them."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    name, rank, ranks, port, path, cases = json.loads(task)
    store: Any = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIFETIME))
    backend = find_backend(name)
    runtime = open_runtime(backend)
    store.set(f"up/{rank}", b"1")  # so that slow starts do not count against a case
    store.wait([f"up/{other}" for other in range(ranks)])
    with Path(path).open("w", encoding="utf-8") as out:
        for number, case in enumerate(cases):
            checks = _run(case, backend, runtime, Rendezvous(rank, ranks, store, TIMEOUT, f"case-{number}"))
            out.write(json.dumps([case, [asdict(check) for check in checks]]) + "\n")
            out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
