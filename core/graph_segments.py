"""A piece of a step that a device may hold as a graph: run once as it is, then captured, replayed from then on.

The first run compiles and loads what the piece needs, and takes the memory of its results; nothing of that may happen
while a graph is captured. All runs, captured or not, use the same memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from deepinfer.core.graph_memory import GraphMemory, Place
from deepinfer.ops.registry import OpTable
from deepinfer.ops.runtime import Runtime

_LOG = logging.getLogger(__name__)
R = TypeVar("R")


class Segment(Generic[R]):
    """One piece.

    Attributes:
        start: where its results go.
        end: where they end; known when it has run.
        fits: its results had room in the memory of graphs when it ran last without one; else it is never captured.

    Args:
        body: does it, over tensors at fixed addresses.
    """

    def __init__(self, body: Callable[[], R]) -> None:
        self.body = body
        self.start = self.end = Place()
        self.has_run = False
        self.fits = True
        self.replay: Callable[[], None] | None = None
        self.result: R | None = None
        self.scratch: Tensor | None = None  # whose address the graph knows


@dataclass
class Capturer:
    """Runs segments, and captures them when they come again.

    Attributes:
        runtime: the device.
        ops: the engine's op table.
        memory: where that is, for segments.
        failure: why nothing is captured any more; empty as long as all went well.
        num_captured: graphs so far.
    """

    runtime: Runtime
    ops: OpTable
    memory: GraphMemory
    failure: str = ""
    num_captured: int = 0

    def run(self, segment: Segment[R], start: Place, *, may_capture: bool = True) -> tuple[R, bool]:
        """Run a segment; says also whether a graph did it.

        Args:
            segment: what to run.
            start: where its results go.
            may_capture: what it reads stands where it will always stand.
        """
        if segment.replay is None and segment.has_run and may_capture and not self.failure:
            self._capture(segment)
        if segment.replay is not None and segment.result is not None:
            segment.replay()
            return segment.result, True
        segment.start = start
        self.memory.has_overflowed = False
        result = self._submit(segment)
        segment.end = self.memory.place
        segment.fits = segment.has_run = not self.memory.has_overflowed
        return result, False

    def _submit(self, segment: Segment[R]) -> R:
        self.memory.begin(segment.start)
        with self.ops.outputs.taken_from(self.memory.new), torch.inference_mode():
            return segment.body()

    def _capture(self, segment: Segment[R]) -> None:
        """Make the segment's graph. Nothing runs meanwhile, so where it fails the segment is simply run instead."""
        results: list[R] = []
        try:
            with self.runtime.sync_guard.permit("a decode step is captured"):
                replay = self.runtime.capture(lambda: results.append(self._submit(segment)))
        except Exception as error:  # whatever a device or an op of anybody's cannot do in a graph, it does without one
            self.failure = _told(error)
            _LOG.warning("decode steps are not captured any more, since one could not be: %s", self.failure)
            return
        segment.replay, segment.result, segment.scratch = replay, results[0], self.ops.scratch
        self.num_captured += 1


def _told(error: BaseException) -> str:
    """An error with its notes and those of what led to it, where the op is named that it came up in."""
    parts = [f"{type(error).__name__}: {error}"]
    cause: BaseException | None = error
    while cause is not None:
        parts.extend(note for note in getattr(cause, "__notes__", ()) if note not in parts)
        cause = cause.__cause__ or cause.__context__
    return "; ".join(parts)
