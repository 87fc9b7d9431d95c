"""Steps captured as graphs of the device: one launch instead of ten thousand, which take a host longer than the device.

A step's work is fixed by its phase and the shape of its batch. The first steps of a kind run as they are, so that
everything is compiled and all memory of the optimiser is there; then one is captured and replayed with other batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tools.train_tiny.data import Batch
from tools.train_tiny.settings import Phase

Step = Callable[[Batch, Phase], tuple[Tensor, Tensor]]
"""Trains on a batch on the device; gives values and counts of a report."""

_RUNS_BEFORE_CAPTURE = 2


@dataclass(frozen=True)
class _Captured:
    graph: Any
    batch: Batch
    results: tuple[Tensor, Tensor]


class CapturedSteps:
    """A step that is captured where it can be.

    Args:
        step: what is captured.
        device: where it runs; not a CPU.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step = step
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self._stream)  # for good: rates are set and weights are probed in the order of the steps
        self._pool = torch.cuda.graph_pool_handle()
        self._runs: Counter[Any] = Counter()
        self._captured: dict[Any, _Captured] = {}
        self._refused = False

    def __call__(self, batch: Batch, phase: Phase) -> tuple[Tensor, Tensor]:
        """As the step."""
        key = (phase, batch.ids.shape, batch.anchors.shape)
        if self._refused or self._runs[key] < _RUNS_BEFORE_CAPTURE:
            self._runs[key] += 1
            return self._step(batch, phase)
        if key not in self._captured and not self._capture(key, batch, phase):
            return self._step(batch, phase)
        captured = self._captured[key]
        for field in fields(Batch):
            getattr(captured.batch, field.name).copy_(getattr(batch, field.name))
        captured.graph.replay()
        values, counts = captured.results  # the next replay overwrites them
        return values.clone(), counts.clone()

    def _capture(self, key: Any, batch: Batch, phase: Phase) -> bool:
        if any(old[0] != phase for old in self._captured):  # a phase never comes again, and the next needs the memory
            self._captured.clear()
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
        kept = Batch(*(getattr(batch, field.name).clone() for field in fields(Batch)))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results = self._step(kept, phase)
        except Exception as error:  # whatever part of the step needs the host
            first_line = (str(error).splitlines() or [""])[0]
            print(f"running without captured steps, slower: {type(error).__name__}: {first_line}", flush=True)
            self._refused = True
            return False
        self._captured[key] = _Captured(graph, kept, results)
        return True
