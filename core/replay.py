"""Bounded replay: which rows of a prompt run in which layers, and what that does to stored prefixes.

*Decoder replay*: a model with `CacheSpec.replay` stores what later tokens read of early ones before its decoder layers.
Only the last `keep_tokens` rows of a prompt run in those, with windows that start at the first of them. A request's
`decoder_start` says where that is; the decoder's window records before it do not exist, or are those of another prompt.
So a request starts from stored window pages up to its `decoder_start` at most, and gets the bits it gets alone.

*Encoder replay* (`replay="full"`): a stored prefix whose window pages are gone is continued all the same. Its last
tokens run again, with windows that start at the first of them, to make window records; they write nothing else. What
follows is approximate, and is not stored for others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from deepinfer.core.request import Request
    from deepinfer.core.scheduler import StepPlan
    from deepinfer.core.step_buffers import Int32Array
    from deepinfer.models.interface import ModelInfo, ReplaySpec

ReplayMode = Literal["off", "decoder", "full"]


@dataclass(frozen=True)
class RowCut:
    """Which rows of a step go on into the decoder layers.

    Attributes:
        starts: [S] int32, the first position that decoder layers see in the windows of each sequence.
        rows: [n] int32 ascending, the rows that go on; None for all of them.
    """

    starts: Int32Array
    rows: Int32Array | None


class Replay:
    """The rules of an engine.

    Args:
        config: validated settings.
        info: of the model.
        spec: how the model's prompts may be cut short; None when they may not.

    Raises:
        ConfigError: the model cannot do what the settings ask for.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, spec: ReplaySpec | None) -> None:
        self.mode: ReplayMode = config.replay
        self._spec = spec
        self._compact = config.replay_form == "compact"
        self.keep_tokens = config.replay_keep_tokens or (spec.keep_tokens if spec is not None else 0)
        self.most_replayed = self.keep_tokens if self.mode == "full" else 0
        if self.mode == "off":
            return
        if spec is None:
            raise ConfigError(f"replay={self.mode!r} needs decoder layers, and {info.name} has none")
        if self.keep_tokens < spec.window:
            raise ConfigError(f"replay_keep_tokens is {self.keep_tokens}; use the window, {spec.window}, or more")

    def begin(self, request: Request, mode: ReplayMode | None, keep_tokens: int | None) -> None:
        """Settle how a new request's prompt runs, and which stored prefixes it may start from.

        Args:
            request: not queued yet.
            mode: in place of the engine's; by default the engine's, and exact where prompt positions are scored.
            keep_tokens: in place of the engine's.

        Raises:
            RequestError: the model, or what the request asks for, does not allow it.
        """
        wants_rows = request.num_prompt_rows_wanted > 0
        if mode is None:
            mode = "off" if wants_rows else self.mode
        if mode != "off":
            self._check(request, keep_tokens)
            length = len(request.prompt_token_ids)
            keep = keep_tokens or self.keep_tokens
            if mode == "full" and keep > self.most_replayed:
                raise RequestError(
                    "invalid_parameter",
                    f"replay='full' with {keep} tokens: this engine was made to replay {self.most_replayed}; "
                    "set replay and replay_keep_tokens of the engine",
                )
            request.decoder_start = max(0, length - keep)
            request.num_prompt_rows_planned = request.num_prompt_rows_done
            request.output.approximate = request.decoder_start > 0 and (wants_rows or request.params.max_tokens > 0)
            request.max_stored = request.decoder_start
            request.replay_tokens = keep if mode == "full" else 0
        # Pages of an engine that cuts prompts lack decoder records, those of an exact one must not.
        request.use_prefix &= (mode == "off") == (self.mode == "off")

    def cut(self, plan: StepPlan) -> RowCut | None:
        """The rows of a step that go on into the decoder layers; None when all do and no window is bound."""
        spec = self._spec
        if spec is None or not any(request.decoder_start for request in plan.requests):
            return None
        bounds = np.fromiter((r.decoder_start for r in plan.requests), dtype=np.int32, count=len(plan.requests))
        if not (bounds > np.maximum(plan.starts - spec.window + 1, 0)).any():
            return None
        dropped = np.clip(bounds - plan.starts, 0, plan.query_lens)
        if not self._compact or not dropped.any():
            return RowCut(bounds, None)
        ends = np.cumsum(plan.query_lens)
        place = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - plan.query_lens, plan.query_lens)
        return RowCut(bounds, np.flatnonzero(place >= np.repeat(dropped, plan.query_lens)).astype(np.int32))

    def _check(self, request: Request, keep_tokens: int | None) -> None:
        if self._spec is None:
            raise RequestError("invalid_parameter", "replay: this model runs all rows of a prompt in all layers")
        if keep_tokens is not None and keep_tokens < self._spec.window:
            raise RequestError(
                "invalid_parameter", f"keep_tokens is {keep_tokens}; use the window, {self._spec.window}, or more"
            )
        if request.params.prompt_logprobs is not None:
            raise RequestError("invalid_parameter", "replay: prompt logprobs need all rows of the prompt")
