"""Level 2: one layer of each kind, prefill equal to decode.

A small random model runs the same tokens in one chunk, in chunks of several sizes, as decode rows and as verify rows,
alone and between other sequences. What every layer read and wrote is kept, so the first layer that differs is named, by
its kind. With bfloat16 and quantised weights the bits must be equal; with float32 and no rounding the streams are also
held against the same model on the references alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.subject import context
from deepinfer.conformance.suite import Session
from deepinfer.conformance.values import first_difference, same_bits
from deepinfer.core.caches import CacheStore
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.deepseek_v41_flash.config import TextConfig
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.deepseek_v41_flash.model import DeepseekV41Flash
from deepinfer.models.interface import StepBatch
from deepinfer.models.registry import LoadOptions, load_model
from deepinfer.ops.backend import Availability, Backend
from deepinfer.ops.host import HostRuntime
from deepinfer.ops.registry import OpTable
from deepinfer.ops.runtime import Runtime

TOKENS = 40
BLOCK, PAGE = 32, 8
SCHEDULES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("MN-1 chunks of 1", (1,)),
    ("MN-1 chunks of 3", (3,)),
    ("MN-1 chunks of 8", (8,)),
    ("verify rows of 6", (6,)),
    ("a chunk, then decode rows", (27, 1)),
    ("uneven chunks", (5, 1, 11, 2)),
)
SIMILAR = 1e-4
Taps = dict[str, Tensor]


@dataclass(frozen=True)
class Layers:
    """A small model on one backend."""

    model: DeepseekV41Flash
    text: TextConfig
    runtime: Runtime

    def run(self, steps: Sequence[Sequence[tuple[int, Sequence[int]]]], sequences: int) -> list[Taps]:
        """Run steps of (sequence, new tokens); returns what every layer showed, by sequence, rows in order."""
        lengths = [0] * sequences
        ids: list[list[int]] = [[] for _ in range(sequences)]
        shown: list[dict[str, list[Tensor]]] = [{} for _ in range(sequences)]
        longest = max(sum(len(new) for step in steps for s, new in step if s == seq) for seq in range(sequences))
        blocks, pages = -(-longest // BLOCK), -(-longest // PAGE)
        caches = CacheStore(
            self.model.cache_spec,
            self.runtime,
            num_blocks=sequences * blocks,
            block_size=BLOCK,
            num_window_pages=sequences * pages,
            window_page=PAGE,
            num_slots=sequences,
        )
        for step in steps:
            batch = self._batch(step, lengths, ids, blocks, pages)
            bounds = batch.cu_seqlens_q.tolist()

            def tap(name: str, value: Tensor, step: Any = step, bounds: Any = bounds) -> None:
                host = self.runtime.to_host(value)
                if host.shape[:1] != (bounds[-1],):
                    return
                for place, (sequence, _) in enumerate(step):
                    rows = host[bounds[place] : bounds[place + 1]].clone()
                    shown[sequence].setdefault(name, []).append(rows)

            self.model.forward(self._moved(batch), caches, tap)
            for sequence, new in step:
                lengths[sequence] += len(new)
                ids[sequence] += list(new)
        return [{name: _stacked(parts) for name, parts in taps.items()} for taps in shown]

    def _batch(
        self,
        step: Sequence[tuple[int, Sequence[int]]],
        lengths: list[int],
        ids: list[list[int]],
        blocks: int,
        pages: int,
    ) -> StepBatch:
        counts = [len(new) for _, new in step]
        row_to_seq = torch.repeat_interleave(torch.arange(len(step)), torch.tensor(counts))
        starts = torch.tensor([lengths[s] for s, _ in step])
        cu = torch.tensor([0, *counts]).cumsum(0)
        positions = torch.arange(int(cu[-1])) - cu[row_to_seq] + starts[row_to_seq]
        block_tables = torch.tensor([[1 + s * blocks + c for c in range(blocks)] for s, _ in step])
        window_tables = torch.tensor([[1 + s * pages + c for c in range(pages)] for s, _ in step])
        ratios, slots = self.model.cache_spec.ratios, []
        for ratio in ratios:
            per_block, entry = BLOCK // ratio, positions // ratio
            slot = block_tables[row_to_seq, entry // per_block] * per_block + entry % per_block
            slots.append(torch.where((positions + 1) % ratio == 0, slot, -1).int())
        packed = torch.stack(slots)
        depth = self.model.cache_spec.ngram - 1
        history = [([*reversed(ids[s])] + [-1] * depth)[:depth] for s, _ in step]
        return StepBatch(
            input_ids=torch.tensor([token for _, new in step for token in new]).int(),
            positions=positions.int(),
            row_to_seq=row_to_seq.int(),
            cu_seqlens_q=cu.int(),
            seq_lens=(starts + torch.tensor(counts)).int(),
            block_tables=block_tables.int(),
            window_tables=window_tables.int(),
            window_first_page=torch.zeros(len(step), dtype=torch.int32),
            window_page=PAGE,
            window_slots=(window_tables[row_to_seq, positions // PAGE] * PAGE + positions % PAGE).int(),
            ratio_slots={ratio: packed[index] for index, ratio in enumerate(ratios)},
            packed_ratio_slots=packed,
            state_slots=torch.tensor([1 + s for s, _ in step]).int(),
            history=torch.tensor(history).reshape(len(step), depth).int(),
            logits_rows=torch.arange(int(cu[-1])).int(),
            max_seq_len=int((starts + torch.tensor(counts)).max()),
        )

    def _moved(self, batch: StepBatch) -> StepBatch:
        if self.runtime.device.type == "cpu":
            return batch
        from deepinfer.conformance.values import transform

        moved: StepBatch = transform(batch, self.runtime.to_device)
        return moved


def _stacked(parts: list[Tensor]) -> Tensor:
    """Rows below each other; selections of fewer columns are filled up with -1."""
    width = max(part.shape[-1] for part in parts)
    if parts[0].dtype == torch.int32:
        parts = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in parts]
    return torch.cat(parts)


def run_layers(session: Session) -> None:
    """Run level 2."""
    for quant, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        name = "bf16, quantised" if quant else "f32"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            make_tiny(path, seed=3, quant=quant)
            table = OpTable(session.backend, context(session.runtime), overrides={})
            layers = load_layers(path, table, session.runtime, dtype, quant)
            for result in _cases(session, layers, name):
                session.add(result)
            if not quant:
                reference = OpTable(_reference_backend(), context(HostRuntime()), overrides={})
                host = load_layers(path, reference, HostRuntime(), dtype, quant)
                for result in _against_reference(session, layers, host):
                    session.add(result)


def load_layers(path: Path, table: OpTable, runtime: Runtime, dtype: torch.dtype, rounding: bool) -> Layers:
    """The small model, bound to `table`."""
    options = LoadOptions(dtype=dtype, max_model_len=256, kv_rounding=rounding, activation_rounding=rounding)
    model = load_model(path, table, options, Tokenizer.from_dir(path))
    assert isinstance(model, DeepseekV41Flash)
    from deepinfer.models.deepseek_v41_flash.config import ModelConfig

    return Layers(model, ModelConfig.from_dir(path).text, runtime)


def _reference_backend() -> Backend:
    return Backend("reference", "cpu", probe=lambda: Availability(True))


def tokens_of(text: TextConfig, count: int, seed: int) -> list[int]:
    """Ordinary token ids."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(3, text.vocab_size - 20, (count,), generator=gen).tolist()


def chunks(tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut tokens in chunks; the sizes repeat, the last one for ever."""
    start, index = 0, 0
    while start < len(tokens):
        size = sizes[min(index, len(sizes) - 1)] if sizes[-1] == 1 and len(sizes) == 2 else sizes[index % len(sizes)]
        yield tokens[start : start + size]
        start, index = start + size, index + 1


def _cases(session: Session, layers: Layers, numerics: str) -> Iterator[CaseResult]:
    tokens = tokens_of(layers.text, TOKENS, 1)
    kinds = kinds_of(layers.text)
    wanted = [
        (label, sizes)
        for label, sizes in SCHEDULES
        if any(session.wants(kind, f"{label}, {numerics}") for kind in kinds)
    ]
    whole = layers.run([[(0, tokens)]], 1)[0] if wanted else {}
    for label, sizes in wanted:
        other = layers.run([[(0, part)] for part in chunks(tokens, sizes)], 1)[0]
        yield from _by_kind(session, kinds, f"{label}, {numerics}", other, whole)
    label = f"between other sequences, {numerics}"
    if any(session.wants(kind, label) for kind in kinds):
        whole = whole or layers.run([[(0, tokens)]], 1)[0]
        yield from _by_kind(session, kinds, label, _crowded(layers, tokens), whole)
    label = f"MN-4 64 consecutive lengths, {numerics}"
    if any(session.wants(kind, label) for kind in kinds):
        yield from _every_length(session, layers, kinds, label)


def _crowded(layers: Layers, tokens: list[int]) -> Taps:
    """The sequence in the middle of others that start and end at other times."""
    first, second = tokens_of(layers.text, 30, 2), tokens_of(layers.text, 50, 3)
    steps: list[list[tuple[int, Sequence[int]]]] = [
        [(0, first[:9]), (1, tokens[:7])],
        [(2, second[:20]), (1, tokens[7:8]), (0, first[9:])],
        [(1, tokens[8:30])],
        [(2, second[20:]), (1, tokens[30:])],
    ]
    return layers.run(steps, 3)[1]


def _every_length(session: Session, layers: Layers, kinds: dict[str, list[int]], label: str) -> Iterator[CaseResult]:
    """The last row of every prompt length is the same row of the longest prompt."""
    longest = 64 + 33
    tokens = tokens_of(layers.text, longest, 4)
    whole = layers.run([[(0, tokens)]], 1)[0]
    last: dict[str, list[Tensor]] = {}
    lengths = range(33, longest)
    for length in lengths:
        for name, rows in layers.run([[(0, tokens[:length])]], 1)[0].items():
            last.setdefault(name, []).append(rows[-1:])
    rows = torch.tensor([length - 1 for length in lengths])
    got = {name: _stacked(parts) for name, parts in last.items()}
    yield from _by_kind(session, kinds, label, got, {name: value[rows] for name, value in whole.items()})


def kinds_of(text: TextConfig) -> dict[str, list[int]]:
    """Layers by kind, as the specification's section 6.7 names them."""
    kinds: dict[str, list[int]] = {}
    for layer in range(text.num_layers):
        ratio = text.compress_ratios[layer]
        if not ratio:
            kind = "window only"
        elif layer in text.kv_source_layer_ids:
            kind = f"full, ratio {ratio}"
        else:
            kind = "reindex" if layer in text.index_source_layer_ids else "reuse"
        engram = " with Engram" if layer in text.engram_layer_ids else ""
        kinds.setdefault(f"layer: {kind}{engram}", []).append(layer)
    return kinds


def _by_kind(session: Session, kinds: dict[str, list[int]], case: str, got: Taps, want: Taps) -> Iterator[CaseResult]:
    for kind, numbers in kinds.items():
        if not session.wants(kind, case):
            continue
        result = CaseResult(2, kind, case, session.backend.name, True)
        for layer in numbers:
            for name in sorted(n for n in want if n.startswith(f"layers.{layer}.")):
                mine, reference = _same_width(got[name], want[name])
                equal = same_bits(mine, reference)
                result.checks.append(Check(name, equal, "" if equal else first_difference(mine, reference)))
        yield result.settle()


def _same_width(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    width = max(left.shape[-1], right.shape[-1]) if left.dtype == torch.int32 else 0
    if not width:
        return left, right
    pad = torch.nn.functional.pad
    return (
        pad(left, (0, width - left.shape[-1]), value=-1),
        pad(right, (0, width - right.shape[-1]), value=-1),
    )


def _against_reference(session: Session, layers: Layers, host: Layers) -> Iterator[CaseResult]:
    """float32 without rounding: what every kind writes is what the references write."""
    kinds = kinds_of(layers.text)
    case = "the references' values, f32"
    if not any(session.wants(kind, case) for kind in kinds):
        return
    tokens = tokens_of(layers.text, TOKENS, 5)
    got, want = layers.run([[(0, tokens)]], 1)[0], host.run([[(0, tokens)]], 1)[0]
    for kind, numbers in kinds.items():
        result = CaseResult(2, kind, case, session.backend.name, True)
        for layer in numbers:
            for part in ("streams_in", "attn_out", "ffn_out"):
                x, y = got[f"layers.{layer}.{part}"].double(), want[f"layers.{layer}.{part}"].double()
                sim = float((x - y).square().sum() / (x.square().sum() + y.square().sum()))
                result.checks.append(Check(f"layers.{layer}.{part}", sim <= SIMILAR, f"1 - similarity is {sim:.3g}"))
        yield result.settle()
