"""Levels 3 and 4: the engine on a backend. The oracle is the same request alone, whole, with nothing clever.

A small random V4.1 checkpoint runs through the engine on the backend under test, in every way that must not change an
answer. Tokens, logprobs and logits are compared bit for bit with the backend's own oracle run.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from deepinfer.conformance.results import CaseResult, Check
from deepinfer.conformance.suite import Session
from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.sampler import Sampler
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.entrypoints.llm import LLM
from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny
from deepinfer.models.registry import LoadOptions, load_model
from deepinfer.ops.backend import BindContext
from deepinfer.ops.registry import OpTable
from deepinfer.testing.facts import RequestFacts

REQUESTS = 12
SETTINGS: dict[str, Any] = {
    "max_model_len": 192,
    "block_size": 16,
    "window_page": 8,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "prefix_caching": False,
}
Verdict = Iterator[Check]


class Bench:
    """Engines of one checkpoint on the backend under test, and the workload."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session = session
        self.folder = folder
        rng = random.Random(3)
        self.prompts = [[rng.randrange(3, 300) for _ in range(rng.randrange(1, 50))] for _ in range(REQUESTS)]
        self.params = [
            SamplingParams(
                temperature=rng.choice([0.0, 0.8, 1.3]),
                top_k=rng.choice([-1, 7, 40]),
                top_p=rng.choice([1.0, 0.9]),
                seed=index,
                max_tokens=rng.randrange(2, 9),
                logprobs=1,
                ignore_eos=True,
            )
            for index in range(REQUESTS)
        ]

    @cached_property
    def alone(self) -> list[RequestFacts]:
        """What each request got alone."""
        with self.engine() as llm:
            return [self.run(llm, [p], [s])[0] for p, s in zip(self.prompts, self.params, strict=True)]

    @contextmanager
    def engine(self, folder: Path | None = None, **settings: Any) -> Iterator[LLM]:
        """An engine with `SETTINGS` and what is given, closed at the end."""
        llm = self.build(folder, **settings)
        try:
            yield llm
        finally:
            llm.close()

    def build(self, folder: Path | None = None, **settings: Any) -> LLM:
        """An engine that the caller closes."""
        path = folder or self.folder
        config = EngineConfig(model=str(path), backend=self.session.backend.name, **(SETTINGS | settings))
        runtime = self.session.runtime
        bind = BindContext(runtime.device, runtime, config.batch_invariant, config.max_num_batched_tokens)
        ops = OpTable(self.session.backend, bind)
        tokenizer = Tokenizer.from_dir(path)
        options = LoadOptions(
            dtype=getattr(torch, config.dtype),
            max_model_len=config.max_model_len,
            kv_rounding=config.kv_rounding,
            activation_rounding=config.rounds_activations,
            draft=config.speculation != "off",
        )
        return LLM.from_engine(Engine(load_model(path, ops, options, tokenizer), config, ops, tokenizer))

    def run(self, llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestFacts]:
        """What each request got."""
        return [RequestFacts.of(output) for output in llm.generate(list(prompts), list(params))]

    def same(self, order: Sequence[int] | None = None, **settings: Any) -> Verdict:
        """All requests together equal each alone, and everything is given back."""
        order = range(REQUESTS) if order is None else order
        with self.engine(**settings) as llm:
            got = self.run(llm, [self.prompts[i] for i in order], [self.params[i] for i in order])
            yield equal("equals alone", got, [self.alone[i] for i in order])
            yield returned(llm)


def run_semantics(session: Session) -> None:
    """Level 3: chunks, mixed steps, preemption, rollback, prefix reuse, cancel, and one request's NaN."""
    cases: dict[str, Callable[[Bench], Verdict]] = {
        "MN-1 chunks and decode give the same logits": _chunks,
        "a mixed batch equals each request alone": lambda bench: bench.same(max_num_batched_tokens=24),
        "KV-2 preempted requests resume to the same answer": _preemption,
        "asynchronous steps give the same tokens": lambda bench: bench.same(async_scheduling=True),
        "captured decode steps give the bits of eager ones": _captured,
        "steps that are launched ahead wait for nothing": _waits,
        "rejected drafts are rolled back": _rollback,
        "a reused prefix gives the same answer": _prefix,
        "cancelled requests give back everything": _cancel,
        "SA-5 a NaN row ends its own request": _nan,
    }
    run_cases(session, 3, cases)


def run_determinism(session: Session) -> None:
    """Level 4: any order and budget, repeats, seeds, ties, and draws that follow their distribution."""
    shuffled = random.Random(4).sample(range(REQUESTS), REQUESTS)
    cases: dict[str, Callable[[Bench], Verdict]] = {
        "any order": lambda bench: bench.same(shuffled),
        "any budget": lambda bench: _each(bench, "max_num_batched_tokens", (7, 33, 512)),
        "LD-2 any number of places": lambda bench: _each(bench, "max_num_seqs", (1, 3, 16)),
        "any block size": lambda bench: _each(bench, "block_size", (8, 32)),
        "SA-1 seeded beside unseeded requests": _seeds,
        "speculation and asynchronous steps together": lambda bench: bench.same(
            speculation="coupled", draft_schedule="fixed", async_scheduling=True, max_num_batched_tokens=40
        ),
        "D-11 greedy takes the lowest of equal ids": _ties,
        "draws follow the distribution": _distribution,
    }
    run_cases(session, 4, cases)


def run_cases(session: Session, level: int, cases: dict[str, Callable[[Bench], Verdict]]) -> None:
    """Run the cases that are wanted, on one checkpoint."""
    wanted = {name: case for name, case in cases.items() if session.wants("engine", name)}
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tiny"
        make_tiny(folder, seed=17)
        bench = Bench(session, folder)
        for name, case in wanted.items():
            result = CaseResult(level, "engine", name, session.backend.name, True)
            try:
                result.checks.extend(case(bench))
            except Exception as error:  # whatever a backend raises, the report must say it
                result.checks.append(Check("runs", False, f"{type(error).__name__}: {error}"))
            session.add(result.settle())


def equal(name: str, got: Sequence[RequestFacts], want: Sequence[RequestFacts]) -> Check:
    """Whether requests got what they should."""
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        difference = mine.difference(theirs)
        if difference is not None:
            return Check(name, False, f"request {index}: {difference}")
    return Check(name, True)


def returned(llm: LLM) -> Check:
    """Whether blocks, window pages and sequence slots are all free again."""
    stats, pool = llm.stats, llm.engine.blocks.pool
    pool.check()
    totals = {
        "blocks": (stats.num_blocks, stats.num_free_blocks),
        "window pages": (pool.num_window_pages, pool.num_free_pages),
        "sequence slots": (pool.num_slots, pool.num_free_slots),
    }
    held = [f"{total - free} of {total} {what}" for what, (total, free) in totals.items() if total != free]
    return Check("memory", not held, f"{', '.join(held)} are still held")


def _each(bench: Bench, setting: str, values: Sequence[int]) -> Verdict:
    for value in values:
        for check in bench.same(None, **{setting: value}):
            yield replace(check, name=f"{setting}={value} {check.name}")


def _chunks(bench: Bench) -> Verdict:
    ids = max(bench.prompts, key=len)
    with bench.engine() as llm:
        whole = llm.logits(ids)
        for size in (1, 3, 7, 16):
            yield Check(f"chunk {size}", torch.equal(llm.logits(ids, chunk_size=size), whole), "logits differ")
        decode = llm.logits(ids, decode_from=len(ids) // 2)
        yield Check("decode", torch.equal(decode, whole), "logits differ")


def _preemption(bench: Bench) -> Verdict:
    longer = [replace(p, max_tokens=30) for p in bench.params]
    with bench.engine(max_model_len=96) as llm:
        want = bench.run(llm, bench.prompts, longer)
    with bench.engine(max_model_len=96, num_kv_blocks=9) as llm:
        yield equal("equals a large pool", bench.run(llm, bench.prompts, longer), want)
        yield Check("preempts", llm.stats.num_preemptions > 0, "nobody was preempted")
        yield returned(llm)


def _captured(bench: Bench) -> Verdict:
    """Where a device or its ops cannot be captured, both engines run the same steps and no graph is asked for."""
    longer = [replace(p, max_tokens=24) for p in bench.params]
    drafting: dict[str, Any] = {"speculation": "coupled", "draft_schedule": "fixed"}
    for label, settings in (("alone", {}), ("with drafts", drafting)):
        with bench.engine(graphs=False, **settings) as llm:
            want = bench.run(llm, bench.prompts, longer)
        with bench.engine(**settings) as llm:
            captures = not llm.stats.graph_reason
            yield equal(f"equal, {label}", bench.run(llm, bench.prompts, longer), want)
            yield returned(llm)
            if captures:
                stats = llm.stats
                said = stats.graph_reason or f"steps without a graph: {stats.num_eager_steps}"
                yield Check(f"replays, {label}", stats.num_graph_steps > 0 and not stats.graph_reason, said)


def _waits(bench: Bench) -> Verdict:
    """Once kernels are loaded; by the guard, and by the driver where that can tell."""
    guard = bench.session.runtime.sync_guard
    drafting: dict[str, Any] = {"speculation": "coupled", "draft_schedule": "fixed"}
    for label, settings in (("alone", {}), ("with drafts", drafting)):
        with bench.engine(async_scheduling=True, **settings) as llm:
            want = bench.run(llm, bench.prompts, bench.params)
            with guard.watched():
                yield equal(f"equal, {label}", bench.run(llm, bench.prompts, bench.params), want)
            stats = llm.stats
            other = stats.permitted_waits.keys() - _OWN_WAITS
            waits = not stats.is_async or not other
            yield Check(f"waits, {label}", waits, f"a launch waited, with leave: {', '.join(sorted(other))}")


_OWN_WAITS = {
    "a decode step is captured",
    "a step's buffers are still being copied",
    "rows of a table on the host are read there",
}
"""What a launch may wait for: a new graph, memory that it is about to write, and ids that the host must look up."""


def _rollback(bench: Bench) -> Verdict:
    yield from bench.same(speculation="coupled", draft_schedule="fixed")
    with bench.engine(speculation="coupled", draft_schedule="fixed") as llm:
        bench.run(llm, bench.prompts, bench.params)
        stats = llm.engine.speculation
        rejected = stats is not None and sum(stats.verified) > sum(stats.accepted)
        yield Check("rejects", rejected, "no draft was rejected, so nothing was rolled back")


def _prefix(bench: Bench) -> Verdict:
    stem = [7 + i % 200 for i in range(70)]
    prompts = [[*stem, *prompt] for prompt in bench.prompts[:6]]
    with bench.engine() as llm:
        want = bench.run(llm, prompts, bench.params[:6])
    with bench.engine(prefix_caching=True) as llm:
        first = bench.run(llm, prompts[:1], bench.params[:1])
        rest = llm.generate(prompts[1:], bench.params[1:6])
        yield equal("equals without reuse", first + [RequestFacts.of(o) for o in rest], want)
        hits = sum(output.num_cached_tokens or 0 for output in rest)
        yield Check("hits", hits > 0, "no prompt token was reused")
        yield returned(llm)


def _cancel(bench: Bench) -> Verdict:
    for at in (1, 2, 4):
        with bench.engine(async_scheduling=at == 2) as llm:
            engine = llm.engine
            for index, (prompt, params) in enumerate(zip(bench.prompts, bench.params, strict=True)):
                engine.add_request(str(index), prompt, params)
            done: dict[str, RequestFacts] = {}
            step = 0
            while engine.has_unfinished():
                step += 1
                for output in engine.step():
                    if output.finished:
                        done[output.request_id] = RequestFacts.of(output)
                if step == at:
                    for index in range(0, REQUESTS, 2):
                        engine.abort(str(index))
            kept = range(1, REQUESTS, 2)
            got = [done[str(i)] for i in kept]
            yield equal(f"others, cancelled at step {at}", got, [bench.alone[i] for i in kept])
            yield returned(llm)


def _nan(bench: Bench) -> Verdict:
    """A token whose embedding is NaN stands for any numerical fault."""
    poison = 250
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "nan"
        make_tiny(folder, seed=17)
        for shard in sorted(folder.glob("*.safetensors")):
            tensors = load_file(str(shard))
            if "embed.weight" in tensors:
                tensors["embed.weight"][poison] = float("nan")
                save_file(tensors, str(shard))
        healthy = [i for i, prompt in enumerate(bench.prompts) if poison not in prompt]
        prompts = [bench.prompts[i] for i in healthy]
        params = [bench.params[i] for i in healthy]
        with bench.engine(folder) as llm:
            alone = [bench.run(llm, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
        with bench.engine(folder, max_num_batched_tokens=64) as llm:
            got = bench.run(llm, [*prompts, [5, poison, 6]], [*params, SamplingParams(max_tokens=4)])
            yield Check("typed error", got[-1].error == "numerical_error", f"the error is {got[-1].error}")
            yield equal("others", got[:-1], alone)
            yield returned(llm)


def _seeds(bench: Bench) -> Verdict:
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=8, ignore_eos=True)
    unseeded = replace(seeded, seed=None)
    prompt = bench.prompts[0]
    with bench.engine() as llm:
        want = bench.run(llm, [prompt], [seeded])
        for order in ([seeded, unseeded], [unseeded, seeded]):
            got = bench.run(llm, [prompt, prompt], order)
            yield equal("seeded", [got[order.index(seeded)]], want)
        free = bench.run(llm, [prompt] * 8, [unseeded] * 8)
        different = len({facts.choices[0].token_ids for facts in free}) > 1
        yield Check("SA-2 unseeded differ", different, "eight unseeded requests drew the same tokens")


def _sampler(bench: Bench) -> Sampler:
    runtime = bench.session.runtime
    bind = BindContext(runtime.device, runtime)
    return Sampler(OpTable(bench.session.backend, bind), num_slots=4)


def _ties(bench: Bench) -> Verdict:
    sampler = _sampler(bench)
    sampler.set_slot(1, SamplingParams(temperature=0.0), 1)
    logits = torch.zeros(3, 97)
    logits[1, 40:60] = 2.0
    logits[2] = -torch.inf
    logits[2, 96] = -5.0
    there = bench.session.runtime.to_device(logits)
    got = sampler.sample(there, np.ones(3, np.int32), np.arange(3, dtype=np.int32)).tolist()
    yield Check("lowest id", got == [0, 40, 96], f"got {got}, want [0, 40, 96]")


def _distribution(bench: Bench) -> Verdict:
    """Chi-square of 20,000 draws from eight ids: 1 in 10,000 correct backends would fail."""
    sampler = _sampler(bench)
    weights = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0, 0.5, 0.25, 0.25])
    rows = 20_000
    logits = bench.session.runtime.to_device(weights.log().repeat(rows, 1))
    sampler.set_slot(1, SamplingParams(temperature=1.0), 77)
    tokens = sampler.sample(logits, np.ones(rows, np.int32), np.arange(rows, dtype=np.int32))
    expected = (weights / weights.sum() * rows).numpy()
    counts = np.bincount(tokens, minlength=8)
    chi = float(((counts - expected) ** 2 / expected).sum())
    yield Check("chi-square", chi < 29.9, f"{chi:.1f} with 7 degrees of freedom; counts {counts.tolist()}")
