"""`deepinfer inspect`: what a checkpoint folder holds and what it takes to run it, without reading a weight.

Facts are gathered into one plain dictionary, which `--json` prints and the tables render.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepinfer.core.config import EngineConfig
from deepinfer.core.tokenizer import Tokenizer, TokenizerError
from deepinfer.models.checkpoint import Checkpoint
from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.memory_plan import MemoryPlan
from deepinfer.models.deepseek_v41_flash.tensors import PARTS, expected_tensors, loaded_parts, part_of
from deepinfer.models.deepseek_v41_flash.vocabulary import vocabulary_problems
from deepinfer.models.errors import CheckpointError

_MAX_SHOWN = 20


def inspect_checkpoint(folder: Path, settings: dict[str, Any], memory_bytes: int | None, as_json: bool) -> int:
    """Print the facts of the checkpoint in `folder`.

    Args:
        folder: a checkpoint folder.
        settings: engine settings that were given.
        memory_bytes: memory to plan for; None to plan for none.
        as_json: print JSON instead of tables.

    Returns:
        The exit status: 0 when every tensor and the tokenizer are there and right, 1 otherwise.

    Raises:
        ConfigError: `config.json` is absent or broken, every field named.
    """
    engine = EngineConfig.load(str(folder), **settings)
    config = ModelConfig.from_dir(folder)
    facts: dict[str, Any] = {"folder": str(folder), "config": _config_facts(config)}
    problems: list[str] = []
    stored: dict[str, str] | None = None
    try:
        checkpoint = Checkpoint.open(folder)
        stored = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
        facts["tensors"] = _coverage(config, checkpoint)
        checkpoint.validate(expected_tensors(config), loaded_parts(config, draft=False, vision=False), _is_optional)
    except CheckpointError as error:
        problems = list(error.problems) or [str(error)]
    problems += _tokenizer_problems(folder, config)
    facts["problems"] = problems
    facts["memory"] = _memory_facts(config, engine, stored, memory_bytes)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 1 if problems else 0


def _tokenizer_problems(folder: Path, config: ModelConfig) -> list[str]:
    try:
        return vocabulary_problems(config, Tokenizer.from_dir(folder))
    except TokenizerError as error:
        return [str(error)]


def _is_optional(name: str) -> bool:
    return part_of(name) in ("draft", "vision")


def _config_facts(config: ModelConfig) -> dict[str, Any]:
    text = config.text
    values = asdict(text)
    wanted = (
        "hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups o_lora_rank "
        "sliding_window max_position_embeddings vocab_size n_routed_experts num_experts_per_tok moe_intermediate_size "
        "index_n_heads index_head_dim index_topk kv_source_layer_ids index_source_layer_ids engram_layer_ids "
        "num_nextn_predict_layers"
    )
    return {
        "architecture": ", ".join(config.architectures),
        "dtype": config.dtype,
        "weights": "FP8 32x32, FP4 experts" if config.quantization is not None else "not quantised",
        **{name: values[name] for name in wanted.split() if name in values},
        "compress_ratios": text.compress_ratios[: text.num_hidden_layers],
        "vision": config.vision is not None,
        "eos_token_ids": config.eos_token_ids,
        "unknown_fields": config.unknown_fields,
    }


def _coverage(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    expected = expected_tensors(config)
    rows = {part: {"expected": 0, "found": 0, "unexpected": 0, "bytes": 0} for part in PARTS}
    for spec in expected.values():
        rows[spec.part]["expected"] += 1
    for name, tensor in checkpoint.tensors.items():
        row = rows[part_of(name)]
        row["found" if name in expected else "unexpected"] += 1
        row["bytes"] += tensor.num_bytes
    return rows


def _memory_facts(
    config: ModelConfig, engine: EngineConfig, stored: dict[str, str] | None, memory_bytes: int | None
) -> dict[str, Any]:
    plan = MemoryPlan.of(
        config, kv_rounding=engine.kv_rounding, draft=engine.load_draft, vision=engine.load_vision, stored=stored
    )
    length = engine.max_model_len or config.text.max_position_embeddings
    block, page = engine.block_size, engine.window_page
    facts: dict[str, Any] = {
        "weight_bytes": dict(plan.weight_bytes),
        "weight_bytes_by_format": dict(plan.format_bytes),
        "total_weight_bytes": plan.total_weight_bytes,
        "host_bytes": plan.host_bytes,
        "kv_bytes_per_token": float(plan.kv_bytes_per_token),
        "window_bytes_per_token": plan.window_bytes_per_token,
        "window_and_state_bytes_per_request": plan.seq_bytes(page),
        "max_model_len": length,
        "request_bytes_at_max_model_len": plan.request_bytes(length, block_size=block, window_page=page),
    }
    if memory_bytes is not None:
        budget = int(memory_bytes * engine.memory_utilization)
        facts["memory_bytes"] = memory_bytes
        counts = sorted({1, engine.max_num_seqs})
        facts["fits"] = [asdict(plan.fit(budget, num_seqs=n, block_size=block, window_page=page)) for n in counts]
    return facts


def _print(facts: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table("config", "", title=facts["folder"])
    for name, value in facts["config"].items():
        table.add_row(name, _text(value))
    console.print(table)
    if "tensors" in facts:
        table = Table("tensors", "expected", "found", "unexpected", "stored")
        for part, row in facts["tensors"].items():
            table.add_row(part, *(f"{row[key]:,}" for key in ("expected", "found", "unexpected")), _size(row["bytes"]))
        console.print(table)
    console.print(_memory_table(facts["memory"]))
    for fit in facts["memory"].get("fits", ()):
        left = fit["cache_bytes"]
        what = f"{fit['num_tokens']:,} tokens in {fit['num_blocks']:,} blocks" if left > 0 else "nothing"
        console.print(f"with {fit['num_seqs']:,} running requests, {_size(left)} for caches: {what}")
    problems = facts["problems"]
    for problem in problems[:_MAX_SHOWN]:
        console.print(problem, markup=False, soft_wrap=True)
    if len(problems) > _MAX_SHOWN:
        console.print(f"... and {len(problems) - _MAX_SHOWN:,} more; --json lists all")
    console.print(f"{len(problems):,} problems" if problems else "all tensors are there", style="bold")


def _memory_table(memory: dict[str, Any]) -> Table:
    table = Table("memory", "")
    for part, size in memory["weight_bytes"].items():
        table.add_row(f"weights: {part}", _size(size))
    table.add_row("weights in all", _size(memory["total_weight_bytes"]))
    table.add_row("  as " + ", ".join(memory["weight_bytes_by_format"]), _sizes(memory["weight_bytes_by_format"]))
    table.add_row("  may stay in host memory or on disk", _size(memory["host_bytes"]))
    table.add_row("KV per token", f"{memory['kv_bytes_per_token']:,.1f} B")
    table.add_row("window KV and state per request", _size(memory["window_and_state_bytes_per_request"]))
    table.add_row(f"a request of {memory['max_model_len']:,} tokens", _size(memory["request_bytes_at_max_model_len"]))
    return table


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(_size(size) for size in sizes.values())


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.2f} {unit}"
        size /= 1024
    return f"{size:,.2f} TiB"
