"""`deepinfer eval`: a suite of tasks through the engine, judged by rule.

Every item is answered by the engine as a user's chat request would be, at temperature 0. The digest of all answers
tells whether two runs gave the same tokens, so one command with two settings compares them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from deepinfer.core.config import EngineConfig, parse_settings
from deepinfer.core.errors import ConfigError
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.eval_tasks import SUITES, Item, TaskSpec, make_items
from deepinfer.entrypoints.terminal import say
from deepinfer.ops.registry import find_backend

if TYPE_CHECKING:
    from deepinfer.core.speculation import SpeculationStats
    from deepinfer.entrypoints.llm import LLM

_PROMPT_ROOM = 64
"""Tokens that a chat prompt may add to a question."""


@dataclass
class TaskScore:
    """How one task went.

    Attributes:
        total: items asked.
        correct: right answers.
        failed: items that the engine could not serve; they count as wrong.
        wrong: a few wrong answers, for people: question, what was right, what was said.
    """

    total: int = 0
    correct: int = 0
    failed: int = 0
    wrong: list[dict[str, str]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of right answers; NaN without items."""
        return self.correct / self.total if self.total else float("nan")


@dataclass
class Evaluation:
    """The result of a suite.

    Attributes:
        model: the checkpoint folder.
        suite: its name.
        settings: engine settings other than the defaults, and the backend and dtype that were used.
        tasks: scores by task.
        skipped: tasks whose items are longer than the model takes, and why.
        digest: of all answers' token ids in order; equal for equal tokens.
        num_generated_tokens: of all answers.
        seconds: that answering took.
        speculation: acceptance by place, mean of accepted drafts per block, and calibration; None without.
        answers: token ids of each item's answer, in order; None where it was not served. Not part of the JSON.
        logprobs: log probability of each answer, where asked for. Not part of the JSON.
    """

    model: str
    suite: str
    settings: dict[str, Any]
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    num_generated_tokens: int = 0
    seconds: float = 0.0
    speculation: dict[str, Any] | None = None
    answers: list[list[int] | None] = field(default_factory=list, repr=False)
    logprobs: list[float | None] = field(default_factory=list, repr=False)

    @property
    def total(self) -> TaskScore:
        """All tasks together."""
        scores = self.tasks.values()
        return TaskScore(sum(s.total for s in scores), sum(s.correct for s in scores), sum(s.failed for s in scores))

    @property
    def exit_status(self) -> int:
        """0 when the engine served every item, right or wrong; 1 otherwise."""
        return 1 if self.total.failed else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what has no value is None."""
        scores = {name: asdict(score) | {"accuracy": _finite(score.accuracy)} for name, score in self.tasks.items()}
        total = asdict(self.total) | {"accuracy": _finite(self.total.accuracy)}
        del total["wrong"]
        facts = asdict(self) | {"tasks": scores, "total": total}
        del facts["answers"], facts["logprobs"]
        return facts


@dataclass(frozen=True)
class EvalCommand:
    """`deepinfer eval`.

    Attributes:
        model: checkpoint folder; empty to take it from file or environment.
        suite: a key of `SUITES`.
        tasks: names in it; empty for all.
        limit: at most so many items of each task.
        settings: engine settings that were given.
        config: file of settings.
        settings_by_name: further ones, as `name=value`.
        as_json: print JSON instead of tables.
        show_wrong: wrong answers to show of each task.
    """

    model: str
    suite: str
    settings: dict[str, Any]
    tasks: Sequence[str] = ()
    limit: int | None = None
    config: Path | None = None
    settings_by_name: Sequence[str] = ()
    as_json: bool = False
    show_wrong: int = 0

    def run(self) -> int:
        """Do it; the exit status.

        Raises:
            ConfigError: settings that contradict each other, no model, or a model that takes none of the questions.
        """
        specs = chosen_tasks(self.suite, self.tasks)
        settings = parse_settings(self.settings_by_name) | self.settings
        model = self.model or settings.pop("model", "")
        config = EngineConfig.load(model, config=self.config, **settings)
        if config.speculation != "off" and "draft_schedule" not in settings:
            config = replace(config, draft_schedule="fixed")  # a schedule would leave places unverified, and unmeasured
        if not config.model:
            raise ConfigError("no model: give --model DIR, or set DEEPINFER_MODEL")
        from deepinfer.entrypoints.llm import LLM

        with LLM(config=config) as llm:
            used = {"backend": find_backend(config.backend).name, "dtype": config.dtype}
            result = Evaluation(config.model, self.suite, _changed(config) | used)
            evaluate(llm, specs, result, limit=self.limit, keep_wrong=self.show_wrong, progress=not self.as_json)
        if not result.tasks:
            reasons = "; ".join(f"{name}: {why}" for name, why in result.skipped.items())
            raise ConfigError(f"nothing was asked: {reasons}; raise max_model_len, or choose other tasks")
        if self.as_json:
            print(json.dumps(result.as_dict(), indent=2, ensure_ascii=False))
        else:
            _print(result)
        return result.exit_status


def chosen_tasks(suite: str, names: Sequence[str] = ()) -> dict[str, TaskSpec]:
    """Tasks of a suite by name.

    Raises:
        ConfigError: no such suite, or no such tasks in it.
    """
    if suite not in SUITES:
        raise ConfigError(f"--suite {suite!r} is not one of {', '.join(SUITES)}")
    unknown = [name for name in names if name not in SUITES[suite]]
    if unknown:
        raise ConfigError(f"--task {', '.join(unknown)}: suite {suite!r} has {', '.join(SUITES[suite])}")
    return {name: spec for name, spec in SUITES[suite].items() if not names or name in names}


def evaluate(
    llm: LLM,
    specs: Mapping[str, TaskSpec],
    result: Evaluation,
    *,
    limit: int | None = None,
    keep_wrong: int = 0,
    progress: bool = False,
    logprobs: bool = False,
) -> None:
    """Ask every item and note what became of it in `result`.

    Args:
        llm: a model with a tokenizer and a chat format.
        specs: tasks by name.
        result: filled in.
        limit: at most so many items of each task.
        keep_wrong: wrong answers to keep of each task.
        progress: show a progress bar.
        logprobs: note the log probabilities of answers.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer; an evaluation asks in words")
    room = llm.config.max_model_len or llm.engine.model.info.max_position
    items: list[tuple[str, Item]] = []
    for name, spec in specs.items():
        if spec.pass_key_tokens and spec.pass_key_tokens + _PROMPT_ROOM + spec.max_tokens > room:
            result.skipped[name] = f"its questions have {spec.pass_key_tokens} tokens, and the model takes {room}"
            continue
        result.tasks[name] = TaskScore()
        items += [(name, item) for item in make_items(spec, name, lambda text: len(tokenizer.encode(text)), limit)]
    prepared = [llm.prompts.read_chat(item.request) for _, item in items]
    wanted = 0 if logprobs else None
    params = [SamplingParams(temperature=0.0, max_tokens=specs[name].max_tokens, logprobs=wanted) for name, _ in items]
    start = time.monotonic()
    prompts = [{"prompt_token_ids": p.token_ids} for p in prepared]
    outputs = llm.generate(prompts, params, progress=progress and bool(prompts))
    result.seconds = time.monotonic() - start
    digest = blake2s(digest_size=16)
    for (name, item), prompt, output in zip(items, prepared, outputs, strict=True):
        score = result.tasks[name]
        score.total += 1
        if output.error is not None:
            score.failed += 1
            result.answers.append(None)
            result.logprobs.append(None)
            said = f"error: {output.error}"
        else:
            ids = output.outputs[0].token_ids
            digest.update(json.dumps(ids).encode())
            result.answers.append(list(ids))
            result.logprobs.append(output.outputs[0].cumulative_logprob)
            result.num_generated_tokens += len(ids)
            message = llm.prompts.read_answer(prompt, output.outputs[0])
            if item.accepts(message.content, message.tool_calls):
                score.correct += 1
                continue
            said = message.content + "".join(f" {call.name}({call.arguments})" for call in message.tool_calls)
        if len(score.wrong) < keep_wrong:
            score.wrong.append({"question": item.question, "right": _right(item), "said": said})
    result.digest = digest.hexdigest()
    stats = llm.stats.speculation
    result.speculation = None if stats is None else _speculation(stats)


def _changed(config: EngineConfig) -> dict[str, Any]:
    """Settings other than their defaults, wherever they were given."""
    return {
        f.name: value for f in fields(config) if f.name != "model" and (value := getattr(config, f.name)) != f.default
    }


def _right(item: Item) -> str:
    calls = (f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in item.answer.calls)
    return item.answer.content + " ".join(calls)


def _speculation(stats: SpeculationStats) -> dict[str, Any]:
    blocks = max(stats.verified, default=0)
    reliability = stats.reliability
    return {
        "acceptance": [_finite(share) for share in stats.acceptance()],
        "verified": stats.verified,
        "accepted": stats.accepted,
        "accepted_per_block": sum(stats.accepted) / blocks if blocks else None,
        "expected_calibration_error": _finite(reliability.expected_calibration_error()),
        "reliability": asdict(reliability),
    }


def _finite(value: float) -> float | None:
    return value if value == value else None


def _print(result: Evaluation) -> None:
    console = Console(highlight=False)
    table = Table("task", title=f"suite {result.suite}", title_justify="left")
    for column in ("right", "of", "accuracy", "failed"):
        table.add_column(column, justify="right")
    for name, score in [*result.tasks.items(), ("all", result.total)]:
        table.add_row(name, f"{score.correct}", f"{score.total}", _percent(score.accuracy), f"{score.failed or ''}")
    console.print(table)
    for name, why in result.skipped.items():
        console.print(f"{name}: skipped, {why}", markup=False, soft_wrap=True)
    rate = result.num_generated_tokens / max(result.seconds, 1e-9)
    console.print(f"{result.num_generated_tokens:,} tokens in {result.seconds:.1f} s, {rate:,.0f} tokens/s")
    console.print(f"digest of all answers: {result.digest}")
    if result.speculation is not None:
        _print_speculation(console, result.speculation)
    for name, score in result.tasks.items():
        for wrong in score.wrong:
            say(f"{name}: asked {wrong['question']!r}; right is {wrong['right']!r}, said was {wrong['said']!r}")


def _print_speculation(console: Console, facts: dict[str, Any]) -> None:
    table = Table("draft", title="speculation", title_justify="left")
    for column in ("verified", "accepted", "share"):
        table.add_column(column, justify="right")
    for place, (tried, kept) in enumerate(zip(facts["verified"], facts["accepted"], strict=True), 1):
        table.add_row(f"{place}", f"{tried}", f"{kept}", _percent(kept / tried if tried else float("nan")))
    console.print(table)
    if facts["accepted_per_block"] is not None:
        console.print(
            f"accepted per block: {facts['accepted_per_block']:.2f} of {len(facts['verified'])}; "
            f"expected calibration error of the confidences: {facts['expected_calibration_error']:.3f}"
        )


def _percent(share: float) -> str:
    return "" if share != share else f"{100 * share:.1f} %"
