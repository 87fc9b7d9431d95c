"""Draws tokens for the rows of a step: per-sequence parameters, and the ops that use them.

Parameters live in arrays indexed by sequence slot, so a step costs one gather, whatever it mixes. Nothing here is
random and nothing is kept between steps: a draw is a function of (seed, output index, choice), so a request is the same
alone, in any batch, and after preemption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.transfer import send
from deepinfer.ops import sampling, shaping, verification
from deepinfer.ops.philox import Purpose
from deepinfer.ops.registry import OpTable
from deepinfer.ops.verification import VerifyMode

Int32Array = NDArray[np.int32]

_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of one token per row, and of each row's best, on the host.

    Attributes:
        logprob: [N] float32, natural log under the raw logits; NaN where there is none.
        rank: [N] int32, 1 for the best; equal ones rank by id.
        top_ids: [N, num_top] int32, best first.
        top_logprobs: [N, num_top] float32.
        asked: [N, K] float32, of ids that were asked for by themselves; None when none were.
        asked_ranks: [N, K] int32.
    """

    logprob: NDArray[np.float32]
    rank: Int32Array
    top_ids: Int32Array
    top_logprobs: NDArray[np.float32]
    asked: NDArray[np.float32] | None = None
    asked_ranks: Int32Array | None = None


class DeviceLogprobs(NamedTuple):
    """`TokenLogprobs` on the device."""

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    asked: Tensor | None = None
    asked_ranks: Tensor | None = None


class RowParams(NamedTuple):
    """Sampling parameters of R rows, on the device: [R] each, as the op `sample` takes them."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    choice: Tensor


def derive_seed(engine_seed: int, key: int | str) -> int:
    """The seed of a request that names none: a hash, so that neighbours are unrelated and `run` can repeat itself.

    Args:
        engine_seed: 0 to 2^64 - 1.
        key: what names the request: its ordinal, or its `custom_id`. The number 7 and the text "7" differ.

    Returns:
        An unsigned 64-bit seed.
    """
    kind = b"s" if isinstance(key, str) else b"i"
    text = str(key).encode("utf-8", "surrogatepass")
    message = engine_seed.to_bytes(8, "little") + kind + text
    return int.from_bytes(hashlib.blake2b(message, digest_size=8, person=b"deepinfer.seed").digest(), "little")


class Sampler:
    """Parameters by sequence slot, and the sampling ops of one engine, bound once.

    Args:
        ops: the engine's op table.
        num_slots: sequence slots run from 1 to `num_slots`; slot 0 is nobody's and greedy.
    """

    def __init__(self, ops: OpTable, num_slots: int) -> None:
        self._runtime = ops.context.runtime
        self._apply_bitmask = ops.bind(sampling.apply_bitmask)
        self._verify = ops.bind(verification.verify)
        self._sample = ops.bind(sampling.sample)
        self._token_logprobs = ops.bind(sampling.token_logprobs)
        self._logprobs_of = ops.bind(shaping.logprobs_of)
        size = num_slots + 1
        self._temperature = np.zeros(size, np.float32)
        self._top_k = np.zeros(size, np.int32)
        self._top_p = np.ones(size, np.float32)
        self._min_p = np.zeros(size, np.float32)
        self._seeds = np.zeros(size, np.uint64)
        self._choice = np.zeros(size, np.int32)
        self.version = 0
        """Counts changes of any slot's parameters."""
        self._sent: tuple[Int32Array, RowParams] | None = None  # who draws is mostly who drew in the step before

    def set_slot(self, slot: int, params: SamplingParams, seed: int, choice: int = 0) -> None:
        """Remember the parameters of a sequence when it is admitted, first or again; overwrites the slot's last owner.

        Args:
            slot: 1 to `num_slots`.
            params: validated.
            seed: 0 to 2^64 - 1: the request's own, or a derived one.
            choice: which of the request's answers this is.
        """
        if not 1 <= slot < len(self._seeds):
            raise IndexError(f"sequence slot {slot} is not in 1..{len(self._seeds) - 1}")
        self._temperature[slot] = 0.0 if params.greedy else params.temperature
        self._top_k[slot] = min(max(params.top_k, 0), _INT32_MAX)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = seed
        self._choice[slot] = choice
        self._sent = None
        self.version += 1

    def gather(self, slots: Int32Array) -> RowParams:
        """Parameters of the sequences in `slots` [R], on the device; not to be written to."""
        if self._sent is not None and np.array_equal(self._sent[0], slots):
            return self._sent[1]
        send = self._send
        params = RowParams(
            send(self._temperature[slots]),
            send(self._top_k[slots]),
            send(self._top_p[slots]),
            send(self._min_p[slots]),
            send(self._seeds[slots].view(np.int64)),
            send(self._choice[slots]),
        )
        self._sent = slots.copy(), params
        return params

    def write(self, slots: Int32Array, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write what `gather` sends into host arrays, by the names of `RowParams`; entries behind the first R stay."""
        for name, values in (
            ("temperature", self._temperature),
            ("top_k", self._top_k),
            ("top_p", self._top_p),
            ("min_p", self._min_p),
            ("seeds", self._seeds.view(np.int64)),
            ("choice", self._choice),
        ):
            arrays[name][: len(slots)] = values[slots]

    def mask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Forbid tokens, in place.

        Args:
            logits: [N, V] float32.
            bitmask: [B, ceil(V / 32)] int32; a set bit allows.
            rows: [N] int32, the mask of each row, -1 for none.
        """
        with torch.inference_mode():
            self._apply_bitmask(logits, bitmask, rows)

    def draw(
        self,
        logits: Tensor,
        params: RowParams,
        output_index: Tensor,
        *,
        purpose: Purpose = Purpose.TARGET,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """Draw one token per row.

        Args:
            logits: [R, V] float32.
            params: of R rows.
            output_index: [R] int32, output tokens of the sequence before the one that is drawn.
            purpose: which random stream.
            anchor: [R] int32, output index of the first drafted token, for `Purpose.DRAFT`.

        Returns:
            [R] int32; -1 for a row with NaN or Inf, or without any finite entry.
        """
        p = params
        with torch.inference_mode():
            return self._sample(
                logits, p.temperature, p.top_k, p.top_p, p.min_p, p.seeds, output_index, p.choice, int(purpose), anchor
            )

    def verify(
        self,
        logits: Tensor,
        cu_seqlens: Tensor,
        draft_ids: Tensor,
        params: RowParams,
        output_index: Tensor,
        draft_logits: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Emit what the target keeps of each request's drafts, and one token more; see the op `verify`.

        Args:
            logits: [T, V] float32, rows of all requests packed.
            cu_seqlens: [R + 1] int32.
            draft_ids: [T] int32, -1 in each request's last row.
            params: of R requests.
            output_index: [R] int32, of each request's first row.
            draft_logits: [T, V] float32 for rejection sampling; None for the coupled rule.
        """
        p = params
        mode: VerifyMode = "coupled" if draft_logits is None else "rejection"
        with torch.inference_mode():
            return self._verify(
                logits,
                cu_seqlens,
                draft_ids,
                p.temperature,
                p.top_k,
                p.top_p,
                p.min_p,
                p.seeds,
                output_index,
                p.choice,
                mode,
                draft_logits,
            )

    def sample(self, logits: Tensor, slots: Int32Array, output_index: Int32Array) -> Int32Array:
        """Gather, `draw`, and wait for the tokens: [N] int32 on the host."""
        index = self._send(np.asarray(output_index, np.int32))
        tokens: Int32Array = self._runtime.to_host(self.draw(logits, self.gather(slots), index)).numpy()
        return tokens

    def device_logprobs(
        self, logits: Tensor, tokens: Tensor, num_top: int, ids: Tensor | None = None
    ) -> DeviceLogprobs:
        """Logprobs of one token per row under the logits as they are: no temperature, no filter. Stays on the device.

        Args:
            logits: [N, V] float32; raw ones are those before any mask or bias.
            tokens: [N] int32; -1 gives NaN and rank 0.
            num_top: how many best ids to give beside; more than V gives V.
            ids: [N, K] int32, more ids to give the logprobs of; None for none.
        """
        with torch.inference_mode():
            own = self._token_logprobs(logits, tokens, min(num_top, logits.shape[1]))
            return DeviceLogprobs(*own, *(self._logprobs_of(logits, ids) if ids is not None else ()))

    def fetch_logprobs(self, logprobs: DeviceLogprobs) -> TokenLogprobs:
        """Wait for logprobs and bring them to the host."""
        return TokenLogprobs(*(self._runtime.to_host(part).numpy() for part in logprobs if part is not None))

    def logprobs(self, logits: Tensor, tokens: Sequence[int] | Int32Array, num_top: int = 0) -> TokenLogprobs:
        """`device_logprobs` of host tokens, on the host."""
        there = self._send(np.asarray(tokens, np.int32))
        return self.fetch_logprobs(self.device_logprobs(logits, there, num_top))

    def _send(self, array: NDArray[Any]) -> Tensor:
        return send(self._runtime, array)
