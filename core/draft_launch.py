"""Drafts behind a step that has drawn: whether to make any, and the op calls that make them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepinfer.core.executor import Executor
from deepinfer.core.launched_step import Arrivals, Drawn, LaunchedStep
from deepinfer.core.request_table import RequestTable
from deepinfer.core.row_picks import places_within
from deepinfer.core.sampler import RowParams
from deepinfer.core.speculation import Drafting
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.step_graphs import GraphedStep
from deepinfer.ops.heads import gather_rows
from deepinfer.ops.registry import OpTable
from deepinfer.ops.step import rewind


@dataclass
class DrawInputs:
    """What drawing and drafting need of R requests.

    Attributes:
        params: how they sample.
        outputs: [R] int32, output tokens before the step's, upper bounds.
        output_index: the same on the device, corrected.
        links: [R] int32, their places in the step before.
        linked: the same on the device; None where that step tells nothing.
    """

    params: RowParams
    outputs: Int32Array
    output_index: Tensor
    links: Int32Array
    linked: Tensor | None = None


class DraftLauncher:
    """Drafts behind the steps of one device.

    Args:
        drafting: proposes tokens.
        executor: sends host arrays.
        ops: binds what drafting needs besides.
        table: the running requests.
    """

    def __init__(self, drafting: Drafting, executor: Executor, ops: OpTable, table: RequestTable) -> None:
        self._drafting = drafting
        self._executor = executor
        self._table = table
        self._runtime = ops.context.runtime
        self._rewind = ops.bind(rewind)
        self._gather_rows = ops.bind(gather_rows)

    def draft_behind(
        self,
        launched: LaunchedStep,
        drawn: Drawn,
        arrivals: Arrivals,
        slots: Int32Array,
        widths: Int32Array,
        previous: Drawn | None,
        graphed: GraphedStep | None,
        inputs: DrawInputs | None,
    ) -> None:
        """Draft behind a step that has drawn, if that pays."""
        table, later = self._table, self._runtime.to_host_later
        launched.expected = self._drafting.expected(slots)
        if self._drafting.wants_drafts(slots, int(launched.plan.query_lens.sum() - widths.sum())):
            if graphed is not None:
                output, count = graphed.draft(), drawn.count
                drawn.drafts, drawn.confidences = output.tokens[:count], output.confidences[:count]
            elif inputs is not None:
                anchors = table.planned_tokens[slots]
                self._draft(drawn, anchors + widths - 1, inputs, previous)
            if launched.marks is not None:
                launched.marks.note_drafts(self._runtime)
            assert drawn.confidences is not None, "a draft gives them"
            arrivals.confidences = later(drawn.confidences)
            # Rejection judges a draft by the logits it was drawn from, which are those of the step just before; who
            # waits for the host comes too late for that and verifies none.
            if drawn.draft_logits is None and table.waits[slots].any():
                arrivals.drafts = later(drawn.drafts)

    def _draft(
        self,
        drawn: Drawn,
        anchors: Int32Array,
        inputs: DrawInputs,
        previous: Drawn | None,
    ) -> None:
        """Propose tokens behind each request's newest one; positions and output indices start as upper bounds."""
        send = self._executor.send
        positions, output_index = send(anchors), send(inputs.outputs + drawn.host_planned)
        own = send(np.arange(drawn.count, dtype=np.int32))
        for values in (positions, output_index):
            if inputs.linked is not None and previous is not None:
                self._rewind(values, inputs.linked, previous.planned, previous.num_emitted)
            self._rewind(values, own, drawn.planned, drawn.num_emitted)
        output = self._drafting.propose(drawn.newest, positions, drawn.seqs, drawn.batch, inputs.params, output_index)
        drawn.drafts, drawn.draft_logits, drawn.confidences = output.tokens, output.logits, output.confidences

    def judged_logits(self, previous: Drawn, links: Int32Array, widths: Int32Array) -> Tensor:
        """[T, V]: what the draft that each row judges was drawn from."""
        assert previous.draft_logits is not None, "rejection keeps the draft's logits"
        depth = previous.draft_logits.shape[1]
        index = np.repeat(np.maximum(links, 0) * depth, widths) + np.minimum(places_within(widths), depth - 1)
        return self._gather_rows(previous.draft_logits.flatten(0, 1), self._executor.send(index))
