"""A model of the host on the fake device: its passes are queued like ops, and run late on hidden memory.

So the models of this package, which compute with NumPy, show what an engine does wrong with a device that is late,
captures graphs and lets nobody look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepinfer.backends.fake.memory import Ref
from deepinfer.backends.fake.runtime import FakeRuntime
from deepinfer.backends.fake.streams import Work
from deepinfer.backends.fake.tensor import FakeTensor
from deepinfer.models.interface import (
    Caches,
    CacheSpec,
    Choose,
    Draft,
    DraftBatch,
    DraftOutput,
    Model,
    ModelInfo,
    StepBatch,
    Tap,
)
from deepinfer.ops.formats import PagedCache
from deepinfer.ops.registry import OpTable

B = TypeVar("B", StepBatch, DraftBatch)


class OnFake:
    """A model whose `forward`, and whose draft, is one piece of work of a fake device each.

    Padding behind the last row of a step gets the logits of that row. Drafts are those that the draft makes without a
    choice of the engine.

    Args:
        model: computes on host tensors.
        ops: of the fake backend; its outputs take the results.
    """

    def __init__(self, model: Model, ops: OpTable) -> None:
        runtime = ops.context.runtime
        if not isinstance(runtime, FakeRuntime):
            raise TypeError(f"OnFake needs a table of the fake backend, got one of {ops.backend.name}")
        self.info: ModelInfo = model.info
        self.cache_spec: CacheSpec = model.cache_spec
        self._model, self._ops, self._runtime = model, ops, runtime
        self._caches: dict[int, _HostCaches] = {}
        self.draft: Draft | None = None if model.draft is None else _DraftOnFake(model.draft, self)

    def forward(self, batch: StepBatch, caches: Caches, tap: Tap | None = None) -> Tensor:
        """Queue a pass."""
        taken, reads = _take(batch)
        here = self.host_caches(caches)
        logits = self._ops.outputs.new((batch.logits_rows.shape[0], self.info.vocab_size), torch.float32)

        def run() -> None:
            seen: StepBatch = _give(batch, taken)
            last = max(int(seen.cu_seqlens_q[-1]) - 1, 0)
            seen = replace(seen, logits_rows=seen.logits_rows.clamp(max=last))
            self._runtime.ref(logits).view().copy_(self._model.forward(seen, here))

        self.queue("forward", run, reads, [*here.refs, self._runtime.ref(logits)])
        return logits

    def host_caches(self, caches: Caches) -> _HostCaches:
        """The caches as the model may read them, the same object for the same caches."""
        return self._caches.setdefault(id(caches), _HostCaches(caches, self.cache_spec, self._runtime))

    def queue(self, name: str, run: Any, reads: Sequence[Ref], writes: Sequence[Ref]) -> None:
        """Queue work on the current stream."""
        self._runtime.submit(Work(name, run, tuple(reads), tuple(writes)), launch=True)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of a result."""
        return self._ops.outputs.new(shape, dtype)


class _DraftOnFake:
    """A draft of the host as work of the device."""

    def __init__(self, draft: Draft, model: OnFake) -> None:
        self.num_tokens = draft.num_tokens
        self._draft, self._model = draft, model

    def new_scratch(self, num_seqs: int) -> PagedCache:
        """Nothing on the device."""
        return self._draft.new_scratch(num_seqs)

    def draft(
        self,
        batch: DraftBatch,
        caches: Caches,
        choose: Choose | None = None,
        *,
        temperatures: Sequence[float] = (),
        with_logits: bool = False,
        tap: Tap | None = None,
    ) -> DraftOutput:
        """Queue a draft."""
        if with_logits:
            raise NotImplementedError("drafts of a host model on the fake device have no logits")
        taken, reads = _take(batch)
        shape = batch.anchor_ids.shape[0], self.num_tokens
        tokens, confidences = self._model.new(shape, torch.int32), self._model.new(shape, torch.float32)
        targets = [_ref(tokens), _ref(confidences)]
        here = self._model.host_caches(caches)

        def run() -> None:
            output = self._draft.draft(_give(batch, taken), here, temperatures=temperatures)
            targets[0].view().copy_(output.tokens)
            targets[1].view().copy_(output.confidences)

        self._model.queue("draft", run, [*reads, *here.refs], targets)
        return DraftOutput(tokens, confidences)


class _HostCaches:
    """Caches whose records are views of hidden memory; for the device's thread."""

    def __init__(self, caches: Caches, spec: CacheSpec, runtime: FakeRuntime) -> None:
        self._names = [record.name for record in (*spec.block_records, *spec.window_records)]
        self._records = {name: caches.records(name) for name in self._names}
        self._states = {state.name: runtime.ref(caches.state(state.name)) for state in spec.states}
        self._data = {name: runtime.ref(cache.data) for name, cache in self._records.items()}
        self.refs = [*self._data.values(), *self._states.values()]

    def records(self, name: str) -> PagedCache:
        """The records of that name."""
        return replace(self._records[name], data=self._data[name].view())

    def state(self, name: str) -> Tensor:
        """The state of that name."""
        return self._states[name].view()


def _ref(tensor: Tensor) -> Ref:
    assert isinstance(tensor, FakeTensor), "results are made by the fake device"
    return tensor.ref()


def _take(batch: StepBatch | DraftBatch) -> tuple[dict[str, Any], list[Ref]]:
    """The tensors of a batch as queued work holds them, by field, and all of them."""
    taken: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, FakeTensor):
            taken[field.name] = value.ref()
        elif isinstance(value, Mapping):
            taken[field.name] = {key: _ref(part) for key, part in value.items()}
    refs = [ref for part in taken.values() for ref in (part.values() if isinstance(part, dict) else (part,))]
    return taken, refs


def _give(batch: B, taken: Mapping[str, Any]) -> B:
    """The batch with views of hidden memory."""
    return replace(
        batch,
        **{
            name: {key: ref.view() for key, ref in part.items()} if isinstance(part, dict) else part.view()
            for name, part in taken.items()
        },
    )
