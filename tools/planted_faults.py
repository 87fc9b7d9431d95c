"""What faults of an engine do to the small checkpoint's answers: python -m tools.planted_faults MODEL [--limit N]

Each fault is planted in one op of the CPU backend, or is a setting that leaves something out; then the tasks are asked
as `deepinfer eval` asks them. The table in docs/tiny_checkpoint.md is printed by this program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepinfer import LLM
from deepinfer.backends.cpu import BACKEND
from deepinfer.core.errors import ConfigError, DeepInferError
from deepinfer.entrypoints.evaluation import Evaluation, chosen_tasks, evaluate
from deepinfer.ops.backend import BindContext, Dims, Implementation, Plan

Run = Callable[..., Any]
Wrong = Callable[[Run, dict[str, Any]], Any]
"""Runs an op wrongly: given its right form and its arguments by name."""

TASKS = ("copy", "sort", "add", "lookup", "extract", "tool_call", "pass_key_512")


@dataclass(frozen=True)
class PlantedFault:
    """A fault by name.

    Attributes:
        name: what is wrong.
        op: the op that is run wrongly; "" for a setting alone.
        wrong: how.
        settings: of the engine.
    """

    name: str
    op: str = ""
    wrong: Wrong | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def _window_short(run: Run, arguments: dict[str, Any]) -> Any:
    slots = run(**arguments)
    slots[:, 0] = -1
    return slots


def _window_stale(run: Run, arguments: dict[str, Any]) -> Any:
    slots = run(**arguments)
    slots[:, -1] = -1
    return slots


def _next_slot(run: Run, arguments: dict[str, Any]) -> Any:
    run(**arguments)
    indices = arguments["indices"]
    indices.copy_(torch.where(indices >= 0, indices ^ 1, indices))


def _earlier_blocks(run: Run, arguments: dict[str, Any]) -> Any:
    blocks = arguments["blocks"]
    return run(**(arguments | {"blocks": torch.where(blocks > 0, blocks - 1, blocks)}))


def _oldest_entries(run: Run, arguments: dict[str, Any]) -> Any:
    x = arguments["x"]
    falling = -torch.arange(x.shape[1], device=x.device).expand_as(x).to(x.dtype)
    return run(**(arguments | {"x": torch.where(x == -torch.inf, x, falling)}))


def _no_sink(run: Run, arguments: dict[str, Any]) -> Any:
    return run(**(arguments | {"attn_sink": torch.full_like(arguments["attn_sink"], -torch.inf)}))


def _late_rotation(run: Run, arguments: dict[str, Any]) -> Any:
    return run(**(arguments | {"positions": arguments["positions"] + 1}))


def _lost_group(run: Run, arguments: dict[str, Any]) -> Any:
    arguments["state"].zero_()
    return run(**arguments)


def _no_history(run: Run, arguments: dict[str, Any]) -> Any:
    return run(**(arguments | {"history": torch.full_like(arguments["history"], -1)}))


def _no_bias(run: Run, arguments: dict[str, Any]) -> Any:
    return run(**(arguments | {"bias": torch.zeros_like(arguments["bias"])}))


def _turned_mixing(run: Run, arguments: dict[str, Any]) -> Any:
    return run(**(arguments | {"comb": arguments["comb"].transpose(1, 2).contiguous()}))


def _half_records(run: Run, arguments: dict[str, Any]) -> Any:
    return run(**(arguments | {"weight": arguments["weight"] * 0.5}))


FAULTS = (
    PlantedFault("none"),
    PlantedFault("window off by one: the oldest position is left out", "build_swa_index", _window_short),
    PlantedFault("window off by one: a row does not see itself", "build_swa_index", _window_stale),
    PlantedFault("wrong slot: the neighbour of each compressed record", "logical_to_slot", _next_slot),
    PlantedFault("wrong pool: each candidate block is the one before", "index_logits_blocks", _earlier_blocks),
    PlantedFault("selection takes the oldest entries instead of the best", "topk_select", _oldest_entries),
    PlantedFault("dropped rounding: caches in float32", settings={"kv_rounding": False}),
    PlantedFault("dropped rounding: activations as they are", settings={"activation_rounding": False}),
    PlantedFault("window records are half as large", "kv_norm_rope_store", _half_records),
    PlantedFault("attention without its sink", "sparse_attn", _no_sink),
    PlantedFault("queries rotated one position late", "q_norm_rope", _late_rotation),
    PlantedFault("the open group of the compressor is lost between steps", "kv_compress", _lost_group),
    PlantedFault("n-grams do not reach into the step before", "engram_ngrams", _no_history),
    PlantedFault("experts chosen without their bias", "moe_gate", _no_bias),
    PlantedFault("streams mixed by the transposed matrix", "mhc_post", _turned_mixing),
)


@dataclass
class _WrongPlan:
    plan: Plan
    fault: PlantedFault
    names: Sequence[str]
    runs: list[int]
    scratch_bytes: int = 0
    persistent_bytes: int = 0
    capturable: bool = False

    def __post_init__(self) -> None:
        self.scratch_bytes, self.persistent_bytes = self.plan.scratch_bytes, self.plan.persistent_bytes

    def run(self, *inputs: Any, **options: Any) -> Any:
        """Run the op wrongly."""
        self.runs[0] += 1
        given = {name: options.pop(name) for name in list(options) if name in self.names}
        arguments = dict(zip(self.names, inputs, strict=False)) | given

        def right(**fresh: Any) -> Any:
            return self.plan.run(*(fresh[name] for name in self.names if name in fresh), **options)

        assert self.fault.wrong is not None, "a fault in an op says how"
        return self.fault.wrong(right, arguments)


@contextmanager
def planted(fault: PlantedFault) -> Iterator[list[int]]:
    """The CPU backend with a fault; yields how often the op was run, in a list of one."""
    runs = [0]
    BACKEND.load()
    before = list(BACKEND.implementations)

    def spoilt(implementation: Implementation) -> Implementation:
        names = list(implementation.op.signature.parameters)

        def bind(dims: Dims, context: BindContext) -> Plan:
            return _WrongPlan(implementation.bind(dims, context), fault, names, runs)

        return replace(implementation, bind=bind)

    BACKEND.implementations[:] = [spoilt(i) if i.op.name == fault.op else i for i in before]
    try:
        yield runs
    finally:
        BACKEND.implementations[:] = before


def ask(model: str, fault: PlantedFault, limit: int, tasks: Sequence[str] = TASKS, **settings: Any) -> Evaluation:
    """The tasks' scores and answers under a fault.

    Raises:
        ConfigError: the checkpoint cannot be used, or takes fewer tokens than the tasks have.
        RuntimeError: no step ran the op.
    """
    with planted(fault) as runs, LLM(model, backend="cpu", max_model_len=1024, **fault.settings, **settings) as llm:
        result = Evaluation(model, "tiny", {})
        evaluate(llm, chosen_tasks("tiny", tasks), result, limit=limit, logprobs=True)
    if result.skipped:
        reasons = "; ".join(f"{name}: {why}" for name, why in result.skipped.items())
        raise ConfigError(f"{model}: not every task can be asked: {reasons}")
    if fault.op and not runs[0]:
        raise RuntimeError(f"no step ran {fault.op}, so the fault was not planted")
    return result


def differences(sound: Evaluation, faulty: Evaluation) -> tuple[int, float]:
    """Answers with other tokens, and the mean change of an answer's log probability; both 0 for the same bits.

    The change is NaN where no answer was served by both.
    """
    answers = sum(one != other for one, other in zip(sound.answers, faulty.answers, strict=True))
    pairs = zip(sound.logprobs, faulty.logprobs, strict=True)
    changes = [abs(one - other) for one, other in pairs if one is not None and other is not None]
    return answers, sum(changes) / len(changes) if changes else float("nan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status: 0, or 2 where the model cannot be asked."""
    parser = argparse.ArgumentParser(prog="python -m tools.planted_faults", description="What faults do to answers.")
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--limit", type=int, default=40, help="items of each task")
    options = parser.parse_args(arguments)
    if options.limit < 1:
        parser.error(f"--limit must be at least 1, got {options.limit}")
    try:
        _print_table(options.model, options.limit)
    except (DeepInferError, ValueError, OSError) as error:  # what may be wrong with a checkpoint folder
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print_table(model: str, limit: int) -> None:
    sound = ask(model, FAULTS[0], limit)
    print("| fault | " + " | ".join(TASKS) + " | other answers | change of log probabilities |")
    print("| --- |" + " --- |" * (len(TASKS) + 2))
    for fault in FAULTS:
        result = ask(model, fault, limit) if fault.op or fault.settings else sound
        shares = [f"{100 * result.tasks[task].accuracy:.0f} %" for task in TASKS]
        answers, change = differences(sound, result)
        cells = [fault.name, *shares, f"{answers} of {len(sound.answers)}", f"{change:.2g}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
