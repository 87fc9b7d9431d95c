"""What the graphs of a decode step do: correct it and run the model, draw, draft. All over fixed memory.

The same ops as in `core.runner`, which does it for steps of any kind; here every tensor is where it was in the step
before, and the host says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.executor import Executor
from deepinfer.core.graph_inputs import GraphState, KeyInputs
from deepinfer.core.graph_sizes import GraphKey
from deepinfer.core.sampler import Sampler
from deepinfer.core.speculation import Drafting
from deepinfer.models.interface import DraftOutput, ReadsHostTables
from deepinfer.ops.heads import known_ids
from deepinfer.ops.kv import copy_blocks
from deepinfer.ops.registry import OpTable
from deepinfer.ops.step import advance_history, advance_step, gather_ids, last_emitted, rewind, shift


@dataclass(frozen=True)
class UnpaddedStep:
    """What a step drew, and what belongs to it, in memory that the next captured step uses again.

    Attributes:
        tokens: [T] int32, emitted tokens packed; behind a sequence's last one -1.
        starts: [S] int32, first row and first emitted token of each sequence.
        num_emitted: [S] int32.
        widths: [S] int32, rows of each.
        newest: [S] int32, the last emitted token of each, an id of the vocabulary in any case.
        numbers: [S] int32, 0, 1, ...
        no_drafts: [S, 0] int32.
    """

    tokens: Tensor
    starts: Tensor
    num_emitted: Tensor
    widths: Tensor
    newest: Tensor
    numbers: Tensor
    no_drafts: Tensor


class GraphPieces:
    """The ops of captured steps, bound once.

    Args:
        executor: the model.
        sampler: the sampling ops.
        ops: the engine's op table.
        drafting: proposes tokens; None without speculation.
        state: fixed memory.
    """

    def __init__(
        self, executor: Executor, sampler: Sampler, ops: OpTable, drafting: Drafting | None, state: GraphState
    ) -> None:
        self._executor, self._sampler, self._drafting, self._state = executor, sampler, drafting, state
        self._outputs = ops.outputs
        model = executor.model
        self.host_fetch = model.host_fetch if isinstance(model, ReadsHostTables) else None
        self._advance, self._advance_history = ops.bind(advance_step), ops.bind(advance_history)
        self._rewind, self._shift, self._gather_ids = ops.bind(rewind), ops.bind(shift), ops.bind(gather_ids)
        self._last, self._known, self._copy = ops.bind(last_emitted), ops.bind(known_ids), ops.bind(copy_blocks)
        with torch.inference_mode(False):
            limits, send = state.limits, executor.send
            self.numbers = send(np.arange(max(limits.rows, limits.seqs), dtype=np.int32))
            """[n] int32 on the device: 0, 1, ..."""
            self._now, self._before = send(np.array([1], np.int32)), send(np.array([0], np.int32))

    def look_up(self, inputs: KeyInputs) -> Tensor:
        """Correct the step, and find which entries of tables on the host it needs."""
        assert self.host_fetch is not None, "only called with such tables"
        self._correct(inputs)
        return self.host_fetch.look_up(inputs.batch)

    def fetch(self, entries: Tensor) -> Mapping[int, Tensor]:
        """Those entries on the device. Never captured: the host looks at `entries`."""
        assert self.host_fetch is not None, "only called with such tables"
        return self.host_fetch.fetch(entries)

    def forward(self, inputs: KeyInputs, fetched: Mapping[int, Tensor] | None) -> Tensor:
        """Run the model: [rows, vocab] float32.

        Args:
            inputs: of the step, corrected already where something was fetched for it.
            fetched: from `fetch`; None without tables on the host.
        """
        if fetched is None:
            self._correct(inputs)
            return self._executor.forward(inputs.batch)
        return self._executor.forward(replace(inputs.batch, fetched=fetched))

    def _correct(self, inputs: KeyInputs) -> None:
        """Replace upper bounds by what the step before emitted."""
        batch, links, before = inputs.batch, inputs.links, self._state.before
        planned = self._state.now.planned_before
        self._advance_history(
            batch.history,
            links,
            before.tokens,
            before.starts,
            before.num_emitted,
            before.starts,
            self.numbers,
            before.input_ids,
            before.cu_seqlens_q,
            before.history,
        )
        self._advance(
            batch.input_ids,
            batch.positions,
            batch.seq_lens,
            batch.window_slots,
            batch.packed_ratio_slots,
            batch.cu_seqlens_q,
            batch.row_to_seq,
            links,
            planned,
            before.num_emitted,
            before.newest,
            self._state.drafts,
            batch.block_tables,
            self._state.limits.block_size,
            batch.window_tables,
            batch.window_first_page,
            batch.window_page,
            self._state.limits.ratios,
        )
        for values in self.rewound(inputs):
            self._rewind(values, links, planned, before.num_emitted)

    def rewound(self, inputs: KeyInputs) -> tuple[Tensor, ...]:
        """[seqs] int32 each, what the host writes as upper bounds besides the batch."""
        if self._drafting is None:
            return (inputs.output_index,)
        return inputs.output_index, inputs.draft_index, inputs.anchors

    def part(self, inputs: KeyInputs, num_rows: int, num_seqs: int) -> UnpaddedStep:
        """A step without its padding."""
        now = self._state.now
        return UnpaddedStep(
            tokens=now.tokens[:num_rows],
            starts=now.starts[:num_seqs],
            num_emitted=now.num_emitted[:num_seqs],
            widths=inputs.widths[:num_seqs],
            newest=now.newest[:num_seqs],
            numbers=self.numbers[:num_seqs],
            no_drafts=self._state.drafts[:num_seqs, :0],
        )

    def draw(self, inputs: KeyInputs, key: GraphKey, logits: Tensor) -> bool:
        """Sample, or judge drafts; then leave for the next step what it corrects itself with.

        Args:
            inputs: of the step.
            key: its shape.
            logits: [rows, vocab] float32.

        Returns:
            True: what it made is in `StepState`.
        """
        now, params = self._state.now, inputs.params
        tokens, num_emitted = now.tokens[: key.rows], now.num_emitted[: key.seqs]
        if key.verifies:
            drafts = self._gather_ids(inputs.batch.input_ids, inputs.judged)
            with self._into(num_emitted, tokens):
                self._sampler.verify(logits, inputs.batch.cu_seqlens_q, drafts, params, inputs.output_index, None)
        else:
            with self._into(tokens):
                self._sampler.draw(logits, params, inputs.output_index)
        last = self._last(tokens, now.starts[: key.seqs], num_emitted)
        with self._into(now.newest[: key.seqs]):
            self._known(last, 0)
        self._copy(self._state.both, self._now, self._before)
        return True

    def draft(self, inputs: KeyInputs, key: GraphKey) -> DraftOutput:
        """Propose tokens behind each sequence's newest one."""
        assert self._drafting is not None, "only called with speculation"
        now, numbers = self._state.now, self.numbers[: key.seqs]
        for values in (inputs.anchors, inputs.draft_index):
            self._rewind(values, numbers, inputs.widths, now.num_emitted[: key.seqs])
        newest = now.newest[: key.seqs]
        output = self._drafting.propose(
            newest, inputs.anchors, numbers, inputs.batch, inputs.params, inputs.draft_index
        )
        drafts = self._state.drafts[: key.seqs]
        with self._into(drafts.flatten()):
            self._shift(output.tokens.flatten(), 0)  # a copy to where the next step looks
        return DraftOutput(drafts, output.confidences)

    @contextmanager
    def _into(self, *targets: Tensor) -> Iterator[None]:
        """Let the one op that is called inside write its results there, in the order of its contract."""
        left = list(targets)

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            target = left.pop(0)
            assert (tuple(target.shape), target.dtype) == (shape, dtype), "fixed memory has the shape of the result"
            return target

        with self._outputs.taken_from(take):
            yield
        assert not left, "the op made fewer results than there are targets"
