"""Random workloads, and the oracle that they are compared with: each request alone, in one chunk, in a fresh engine.

A workload is a pure function of its seed: requests with arrivals and cancellations, a pool, a budget. `check` runs it
and says where a request got anything else than it gets alone; floats are compared bit for bit. Any model will do:
`HashModel` shows one wrong record, a real one shows rows whose bits depend on their neighbours.

Features that this engine has no setting for are drawn and left out, so a seed means the same requests in all releases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Final

from deepinfer.core.config import EngineConfig
from deepinfer.core.engine import Engine
from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.service import GrammarService
from deepinfer.core.grammar.spec import StructuredOutput
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.core.tokenizer import Tokenizer
from deepinfer.models.interface import Model
from deepinfer.ops.backend import BindContext
from deepinfer.ops.registry import OpTable, find_backend
from deepinfer.testing.facts import Facts, RequestFacts
from deepinfer.testing.scripted_draft import ScriptedDraft

FEATURES: Final[Mapping[str, tuple[Any, ...]]] = {
    "prefix_caching": (True, False),
    "async_scheduling": (True, False),
    "speculation": ("off", "coupled"),
    "num_drafts": (1, 2, 3, 5, 8),
    "draft_schedule": ("adaptive", "fixed"),
}
"""Fields of `EngineConfig` that must not change what a request gets, and the values to draw from."""

PLAIN: Final[Mapping[str, Any]] = {"prefix_caching": False, "async_scheduling": False, "speculation": "off"}
"""What the oracle has."""


@dataclass(frozen=True)
class Shape:
    """What a generator may draw; the defaults suit `HashModel` and keep a workload under a hundred steps.

    Attributes:
        vocab_size: ids in prompts run below it.
        max_requests: requests of a workload.
        max_prompt: tokens of a prompt.
        max_tokens: tokens to generate.
        block_sizes: KV block sizes.
        max_top: most top logprobs.
        texts: stop strings and bad words to draw from; none without a tokenizer.
        forms: structured outputs to draw from, for two requests of five; none without a tokenizer.
    """

    vocab_size: int = 64
    max_requests: int = 6
    max_prompt: int = 40
    max_tokens: int = 12
    block_sizes: tuple[int, ...] = (2, 4, 8, 16)
    max_top: int = 3
    texts: tuple[str, ...] = ()
    forms: tuple[StructuredOutput, ...] = ()


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a workload.

    Attributes:
        prompt: token ids.
        params: how to sample.
        arrival: step before which it is submitted.
        cancel: step before which it is cancelled, None for never.
        chunk_size: most rows of one step, None for the budget.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    cancel: int | None = None
    chunk_size: int | None = None


@dataclass(frozen=True)
class Workload:
    """Requests and the engine they share.

    Attributes:
        seed: repeats it.
        requests: in order of their ids.
        settings: fields of `EngineConfig`.
        features: a value of each of `FEATURES`, also of those that the engine lacks.
        draft_quality: how often a drafted token is the one that will be chosen.
        row_price: what a row is taken to cost, as a share of the step without it, so that an adaptive schedule repeats
            and verifies few drafts or many; None measures, which starts with all, none and half of them.
    """

    seed: int
    requests: tuple[PlannedRequest, ...]
    settings: Mapping[str, Any]
    features: Mapping[str, Any] = field(default_factory=dict)
    draft_quality: float = 0.5
    row_price: float | None = None

    @classmethod
    def generate(cls, seed: int, shape: Shape | None = None) -> Workload:
        """The workload of a seed."""
        shape = shape or Shape()
        rng = random.Random(f"deepinfer.workload.{seed}")
        crowded = rng.random() < 0.3  # many that grow together in few small blocks, so that some give way
        max_len = rng.randint(8, shape.max_prompt + shape.max_tokens + 4)
        stems = [_tokens(rng, rng.randint(1, shape.max_prompt), shape) for _ in range(2)]
        count = shape.max_requests if crowded else rng.randint(1, shape.max_requests)
        requests = tuple(_request(rng, stems, max_len, shape, crowded) for _ in range(count))
        max_len = min(max_len, max(len(r.prompt) + r.params.max_tokens for r in requests) + rng.choice([0, 0, 5]))
        block_size = rng.choice(shape.block_sizes[: 2 if crowded else None])
        least = -(-max_len // block_size)  # enough for the longest request alone
        settings = {
            "block_size": block_size,
            "window_page": rng.choice([p for p in (1, 2, 4, 8) if block_size % p == 0]),
            "max_model_len": max_len,
            "num_kv_blocks": least + rng.randint(0, 3) if crowded else least * rng.choice([1, 2, 8]),
            "max_num_seqs": 8 if crowded else rng.choice([1, 2, 3, 8]),
            "max_num_batched_tokens": rng.choice([7, 16, 64] if crowded else [1, 3, 7, 16, 64]),
            "seed": rng.randrange(3),
        }
        if rng.random() < 0.1:
            too_long = _tokens(rng, max_len + rng.randint(1, 3), shape)
            requests += (PlannedRequest(too_long, requests[0].params),)
        if shape.forms:
            forms = random.Random(f"deepinfer.forms.{seed}")
            requests = tuple(_constrained(forms, request, shape) for request in requests)
        draws = random.Random(f"deepinfer.features.{seed}")
        features = {name: draws.choice(values) for name, values in FEATURES.items()}
        quality = draws.choice([0.0, 0.3, 0.7, 0.95, 1.0])
        return cls(seed, requests, settings, features, quality, draws.choice([None, 0.0, 0.05, 0.2, 0.6]))


class WorkloadError(AssertionError):
    """A workload got something else than the oracle. The message names the seed and every request that differs."""


def check(workload: Workload, model: Model, ops: OpTable | None = None, tokenizer: Tokenizer | None = None) -> Facts:
    """Run a workload and compare every request with the oracle.

    Args:
        workload: what to run.
        model: bound to its ops.
        ops: for the sampler; by default those of the CPU.
        tokenizer: needed where the shape has texts.

    Returns:
        The facts of the run.

    Raises:
        WorkloadError: a request differs, or the pool did not get everything back.
    """
    truth = oracle(workload, model, ops, tokenizer)
    facts = run(workload, model, ops, tokenizer, truth=truth)
    faults = list(facts.leaks)
    for i, (mine, alone) in enumerate(zip(facts.requests, truth, strict=True)):
        difference = mine.difference(alone)
        if difference is not None:
            faults.append(f"request {i}: {difference}")
    if faults:
        raise WorkloadError("\n".join([f"workload {workload.seed} ({_summary(workload)})", *faults]))
    return facts


def run(
    workload: Workload,
    model: Model,
    ops: OpTable | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    truth: Sequence[RequestFacts] | None = None,
    place: Callable[[Model], Model] | None = None,
) -> Facts:
    """Run a workload.

    Args:
        workload: what to run.
        model: bound to its ops.
        ops: for the sampler; by default those of the CPU.
        tokenizer: needed where the shape has texts.
        truth: the oracle's facts, from which drafts are made; without them there is no speculation.
        place: makes of the model, its draft included, the one that the engine runs: `OnFake` on a fake device.

    Raises:
        WorkloadError: the engine makes no progress.
    """
    features = {name: value for name, value in workload.features.items() if name in _config_fields()}
    if features.get("speculation", "off") != "off":
        if truth is None:
            features["speculation"] = "off"
        else:
            model = scripted_draft(workload, truth, model.info.vocab_size).bind(model)
    _compile(workload, model, tokenizer)
    engine = _engine(place(model) if place else model, {**workload.settings, **features}, ops, tokenizer)
    if engine.step_cost is not None and workload.row_price is not None:
        engine.step_cost.assume(1.0, workload.row_price)
    before = _free(engine)
    outputs: dict[int, RequestFacts] = {}
    arrivals = sorted(range(len(workload.requests)), key=lambda i: (workload.requests[i].arrival, i))
    cancels = sorted((r.cancel, i) for i, r in enumerate(workload.requests) if r.cancel is not None)
    patience = 64 + 8 * sum(len(r.prompt) + r.params.max_tokens for r in workload.requests) * (1 + len(arrivals))
    step = 0
    while arrivals or cancels or engine.has_unfinished():
        while arrivals and workload.requests[arrivals[0]].arrival <= step:
            i = arrivals.pop(0)
            refused = _submit(engine, i, workload.requests[i])
            if refused is not None:
                outputs[i] = refused
        while cancels and cancels[0][0] <= step:
            engine.abort(str(cancels.pop(0)[1]))
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = RequestFacts.of(output)
        step += 1
        if step > patience:
            raise WorkloadError(f"workload {workload.seed}: no end after {step} steps; done: {sorted(outputs)}")
    leaks = _leaks(engine, before)
    stats = engine.stats()
    engine.close()
    missing = [i for i in range(len(workload.requests)) if i not in outputs]
    if missing:
        raise WorkloadError(f"workload {workload.seed}: no result for requests {missing}")
    in_order = tuple(outputs[i] for i in range(len(outputs)))
    accepted = sum(engine.speculation.accepted) if engine.speculation is not None else 0
    return Facts(
        in_order,
        stats.num_steps,
        stats.num_preemptions,
        stats.prefix_hit_tokens,
        accepted,
        tuple(leaks),
        stats.num_graph_steps,
    )


def oracle(
    workload: Workload, model: Model, ops: OpTable | None = None, tokenizer: Tokenizer | None = None
) -> tuple[RequestFacts, ...]:
    """What each request gets alone: one chunk, no speculation, no prefix, a pool for everything, a fresh engine."""
    max_len = workload.settings["max_model_len"]
    settings = {
        "block_size": 32,
        "window_page": 16,
        "max_model_len": max_len,
        "num_kv_blocks": -(-max_len // 32),
        "max_num_seqs": 1,
        "max_num_batched_tokens": max_len,
        "seed": workload.settings["seed"],
        **{name: value for name, value in PLAIN.items() if name in _config_fields()},
    }
    found = []
    for i, request in enumerate(workload.requests):
        engine = _engine(model, settings, ops, tokenizer)
        facts = _submit(engine, i, replace(request, chunk_size=None))
        while facts is None:
            for output in engine.step():
                if output.finished:
                    facts = RequestFacts.of(output)
        found.append(facts)
        engine.close()
    return tuple(found)


def scripted_draft(workload: Workload, truth: Sequence[RequestFacts], vocab_size: int) -> ScriptedDraft:
    """A draft that often knows what comes next, as often as the workload's `draft_quality` says."""
    pairs = zip(workload.requests, truth, strict=True)
    sequences = [(*request.prompt, *choice.token_ids) for request, facts in pairs for choice in facts.choices]
    count = workload.features["num_drafts"]

    def guess(token_ids: list[int]) -> tuple[list[int], list[float]]:
        rng = random.Random(f"{workload.seed} {token_ids}")
        size, begun = len(token_ids), tuple(token_ids)
        known = next((s for s in sequences if s[:size] == begun), ())[size : size + count]
        tokens = [rng.randrange(vocab_size) for _ in range(count)]
        for place, token in enumerate(known):
            if rng.random() < workload.draft_quality:
                tokens[place] = token
        return tokens, [rng.uniform(0.01, 0.99) for _ in range(count)]

    return ScriptedDraft(guess, count)


@cache
def cpu_ops() -> OpTable:
    """The ops of the CPU, shared by all engines of the process; a table keeps no state of an engine."""
    backend = find_backend("cpu")
    if backend.runtime is None:
        raise AssertionError("the CPU backend has a runtime")
    runtime = backend.runtime()
    return OpTable(backend, BindContext(runtime.device, runtime, True, 4096), False, {})


@cache
def _config_fields() -> frozenset[str]:
    return frozenset(f.name for f in fields(EngineConfig))


@cache
def _params_fields() -> frozenset[str]:
    return frozenset(f.name for f in fields(SamplingParams))


@cache
def shared_grammars(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarService:
    """Grammars of a vocabulary, shared by all engines of the process: the worker process takes seconds to start."""
    return GrammarService(tokenizer, vocab_size, eos_token_ids, timeout=60)


def _engine(model: Model, settings: Mapping[str, Any], ops: OpTable | None, tokenizer: Tokenizer | None) -> Engine:
    grammars = None
    if tokenizer is not None:
        grammars = shared_grammars(tokenizer, model.info.vocab_size, tuple(model.info.eos_token_ids))
    return Engine(model, EngineConfig(**settings), ops or cpu_ops(), tokenizer, grammars=grammars)


def _compile(workload: Workload, model: Model, tokenizer: Tokenizer | None) -> None:
    """Compile the workload's grammars, so that steps are counted and not seconds."""
    specs = [r.params.structured_output for r in workload.requests if r.params.structured_output is not None]
    if specs and tokenizer is not None:
        service = shared_grammars(tokenizer, model.info.vocab_size, tuple(model.info.eos_token_ids))
        for job in [service.submit(spec, service.source(spec)) for spec in specs]:
            service.compiler.wait([job], 600)


def _submit(engine: Engine, index: int, request: PlannedRequest) -> RequestFacts | None:
    """Submit a request; the facts of its refusal, or None."""
    try:
        engine.add_request(str(index), request.prompt, request.params, seed_key=index, chunk_size=request.chunk_size)
    except RequestError as error:
        return RequestFacts(error=error.code)
    return None


def _free(engine: Engine) -> dict[str, int]:
    blocks = engine.blocks
    return {"blocks": blocks.num_free_blocks, "window pages": blocks.num_free_pages, "slots": blocks.num_free_slots}


def _leaks(engine: Engine, before: Mapping[str, int]) -> list[str]:
    after = _free(engine)
    leaks = [f"{after[name]} {name} are free, {count} were" for name, count in before.items() if after[name] != count]
    try:
        engine.blocks.pool.check()
    except RuntimeError as error:
        leaks.append(f"pool: {error}")
    return leaks


def _summary(workload: Workload) -> str:
    return f"{len(workload.requests)} requests, {dict(workload.settings)}, {dict(workload.features)}"


def _constrained(rng: random.Random, request: PlannedRequest, shape: Shape) -> PlannedRequest:
    """A request that may have to have a form; drawn apart, so that all else is what it is without forms."""
    form = rng.choice(shape.forms)
    if rng.random() >= 2 / 5:
        return request
    return replace(request, params=replace(request.params, structured_output=form, ignore_eos=False))


def _tokens(rng: random.Random, count: int, shape: Shape) -> tuple[int, ...]:
    return tuple(rng.randrange(shape.vocab_size) for _ in range(count))


def _request(
    rng: random.Random, stems: list[tuple[int, ...]], max_len: int, shape: Shape, crowded: bool
) -> PlannedRequest:
    stem = rng.choice(stems)
    prompt = stem[: rng.randint(0, len(stem))] if rng.random() < 0.8 and not crowded else ()
    prompt = (prompt + _tokens(rng, rng.randint(0 if prompt else 1, 12), shape))[:max_len]
    arrival = rng.choice([0, 0, rng.randrange(20)])
    return PlannedRequest(
        prompt,
        _params(rng, shape, crowded),
        arrival,
        arrival + rng.randrange(12) if rng.random() < 0.15 else None,
        rng.choice([None, None, None, 1, 2, 5]),
    )


def _params(rng: random.Random, shape: Shape, crowded: bool) -> SamplingParams:
    least = shape.max_tokens // 2 if crowded else 1
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=rng.choice([-1, -1, 1, 5, shape.vocab_size + 9]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        seed=rng.choice([None, rng.randrange(1 << 64)]),
        max_tokens=rng.choice([0, 1, shape.max_tokens, *[rng.randint(least, shape.max_tokens)] * 4]),
        stop_token_ids=_tokens(rng, rng.choice([0, 0, 2]), shape),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0, shape.max_top]),
        prompt_logprobs=rng.choice([None, None, None, 0, 2]),
    )
    asked = _special(random.Random(rng.random()), shape, params.max_tokens)
    return replace(params, **{name: value for name, value in asked.items() if name in _params_fields()})


def _special(rng: random.Random, shape: Shape, max_tokens: int) -> dict[str, Any]:
    """What three requests of four do not ask for."""
    if rng.random() < 3 / 4:
        return {}

    def ids(count: int) -> tuple[int, ...]:
        return _tokens(rng, count, shape)

    drawn = {
        "n": rng.choice([2, 3]),
        "min_tokens": rng.randint(0, max_tokens),
        "presence_penalty": rng.choice([-2.0, 0.5, 2.0]),
        "frequency_penalty": rng.choice([-2.0, 0.5, 2.0]),
        "repetition_penalty": rng.choice([0.5, 1.5]),
        "logit_bias": dict(zip(ids(3), (-5.0, 2.0, 100.0), strict=True)),
        "allowed_token_ids": ids(rng.choice([1, 4, 20])),
        "golden_token_ids": [rng.choice([-1, token]) for token in ids(rng.randint(1, 4))],
        "logprob_token_ids": ids(2),
        "logprobs_mode": "processed_logprobs",
    }
    if shape.texts:
        drawn["stop"] = [rng.choice(shape.texts) for _ in range(rng.randint(1, 2))]
        drawn["include_stop_str_in_output"] = rng.random() < 0.5
        drawn["bad_words"] = [rng.choice(shape.texts)]
    return {name: drawn[name] for name in rng.sample(sorted(drawn), rng.choice([1, 1, 2, 3]))}
