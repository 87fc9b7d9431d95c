"""Logprobs of the tokens that a step emits: rows are kept before they are shaped, numbers taken after the draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.core.request import Request
from deepinfer.core.row_shaping import RowShaping, StepShapes
from deepinfer.core.sampler import DeviceLogprobs, Sampler
from deepinfer.core.step_buffers import Int32Array
from deepinfer.core.transfer import send
from deepinfer.ops.heads import gather_rows
from deepinfer.ops.registry import OpTable
from deepinfer.ops.sampling import process_logits
from deepinfer.ops.shaping import put_rows
from deepinfer.ops.step import gather_ids


@dataclass
class KeptRows:
    """Rows that logprobs are wanted of.

    Attributes:
        requests: indices into the requests that draw.
        logits: [n, V] float32, rows of those requests packed.
        places: [n] int32, where they stand among the step's rows; None for all of them in order.
        num_top: how many of the best are wanted.
        ids: [n, K] int32, ids that are wanted beside; None for none.
    """

    requests: list[int]
    logits: Tensor
    places: Tensor | None
    num_top: int
    ids: Tensor | None


class LogprobTaker:
    """Keeps rows and takes logprobs.

    Args:
        sampler: the parameters, and the op for raw logprobs.
        shaping: applies row shapes to kept rows, for processed logprobs.
        ops: the engine's op table.
    """

    def __init__(self, sampler: Sampler, shaping: RowShaping, ops: OpTable) -> None:
        self._runtime = ops.context.runtime
        self._sampler = sampler
        self._shaping = shaping
        self._gather_rows = ops.bind(gather_rows)
        self._gather_ids = ops.bind(gather_ids)
        self._put_rows = ops.bind(put_rows)
        self._process = ops.bind(process_logits)

    def keep(
        self,
        requests: Sequence[Request],
        wanted: list[int],
        widths: Int32Array,
        starts: Int32Array,
        rows: Tensor,
        shapes: StepShapes,
    ) -> KeptRows | None:
        """Keep the rows whose logprobs are wanted, as they will be judged; None when nobody wants any.

        Args:
            requests: those that draw.
            wanted: places of those among them that want logprobs.
            widths: [R] int32 rows of each.
            starts: [R] int32 first row of each.
            rows: [T, V] float32, not shaped yet.
            shapes: what will change them.
        """
        if not wanted:
            return None
        index = np.concatenate([np.arange(starts[i], starts[i] + widths[i], dtype=np.int32) for i in wanted])
        processed = [i for i in wanted if requests[i].params.logprobs_mode == "processed_logprobs"]
        places = None
        if len(wanted) < len(requests) or shapes or processed:
            places = self._send(index)
            rows = self._gather_rows(rows, places)
        if processed:
            place_of = {int(row): place for place, row in enumerate(index)}
            own = np.concatenate([np.arange(starts[i], starts[i] + widths[i], dtype=np.int32) for i in processed])
            own_rows = frozenset(own.tolist())
            self._shaping.apply(rows, [(place_of[row], shape) for row, shape in shapes.rows if row in own_rows])
            slots = np.repeat([requests[i].seq for i in processed], widths[processed]).astype(np.int32)
            self._replace(rows, np.array([place_of[row] for row in own.tolist()], np.int32), slots)
        most = max(requests[i].params.logprobs or 0 for i in wanted)
        return KeptRows(wanted, rows, places, most, self._ids([requests[i] for i in wanted], widths[wanted]))

    def take(self, kept: KeptRows, tokens: Tensor) -> DeviceLogprobs:
        """Logprobs of emitted tokens.

        Args:
            kept: from `keep`.
            tokens: [T] int32, -1 where a row emitted none.
        """
        if kept.places is not None:
            tokens = self._gather_ids(tokens, kept.places)
        return self._sampler.device_logprobs(kept.logits, tokens, kept.num_top, kept.ids)

    def _replace(self, rows: Tensor, places: Int32Array, slots: Int32Array) -> None:
        """Replace rows by the scores that are drawn from."""
        there = self._send(places)
        p = self._sampler.gather(slots)
        with torch.inference_mode():
            scores = self._process(self._gather_rows(rows, there), p.temperature, p.top_k, p.top_p, p.min_p)
            self._put_rows(rows, there, scores)

    def _ids(self, requests: Sequence[Request], widths: Int32Array) -> Tensor | None:
        most = max(len(r.params.logprob_token_ids or ()) for r in requests)
        if most == 0:
            return None
        ids = np.full((len(requests), most), -1, np.int32)
        for row, request in zip(ids, requests, strict=True):
            asked = request.params.logprob_token_ids or ()
            row[: len(asked)] = asked
        return self._send(np.repeat(ids, widths, axis=0))

    def _send(self, array: Int32Array) -> Tensor:
        return send(self._runtime, array)
