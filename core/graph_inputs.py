"""Inputs and state of captured steps: device memory at fixed addresses, and the host buffers that fill it.

What a graph reads stands where it stood when the graph was captured. The host writes a whole step into one pinned
buffer and one copy brings it there. Two of these buffers take turns for each shape of step.

Some of it, `StepState`, the step behind it needs as well, to correct what the host assumed of it. That step may be
another graph, and its inputs arrive before it reads; so a step ends by copying its state, whose layout all graphs
share, to a second place, where the next one finds it whatever graph it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core._native import StepArrays
from deepinfer.core.graph_memory import POOL
from deepinfer.core.graph_sizes import GraphKey
from deepinfer.core.sampler import RowParams
from deepinfer.core.step_buffers import Int32Array
from deepinfer.models.interface import StepBatch
from deepinfer.ops.runtime import Event, Landing, Runtime

_ALIGN: Final = 64  # bytes; what kernels may assume of a tensor
_TORCH: Final = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class Field(NamedTuple):
    """An array within a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "int32"

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, up to where the next one starts."""
        size = np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))
        return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class StepState:
    """What the step behind this one corrects itself with; full size, of which a step uses the first entries.

    Attributes:
        newest: [max_seqs] int32, as `Drawn.newest`.
        tokens: [max_rows] int32, emitted tokens packed.
        num_emitted: [max_seqs] int32.
        starts: [max_seqs] int32, first row and first emitted token of each sequence.
        input_ids: [max_rows] int32.
        cu_seqlens_q: [max_seqs + 1] int32.
        history: [max_seqs, ngram - 1] int32.
        planned_before: [max_seqs] int32, what the host assumed that each sequence of the step before would emit.
    """

    newest: Tensor
    tokens: Tensor
    num_emitted: Tensor
    starts: Tensor
    input_ids: Tensor
    cu_seqlens_q: Tensor
    history: Tensor
    planned_before: Tensor


class GraphLimits(NamedTuple):
    """The largest captured step, and what all of them have in common.

    Attributes:
        rows: most rows.
        seqs: most sequences.
        pages: columns of window tables.
        ngram: tokens a row's hash looks at.
        ratios: compress ratios.
        block_size: tokens per block.
        window_page: tokens per window page.
    """

    rows: int
    seqs: int
    pages: int
    ngram: int
    ratios: tuple[int, ...]
    block_size: int
    window_page: int

    def columns(self, context: int) -> int:
        """Columns of block tables for so many tokens."""
        return -(-context // self.block_size)

    def state_fields(self) -> list[Field]:
        """`StepState`, what the device writes first."""
        rows, seqs = (self.rows,), (self.seqs,)
        return [
            Field("newest", seqs),
            Field("tokens", rows),
            Field("num_emitted", seqs),
            Field("starts", seqs),
            Field("input_ids", rows),
            Field("cu_seqlens_q", (self.seqs + 1,)),
            Field("history", (self.seqs, self.ngram - 1)),
            Field("planned_before", seqs),
        ]

    def key_fields(self, key: GraphKey) -> list[Field]:
        """What a step of that shape reads besides."""
        rows, seqs = (key.rows,), (key.seqs,)
        return [
            *(Field(name, rows) for name in ("positions", "row_to_seq", "window_slots", "judged")),
            Field("ratio_slots", (len(self.ratios), key.rows)),
            *(Field(name, seqs) for name in _SEQ_FIELDS),
            Field("seeds", seqs, "int64"),
            *(Field(name, seqs, "float32") for name in ("temperature", "top_p", "min_p")),
            Field("window_tables", (key.seqs, self.pages)),
            Field("block_tables", (key.seqs, self.columns(key.context))),
        ]


_SEQ_FIELDS: Final = (
    "seq_lens",
    "state_slots",
    "window_first_page",
    "links",
    "widths",
    "output_index",
    "draft_index",
    "anchors",
    "top_k",
    "choice",
)
_FROM_HOST: Final = "num_emitted"
"""The first field of `StepState` that the host writes; what stands before it are results."""


class GraphState:
    """The fixed device memory of an engine's captured steps.

    Args:
        runtime: the device.
        limits: sizes.
        largest: the shape that takes most memory.
        num_drafted: tokens of a draft; 0 without.
    """

    def __init__(self, runtime: Runtime, limits: GraphLimits, largest: GraphKey, num_drafted: int) -> None:
        self.limits = limits
        fields = limits.state_fields()
        self.state_bytes = _size(fields)
        memory = runtime.pool(POOL)
        self.buffer = memory.zeros((2 * self.state_bytes + _size(limits.key_fields(largest)),), torch.uint8)
        self.both = self.buffer[: 2 * self.state_bytes].view(2, self.state_bytes)
        """[2, bytes] uint8: the state of the step before, and of this one."""
        self.before = StepState(**_tensors(self.buffer, 0, fields))
        self.now = StepState(**_tensors(self.buffer, self.state_bytes, fields))
        self.drafts = memory.zeros((limits.seqs, num_drafted), torch.int32)
        self.first_input = self.state_bytes + _offset(fields, _FROM_HOST)
        """Byte of `buffer` where what the host sends begins."""


class HostInputs:
    """One pinned buffer with all inputs of a step of one shape.

    Attributes:
        arrays: by name, NumPy views of the buffer.
        native: what the native module writes.
        seqs: the sequences it was written for last; None before that.
        version: `Sampler.version` then.
        links: what was written to `links` last; None before that.
        planned: what was written to `planned_before` last.
        landing: where the step's tokens come to.
        sent: reached when the copy to the device is done.
    """

    def __init__(self, runtime: Runtime, state: GraphState, key: GraphKey) -> None:
        limits = state.limits
        fields, own = limits.state_fields(), limits.key_fields(key)
        skipped = _offset(fields, _FROM_HOST)
        self._tensor = runtime.pinned((state.state_bytes - skipped + _size(own),), torch.uint8)
        raw: NDArray[np.uint8] = self._tensor.numpy()
        shared = [field for field in fields if _offset(fields, field.name) >= skipped]
        self.arrays = _views(raw, 0, shared) | _views(raw, state.state_bytes - skipped, own)
        self.arrays["starts"].fill(1)
        self.seqs: Int32Array | None = None
        self.version = -1
        self.links: Int32Array | None = None
        self.planned: Int32Array | None = None
        self.landing: Landing = runtime.landing((key.rows,), torch.int32)
        self.sent: Event = runtime.event()
        self._runtime = runtime
        self._target = state.buffer[state.first_input : state.first_input + self._tensor.shape[0]]
        a = self.arrays
        self.native = StepArrays(
            input_ids=a["input_ids"][: key.rows],
            cu_seqlens_q=a["cu_seqlens_q"][: key.seqs + 1],
            history=a["history"][: key.seqs],
            slots=list(zip(limits.ratios, a["ratio_slots"], strict=True)),
            query_lens=np.zeros(key.seqs, np.int32),
            block_table_lens=np.zeros(key.seqs, np.int32),
            window_table_lens=np.zeros(key.seqs, np.int32),
            **{name: a[name] for name in _NATIVE},
        )

    def wait_until_sent(self) -> None:
        """Wait for the copy of the step that it was written for last."""
        if not self.sent.query():  # a step that drew nothing was never waited for
            with self._runtime.sync_guard.permit("a step's buffers are still being copied"):
                self.sent.synchronize()

    def send(self) -> None:
        """Begin the copy to the device; the arrays are not to be written before `sent` is reached."""
        self._runtime.write_later(self._target, self._tensor)
        self.sent.record()


_NATIVE: Final = (
    "positions",
    "row_to_seq",
    "window_slots",
    "seq_lens",
    "state_slots",
    "window_first_page",
    "block_tables",
    "window_tables",
)


class KeyInputs:
    """The inputs of steps of one shape, on the device and on the host.

    Attributes:
        batch: the step as the model sees it.
        params: how its sequences sample.
        links: [seqs] int32, their places in the step before, -1 for none.
        widths: [seqs] int32, rows of each.
        judged: [rows] int32, where the draft stands that each row judges, -1 for none.
        output_index: [seqs] int32, output tokens of each before this step's.
        draft_index: [seqs] int32, of the first token that is drafted behind the step.
        anchors: [seqs] int32, the position of the newest token once the step has drawn.
        hosts: two buffers that take turns; the last one is that of the newest step.

    Args:
        runtime: the device.
        state: fixed memory.
        key: the shape.
        logits_rows: [max_rows] int32, 0, 1, ... on the device.
    """

    def __init__(self, runtime: Runtime, state: GraphState, key: GraphKey, logits_rows: Tensor) -> None:
        limits, now = state.limits, state.now
        t = _tensors(state.buffer, 2 * state.state_bytes, limits.key_fields(key))
        self.hosts = [HostInputs(runtime, state, key) for _ in range(2)]
        self.batch = StepBatch(
            input_ids=now.input_ids[: key.rows],
            positions=t["positions"],
            row_to_seq=t["row_to_seq"],
            cu_seqlens_q=now.cu_seqlens_q[: key.seqs + 1],
            seq_lens=t["seq_lens"],
            block_tables=t["block_tables"],
            window_tables=t["window_tables"],
            window_first_page=t["window_first_page"],
            window_page=limits.window_page,
            window_slots=t["window_slots"],
            ratio_slots={ratio: t["ratio_slots"][i] for i, ratio in enumerate(limits.ratios)},
            packed_ratio_slots=t["ratio_slots"],
            state_slots=t["state_slots"],
            history=now.history[: key.seqs],
            logits_rows=logits_rows[: key.rows],
            max_seq_len=key.context,
        )

        self.params = RowParams(*(t[name] for name in RowParams._fields))
        self.links, self.widths, self.judged = t["links"], t["widths"], t["judged"]
        self.output_index, self.draft_index, self.anchors = t["output_index"], t["draft_index"], t["anchors"]

    @property
    def host(self) -> HostInputs:
        """The buffer of the newest step."""
        return self.hosts[-1]

    def next_host(self) -> HostInputs:
        """The buffer of the next step."""
        self.hosts.reverse()
        return self.host


def _size(fields: Iterable[Field]) -> int:
    return sum(field.num_bytes for field in fields)


def _offset(fields: Sequence[Field], name: str) -> int:
    place = [field.name for field in fields].index(name)
    return _size(fields[:place])


def _tensors(buffer: Tensor, offset: int, fields: Iterable[Field]) -> dict[str, Tensor]:
    found = {}
    for field in fields:
        size = int(np.prod(field.shape, dtype=np.int64)) * np.dtype(field.dtype).itemsize
        found[field.name] = buffer[offset : offset + size].view(_TORCH[field.dtype]).view(field.shape)
        offset += field.num_bytes
    return found


def _views(buffer: NDArray[np.uint8], offset: int, fields: Iterable[Field]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for field in fields:
        size = int(np.prod(field.shape, dtype=np.int64)) * np.dtype(field.dtype).itemsize
        found[field.name] = buffer[offset : offset + size].view(field.dtype).reshape(field.shape)
        offset += field.num_bytes
    return found
