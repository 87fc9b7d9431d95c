"""The model card of an exported checkpoint: what it was made of and how it does, measured numbers only.

    python -m tools.train_tiny.card CHECKPOINT EVALUATION.json [LONG.json]

puts what `deepinfer eval --json` measured through the engine in the place of the training program's own figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.train_tiny.corpus import natural_text
from tools.train_tiny.settings import Plan
from tools.train_tiny.store import WeightStore


def model_card(
    store: WeightStore, plan: Plan, step: int, file_bytes: int, shares: Mapping[str, float], report: str
) -> str:
    """Markdown.

    Args:
        store: the weights.
        plan: they were trained by.
        step: steps done.
        file_bytes: size of the weight file.
        shares: of held-out items answered right, by task.
        report: line of the last step.
    """
    text = store.config.text
    millions = sum(p.numel() for _, p in store.named()) / 1e6
    sources = "\n".join(
        f"- {source.name}: {source.licence}, {sum(map(len, source.paragraphs)):,} characters"
        for source in natural_text()
    )
    rows = "\n".join(f"| {task} | {100 * share:.1f} % |" for task, share in shares.items()) or "| (none) | |"
    state = "complete" if step >= plan.steps else f"unfinished: {step:,} of {plan.steps:,} steps"
    return _CARD.format(
        millions=millions,
        megabytes=file_bytes / 1e6,
        facts=_facts(text),
        sources=sources,
        state=state,
        tokens=step * plan.tokens / 1e6,
        seed=plan.seed,
        index=plan.index_from,
        draft=plan.draft_from,
        sparse=plan.sparse_from,
        weights=plan.weights_from,
        report=report,
        rows=rows,
    )


def measured_card(card: str, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The card with the accuracies of evaluations.

    Args:
        card: Markdown of `model_card`.
        evaluations: what `deepinfer eval --json` printed, one for each suite.

    Raises:
        ValueError: the card lacks a section.
        KeyError: an evaluation lacks what the card says.
    """
    before, found, rest = card.partition(_ACCURACY)
    _, licence, behind = rest.partition(_LICENCE)
    if not found or not licence:
        raise ValueError(f"no section {(_LICENCE if found else _ACCURACY).strip()!r}, as `model_card` writes it")
    rows = []
    for evaluation in evaluations:
        backend = evaluation["settings"]["backend"]
        for task, score in evaluation["tasks"].items():
            rows.append(f"| {task} | {score['correct']} of {score['total']} | {backend} |")
    dtypes = " and ".join(sorted({evaluation["settings"]["dtype"] for evaluation in evaluations}))
    drafts = next((e["speculation"] for e in evaluations if e.get("speculation")), None)
    said = ""
    if drafts is not None and drafts["accepted_per_block"] is not None:
        said = (
            f"\nDrafts: {drafts['accepted_per_block']:.2f} of {len(drafts['accepted'])} accepted per block, expected "
            f"calibration error {drafts['expected_calibration_error']:.3f}.\n"
        )
    table = "\n".join(("| task | right | backend |", "| --- | --- | --- |", *rows))
    text = f"Measured by `deepinfer eval` through the engine, in {dtypes}, at temperature 0."
    return f"{before}{_ACCURACY}\n{text}\n\n{table}\n{said}\n{_LICENCE}{behind}"


def _facts(text: Any) -> str:
    return (
        f"{text.num_layers} layers of width {text.hidden_size}, {text.num_attention_heads} heads of {text.head_dim}, "
        f"window {text.sliding_window}; compress ratios {list(text.compress_ratios[: text.num_layers])}, KV sources "
        f"{list(text.kv_source_layer_ids)}, index sources {list(text.index_source_layer_ids)} (top {text.index_topk}), "
        f"candidate pool of layer {text.candidate_source_layer_id} with {text.candidate_topk_blocks} blocks of "
        f"{text.candidate_block_size}; {text.n_routed_experts} experts, {text.num_experts_per_tok} of them per token, "
        f"and a shared one; Engram on layers {list(text.engram_layer_ids)}; {text.num_nextn_predict_layers} draft "
        f"blocks of {text.dspark_block_size} tokens; vocabulary {text.vocab_size}"
    )


def main(arguments: Sequence[str]) -> int:
    """Put evaluations into a card; the exit status: 0, or 2 with the card as it was."""
    if len(arguments) < 2 or any(name.startswith("-") for name in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    file = Path(arguments[0]) / "README.md"
    try:
        card = measured_card(file.read_text(encoding="utf-8"), [_read_evaluation(Path(name)) for name in arguments[1:]])
        file.write_text(card, encoding="utf-8")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"error: an evaluation lacks {error}; print it anew with `deepinfer eval --json`", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {file}: {error}", file=sys.stderr)
        return 2
    return 0


def _read_evaluation(file: Path) -> dict[str, Any]:
    """What `deepinfer eval --json` printed into a file.

    Raises:
        ValueError: it is something else, or of a version that did not note backend and dtype.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    parts = data if isinstance(data, dict) else {}
    lacking = [name for name in ("settings", "tasks") if not isinstance(parts.get(name), dict)]
    lacking = lacking or [f"settings.{name}" for name in ("backend", "dtype") if name not in parts["settings"]]
    if lacking:
        raise ValueError(f"{file} lacks {', '.join(lacking)}; print it anew with `deepinfer eval --json`")
    return parts


_ACCURACY = "## Accuracy on held-out items\n"
_LICENCE = "## Licence\n"

_CARD = """\
# deepinfer-tiny

A DeepSeek-V4.1 of {millions:.1f} million parameters ({megabytes:.1f} MB) with every kind of layer, trained from nothing
so that an engine's faults show as wrong answers. It does the short tasks it was trained on and nothing else; it is no
assistant. It was not made by DeepSeek and holds none of their weights.

{facts}.

## Data

Tasks made by rule (`deepinfer.entrypoints.eval_tasks`), in English and Chinese: copy, reverse, sort, add and compare
numbers, look up a table, find a pass key in filler, extract JSON, call a tool, think before a sum. Every eighth word,
name and number, by a hash of its spelling, decides answers in evaluation alone. Natural text:

{sources}

## Training

State: {state}. {tokens:.0f} million tokens, seed {seed}, `python -m tools.train_tiny`. Caches were rounded to FP8
and FP4 throughout; the indexer was trained from {index:.0%} of the steps on the attention's own distribution, the
draft from {draft:.0%}; attention was sparse from {sparse:.0%}, weights rounded to FP8 and FP4 from {weights:.0%}.
Last step: {report}

## Accuracy on held-out items

Answers whose every token is the best one, in the training program at the end of this run; `deepinfer eval` measures the
exported checkpoint through the engine.

| task | right |
| --- | --- |
{rows}

## Licence

Apache-2.0, as the rest of the repository.
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
