"""Batches made ahead by worker processes, in the order of their steps."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult
from pathlib import Path

import numpy as np
import torch

from deepinfer.core.tokenizer import Tokenizer
from tools.train_tiny.data import Batch, BatchMaker
from tools.train_tiny.settings import Plan

_AHEAD = 4
"""Batches that each worker may be ahead."""

_maker: BatchMaker | None = None


def batches(folder: Path, plan: Plan, first: int, workers: int) -> Iterator[tuple[int, Batch]]:
    """(step, batch) from step `first` to the end of the plan; without workers they are made here.

    Args:
        folder: holds the run's tokenizer.
        plan: of the run.
        first: step to begin with.
        workers: processes.
    """
    if workers == 0:
        maker = BatchMaker(Tokenizer.from_dir(folder), plan)
        yield from ((step, maker(step)) for step in range(first, plan.steps))
        return
    # Spawned, not forked: the parent may have begun to use its accelerator and its threads.
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_begin, initargs=(folder, plan)) as pool:
        waiting: deque[tuple[int, AsyncResult[list[np.ndarray]]]] = deque()
        for step in range(first, plan.steps):
            waiting.append((step, pool.apply_async(_make, (step,))))
            if len(waiting) > workers * _AHEAD:
                done, result = waiting.popleft()
                yield done, _batch(result.get())
        for done, result in waiting:
            yield done, _batch(result.get())


def _begin(folder: Path, plan: Plan) -> None:
    global _maker
    _maker = BatchMaker(Tokenizer.from_dir(folder), plan)


def _make(step: int) -> list[np.ndarray]:
    """Arrays, as tensors would travel through shared memory, of which a container may have little."""
    assert _maker is not None, "the pool's initializer ran"
    return [tensor.numpy() for tensor in vars(_maker(step)).values()]


def _batch(arrays: list[np.ndarray]) -> Batch:
    return Batch(*map(torch.from_numpy, arrays))
