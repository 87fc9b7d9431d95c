"""Decode steps as graphs: which steps may be one, and how they are run.

A step in which every sequence continues with its newest token, and the drafts behind it, has few shapes. It is padded
to the next larger one (`core.graph_sizes`), written into fixed memory (`core.graph_inputs`), and run as a few graphs
(`core.graph_pieces`): *forward*, *draw*, *draft*. Between them the host may queue what differs from step to step: row
shapes, logprobs, marks of time. Where a model reads tables on the host, *look up* stands in front: it finds which
entries are wanted, and the host fetches them in between.

Padding has no slots, so it stores nothing, and its rows lie behind the end of `cu_seqlens_q`; nobody reads what it
computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np
from torch import Tensor

from deepinfer.core.config import EngineConfig
from deepinfer.core.executor import Executor, StepLimits
from deepinfer.core.graph_inputs import GraphLimits, GraphState, HostInputs, KeyInputs
from deepinfer.core.graph_memory import GraphMemory, Place
from deepinfer.core.graph_pieces import GraphPieces, UnpaddedStep
from deepinfer.core.graph_segments import Capturer, Segment
from deepinfer.core.graph_sizes import GraphKey, GraphSizes
from deepinfer.core.request_table import RequestTable
from deepinfer.core.sampler import Sampler
from deepinfer.core.scheduler import StepPlan
from deepinfer.core.speculation import Drafting
from deepinfer.core.stats import EngineStats
from deepinfer.core.step_buffers import Int32Array
from deepinfer.models.interface import DraftOutput, StepBatch
from deepinfer.ops.registry import OpTable
from deepinfer.ops.runtime import HostCopy, Runtime

MAX_SHAPES: Final = 256
"""Shapes whose graphs are kept; of more, the one that was not used for longest is given up."""


def make_graphs(
    config: EngineConfig,
    ops: OpTable,
    executor: Executor,
    sampler: Sampler,
    drafting: Drafting | None,
    table: RequestTable,
    limits: StepLimits,
    graph_bytes: int,
) -> tuple[StepGraphs | None, str]:
    """The captured steps of an engine; None, and why, where nothing can be captured.

    Args:
        config: of the engine.
        ops: with every op that a step may run bound.
        executor: the model, its caches and blocks.
        sampler: parameters by slot.
        drafting: proposes tokens; None without speculation.
        table: the running requests.
        limits: the largest step.
        graph_bytes: the most memory that results in graphs may take.
    """
    if not may_capture(config, ops.context.runtime):
        if not config.graphs:
            return None, "graphs=False"
        if not ops.context.runtime.capabilities.graphs:
            return None, f"backend {ops.backend.name} has no graphs"
        return None, "speculation='rejection' keeps the logits of drafts from step to step"
    if ops.not_capturable:
        few = ", ".join(ops.not_capturable[:6]) + (", ..." if len(ops.not_capturable) > 6 else "")
        return None, f"{len(ops.not_capturable)} ops cannot be captured: {few}"
    sizes = GraphSizes.of(
        config.graph_batch_sizes,
        max_graph_rows=config.max_graph_rows,
        max_rows=limits.max_rows,
        max_seqs=limits.max_seqs,
        num_drafts=drafting.num_drafts if drafting is not None else 0,
        max_len=limits.max_seq_len + limits.lookahead,
    )
    if not sizes.rows:
        return None, f"no row count in graph_batch_sizes is as small as max_graph_rows, {config.max_graph_rows}"
    return StepGraphs(executor, sampler, ops, drafting, table, sizes, graph_bytes), ""


def may_capture(config: EngineConfig, runtime: Runtime) -> bool:
    """Whether steps are captured with these settings, if all ops can be."""
    return config.graphs and runtime.capabilities.graphs and config.speculation != "rejection"


class GraphedStep:
    """One decode step in fixed memory: fill it, send it, run it.

    Args:
        key: its shape.
        inputs: of the shape.
        pieces: what its graphs do.
        capturer: runs them.
    """

    def __init__(self, key: GraphKey, inputs: KeyInputs, pieces: GraphPieces, capturer: Capturer) -> None:
        self.key = key
        self.inputs = inputs
        self._pieces = pieces
        self._capturer = capturer
        self._look_up = Segment(lambda: pieces.look_up(inputs))
        self._fetch = Segment(lambda: pieces.fetch(self._entries()))
        self._forward = Segment(lambda: pieces.forward(inputs, self._fetched))
        self._draw = Segment(lambda: pieces.draw(inputs, key, self._logits()))
        self._both = Segment(self._forward_and_draw)
        self._draft = Segment(lambda: pieces.draft(inputs, key))
        self._newest_entries: Tensor | None = None
        self._fetched: Mapping[int, Tensor] | None = None
        self._newest_logits: Tensor | None = None
        self._part: UnpaddedStep | None = None
        self._has_drawn = False
        self.is_replayed = True
        """All pieces of the newest step so far were graphs."""

    @property
    def input_ids(self) -> Int32Array:
        """[rows] int32 on the host, to be changed before `send`."""
        ids: Int32Array = self.inputs.host.arrays["input_ids"]
        return ids

    @property
    def batch(self) -> StepBatch:
        """The step as the model sees it, padding included."""
        return self.inputs.batch

    @property
    def rewound(self) -> tuple[Tensor, ...]:
        """What the host wrote as upper bounds besides the batch: [seqs] int32 each."""
        return self._pieces.rewound(self.inputs)

    @property
    def fits(self) -> bool:
        """Whether the results of all pieces had room in the memory of graphs."""
        return all(piece.fits for piece in (self._look_up, self._forward, self._draw, self._both, self._draft))

    def send(self) -> None:
        """Begin the one copy that brings the step to the device."""
        self.inputs.host.send()

    def forward(self, *, and_draw: bool = False) -> Tensor:
        """Correct the step and run the model: [rows, vocab] float32, valid until the next captured step.

        Args:
            and_draw: draw as well, in the same graph, since nobody has anything to do in between.
        """
        start, is_fixed = Place(), True
        if self._pieces.host_fetch is not None:
            entries, is_fixed = self._capturer.run(self._look_up, start)
            self._newest_entries = entries
            fetched, _ = self._capturer.run(self._fetch, self._look_up.end, may_capture=False)
            self._fetched = fetched
            start, is_fixed = self._fetch.end, is_fixed and self._fetch.has_run
        piece = self._both if and_draw else self._forward
        logits, self.is_replayed = self._capturer.run(piece, start, may_capture=is_fixed)
        self._newest_logits, self._has_drawn = logits, and_draw
        return logits

    def draw(self) -> None:
        """Draw from what `forward` gave, shaped since then or not; `without_padding` has the result."""
        if not self._has_drawn:
            _, self.is_replayed = self._capturer.run(self._draw, self._forward.end, may_capture=self.is_replayed)

    def draft(self) -> DraftOutput:
        """Propose tokens behind those drawn."""
        end = self._both.end if self._has_drawn else self._draw.end  # nothing is left to read of what is before
        drafted, self.is_replayed = self._capturer.run(self._draft, end, may_capture=self.is_replayed)
        return drafted

    def bring(self, tokens: Tensor) -> HostCopy:
        """Begin to bring the step's tokens [T] int32 to the host, valid there until the next but one of its shape."""
        return self.inputs.host.landing.begin(tokens)

    def without_padding(self, num_rows: int, num_seqs: int) -> UnpaddedStep:
        """What is in fixed memory of the sequences that there are."""
        if self._part is None or (self._part.tokens.shape[0], self._part.newest.shape[0]) != (num_rows, num_seqs):
            self._part = self._pieces.part(self.inputs, num_rows, num_seqs)
        return self._part

    def _forward_and_draw(self) -> Tensor:
        logits = self._pieces.forward(self.inputs, self._fetched)
        self._pieces.draw(self.inputs, self.key, logits)
        return logits

    def _entries(self) -> Tensor:
        assert self._newest_entries is not None, "entries are looked up before they are fetched"
        return self._newest_entries

    def _logits(self) -> Tensor:
        assert self._newest_logits is not None, "the model runs before anything is drawn"
        return self._newest_logits


class StepGraphs:
    """The captured decode steps of one engine.

    Args:
        executor: the model, its caches and blocks.
        sampler: parameters by slot, and the sampling ops.
        ops: the engine's op table; all of its ops are capturable.
        drafting: proposes tokens; None without speculation.
        table: the running requests.
        sizes: which shapes are captured.
        graph_bytes: the most memory that results in graphs may take.

    Attributes:
        num_steps: steps that ran as graphs.
        eager: the other steps, by the reason why they did not.
    """

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        ops: OpTable,
        drafting: Drafting | None,
        table: RequestTable,
        sizes: GraphSizes,
        graph_bytes: int,
    ) -> None:
        self.num_steps = 0
        self.eager: Counter[str] = Counter()
        self._executor, self._sampler, self._table = executor, sampler, table
        self._is_drafting = drafting is not None
        self._runtime = ops.context.runtime
        self._sizes = sizes
        self._capturer = Capturer(self._runtime, ops, GraphMemory(self._runtime, graph_bytes))
        spec, pool = executor.model.cache_spec, executor.pool
        limits = GraphLimits(
            rows=sizes.rows[-1],
            seqs=sizes.seqs[-1],
            pages=executor.max_window_pages,
            ngram=spec.ngram,
            ratios=spec.ratios,
            block_size=pool.block_size,
            window_page=pool.window_page,
        )
        largest = GraphKey(limits.rows, limits.seqs, sizes.contexts[-1], verifies=True)
        draft = executor.model.draft if drafting is not None else None
        self._state = GraphState(self._runtime, limits, largest, draft.num_tokens if draft is not None else 0)
        self._pieces = GraphPieces(executor, sampler, ops, drafting, self._state)
        self._steps: dict[GraphKey, GraphedStep] = {}

    def report(self, stats: EngineStats) -> None:
        """Write the counters of graphs."""
        stats.num_graphs, stats.graph_bytes = self._capturer.num_captured, self._capturer.memory.num_bytes
        stats.num_graph_steps, stats.num_eager_steps = self.num_steps, dict(self.eager)
        stats.graph_reason = self._capturer.failure

    def write(self, plan: StepPlan, links: Int32Array, planned: Int32Array | None) -> GraphedStep | None:
        """Write a decode step into fixed host memory; None, and the reason counted, when no graph holds it.

        Args:
            plan: of sequences that each draw from all of their rows.
            links: [n] int32, their places in the captured step just before, -1 where it has nothing to tell.
            planned: [n'] int32, what the host assumed that each sequence of that step would emit; None without one.
        """
        is_one_each = plan.num_rows == len(plan.seqs)  # nobody in a plan is without rows
        longest = int(plan.starts.max()) + 1 if is_one_each else int((plan.starts + plan.query_lens).max())
        key = self._sizes.key(plan.num_rows, len(plan.seqs), longest)
        if self._capturer.failure or key is None:
            self.note_eager("a step could not be captured" if self._capturer.failure else "too many rows")
            return None
        step = self._steps.pop(key, None) or self._make(key)
        self._steps[key] = step  # the newest stands last
        host = step.inputs.next_host()
        host.wait_until_sent()
        self._write(host, key, plan, links, planned)
        return step

    def note_eager(self, reason: str) -> None:
        """Count a step that runs without graphs."""
        self.eager[reason] += 1

    def note_run(self, step: GraphedStep) -> None:
        """Count a step that has run in fixed memory."""
        if step.is_replayed:
            self.num_steps += 1
        else:
            self.note_eager("the first step of its shape" if step.fits else "results exceed the memory of graphs")

    def _make(self, key: GraphKey) -> GraphedStep:
        if len(self._steps) >= MAX_SHAPES:
            oldest = self._steps.pop(next(iter(self._steps)))
            for host in oldest.inputs.hosts:
                host.wait_until_sent()  # their memory goes now
        inputs = KeyInputs(self._runtime, self._state, key, self._pieces.numbers)
        return GraphedStep(key, inputs, self._pieces, self._capturer)

    def _write(
        self,
        host: HostInputs,
        key: GraphKey,
        plan: StepPlan,
        links: Int32Array,
        planned: Int32Array | None,
    ) -> None:
        seqs, widths = plan.seqs, plan.query_lens
        a, n, table = host.arrays, len(seqs), self._table
        num_rows = self._executor.pool.write_step(seqs, widths, host.native, key.rows, key.seqs, plan.starts)
        first_rows = a["cu_seqlens_q"][:n]
        is_as_before = host.seqs is seqs and host.version == self._sampler.version
        if not is_as_before:
            host.seqs, host.version = seqs, self._sampler.version
            self._sampler.write(seqs, a)
            for name, padding in _PADDING:
                a[name][n : key.seqs] = padding
        if key.verifies or not is_as_before:
            a["widths"][:n], a["num_emitted"][:n], a["starts"][:n] = widths, widths, first_rows
        if not (is_as_before and host.links is links):
            a["links"][:n], host.links = links, links
        if planned is not None and host.planned is not planned:
            a["planned_before"][: len(planned)], host.planned = planned, planned
        known = table.planned_tokens[seqs]
        np.subtract(known, table.num_prompt[seqs], out=a["output_index"][:n])
        if self._is_drafting:
            np.add(a["output_index"][:n], widths, out=a["draft_index"][:n])
            np.add(known, widths - 1, out=a["anchors"][:n])
        if key.verifies:
            a["judged"][:num_rows] = np.arange(1, num_rows + 1, dtype=np.int32)
            a["judged"][first_rows + widths - 1] = -1
            a["judged"][num_rows:] = -1


_PADDING: Final = (
    ("links", -1),
    ("widths", 0),
    ("num_emitted", 0),
    ("starts", 1),  # the last token of none is then that in place 0, which there is
    ("anchors", 0),
    ("temperature", 0.0),
)
"""What stands behind the sequences that there are."""
