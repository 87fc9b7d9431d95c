"""The command line: `deepinfer run`, `eval`, `inspect`, `make-tiny`, `backends`, `conformance`, `verify`, `version`.

Options are declared here and nothing heavy is imported, so that `--help` answers at once; what the commands do is in
`commands.py`. Exit status: 0 all well, 1 some items failed, 2 it could not start, 128 + signal when it was stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer.core.config import parse_bytes, setting_help
from deepinfer.entrypoints import conformance_cli

app = typer.Typer(
    name="deepinfer",
    help="DeepSeek-V4.1-Flash on whatever accelerator you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODEL_PANEL, _ENGINE_PANEL = "Model", "Engine"


def _option(name: str, panel: str, *flags: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=setting_help(name), rich_help_panel=panel, show_default=False, **settings)


Model = Annotated[str, _option("model", _MODEL_PANEL, "--model", "-m", metavar="DIR")]
Backend = Annotated[str | None, _option("backend", _MODEL_PANEL)]
Dtype = Annotated[str | None, _option("dtype", _MODEL_PANEL)]
KvRounding = Annotated[bool | None, _option("kv_rounding", _MODEL_PANEL, "--kv-rounding/--no-kv-rounding")]
ActivationRounding = Annotated[
    bool | None, _option("activation_rounding", _MODEL_PANEL, "--activation-rounding/--no-activation-rounding")
]
Engram = Annotated[str | None, _option("engram", _MODEL_PANEL)]
MaxModelLen = Annotated[int | None, _option("max_model_len", _ENGINE_PANEL)]
MaxNumSeqs = Annotated[int | None, _option("max_num_seqs", _ENGINE_PANEL)]
MaxNumBatchedTokens = Annotated[int | None, _option("max_num_batched_tokens", _ENGINE_PANEL)]
NumKvBlocks = Annotated[int | None, _option("num_kv_blocks", _ENGINE_PANEL)]
KvMemory = Annotated[str | None, _option("kv_memory_bytes", _ENGINE_PANEL, "--kv-memory-bytes", metavar="BYTES")]
MemoryUtilization = Annotated[float | None, _option("memory_utilization", _ENGINE_PANEL)]
BlockSize = Annotated[int | None, _option("block_size", _ENGINE_PANEL)]
WindowPage = Annotated[int | None, _option("window_page", _ENGINE_PANEL)]
BatchInvariant = Annotated[
    bool | None, _option("batch_invariant", _ENGINE_PANEL, "--batch-invariant/--no-batch-invariant")
]
Strict = Annotated[bool | None, _option("strict", _ENGINE_PANEL, "--strict/--no-strict")]
NumThreads = Annotated[int | None, _option("num_threads", _ENGINE_PANEL)]
Seed = Annotated[int | None, _option("seed", _ENGINE_PANEL)]
Ops = Annotated[str | None, _option("ops", _ENGINE_PANEL)]
Speculation = Annotated[
    str | None, _option("speculation", _ENGINE_PANEL, "--speculation", metavar="[off|coupled|rejection]")
]
NumDrafts = Annotated[int | None, _option("num_drafts", _ENGINE_PANEL, "--num-drafts", "--num-speculative-tokens")]
SpeculativeConfig = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='As vLLM spells it: {"method": "mtp", "num_speculative_tokens": N} is coupled with N drafts.',
        rich_help_panel=_ENGINE_PANEL,
    ),
]
Replay = Annotated[str | None, _option("replay", _ENGINE_PANEL)]
PrefixCaching = Annotated[bool | None, _option("prefix_caching", _ENGINE_PANEL, "--prefix-caching/--no-prefix-caching")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="TOML or JSON file of settings; options given here win.", rich_help_panel="Engine"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any setting of docs/configuration.md, such as draft_schedule=fixed; may be repeated.",
        rich_help_panel=_ENGINE_PANEL,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests, one JSON object a line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Results, one a line; resumed if it exists.")],
    model: Model = "",
    max_tokens: Annotated[int | None, typer.Option(min=0, help="For requests that do not set max_tokens.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Look at the first N requests only.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew instead of resuming.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    backend: Backend = None,
    dtype: Dtype = None,
    kv_rounding: KvRounding = None,
    activation_rounding: ActivationRounding = None,
    engram: Engram = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    num_kv_blocks: NumKvBlocks = None,
    kv_memory_bytes: KvMemory = None,
    memory_utilization: MemoryUtilization = None,
    block_size: BlockSize = None,
    window_page: WindowPage = None,
    batch_invariant: BatchInvariant = None,
    strict: Strict = None,
    num_threads: NumThreads = None,
    seed: Seed = None,
    ops: Ops = None,
    speculation: Speculation = None,
    num_drafts: NumDrafts = None,
    speculative_config: SpeculativeConfig = None,
    settings_by_name: Settings = None,
    config: ConfigFile = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Results are written as they finish. Started again, it goes on where it stopped: items that have a line in the
    output are skipped.
    """
    given = {
        "backend": backend,
        "dtype": dtype,
        "kv_rounding": kv_rounding,
        "activation_rounding": activation_rounding,
        "engram": engram,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_kv_blocks": num_kv_blocks,
        "kv_memory_bytes": _bytes(kv_memory_bytes),
        "memory_utilization": memory_utilization,
        "block_size": block_size,
        "window_page": window_page,
        "batch_invariant": batch_invariant,
        "strict": strict,
        "num_threads": num_threads,
        "seed": seed,
        "ops": ops,
        "speculation": speculation,
        "num_drafts": num_drafts,
    }
    from deepinfer.entrypoints import commands

    settings = _drafts(speculative_config) | {name: value for name, value in given.items() if value is not None}
    work = commands.BatchCommand(
        source,
        output,
        model,
        settings,
        config=config,
        settings_by_name=settings_by_name or [],
        max_tokens=max_tokens,
        limit=limit,
        overwrite=overwrite,
        quiet=quiet,
    )
    raise typer.Exit(commands.guarded(work.run))


@app.command("eval")
def evaluate(
    model: Model = "",
    suite: Annotated[str, typer.Option(help="Which tasks: tiny, or long for pass keys in 8k tokens.")] = "tiny",
    task: Annotated[list[str] | None, typer.Option(help="A task of the suite; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most N items of each task.")] = None,
    speculation: Speculation = None,
    num_drafts: NumDrafts = None,
    speculative_config: SpeculativeConfig = None,
    replay: Replay = None,
    prefix_caching: PrefixCaching = None,
    kv_format: Annotated[
        str | None,
        typer.Option(
            metavar="[native|f32]",
            help="Records as the model was trained, or plain (kv_rounding).",
            rich_help_panel=_ENGINE_PANEL,
        ),
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(min=1, help="Most rows of a step (max_num_batched_tokens).", rich_help_panel=_ENGINE_PANEL),
    ] = None,
    backend: Backend = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    num_threads: NumThreads = None,
    settings_by_name: Settings = None,
    config: ConfigFile = None,
    show_wrong: Annotated[int, typer.Option(min=0, help="Show N wrong answers of each task.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint on tasks that a rule can judge; accuracy, and acceptance of drafts with speculation on.

    The status is 0 when every item was served, 1 when some failed. Wrong answers are no failure.
    """
    if kv_format not in (None, "native", "f32"):
        raise typer.BadParameter(f"--kv-format {kv_format!r} is not one of native, f32")
    given = {
        "speculation": speculation,
        "num_drafts": num_drafts,
        "replay": replay,
        "prefix_caching": prefix_caching,
        "kv_rounding": None if kv_format is None else kv_format == "native",
        "max_num_batched_tokens": chunk_size,
        "backend": backend,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "num_threads": num_threads,
    }
    from deepinfer.entrypoints import commands
    from deepinfer.entrypoints.evaluation import EvalCommand

    settings = _drafts(speculative_config) | {name: value for name, value in given.items() if value is not None}
    work = EvalCommand(
        model,
        suite,
        settings,
        tasks=task or (),
        limit=limit,
        config=config,
        settings_by_name=settings_by_name or (),
        as_json=as_json,
        show_wrong=show_wrong,
    )
    raise typer.Exit(commands.guarded(work.run))


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint folder.")],
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    block_size: BlockSize = None,
    kv_rounding: KvRounding = None,
    memory: Annotated[str | None, typer.Option(metavar="BYTES", help="Memory to plan for, such as 141GB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's configuration, tensors and memory plan without loading weights."""
    given = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
        "kv_rounding": kv_rounding,
    }
    from deepinfer.entrypoints import commands
    from deepinfer.entrypoints.inspection import inspect_checkpoint

    settings = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(commands.guarded(lambda: inspect_checkpoint(folder, settings, _bytes(memory), as_json)))


@app.command("make-tiny")
def make_tiny(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; created.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights.")] = 0,
    quant: Annotated[bool, typer.Option("--quant/--no-quant", help="Released storage formats, or bf16 alone.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write a complete random DeepSeek-V4.1 checkpoint of toy size."""
    from deepinfer.entrypoints import commands

    raise typer.Exit(commands.guarded(lambda: commands.write_tiny(folder, seed, quant, force)))


for _command in (conformance_cli.backends, conformance_cli.conformance, conformance_cli.verify):
    app.command()(_command)


@app.command()
def version() -> None:
    """Print the version."""
    import deepinfer

    typer.echo(deepinfer.__version__)


def main() -> None:
    """Run the command line."""
    sys.exit(app(standalone_mode=True))


def _bytes(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _drafts(text: str | None) -> dict[str, Any]:
    """The settings of `--speculative-config`; flags of ours go before them."""
    from deepinfer.core.errors import ConfigError
    from deepinfer.entrypoints.speculative_config import read_speculative_config

    try:
        return {} if text is None else read_speculative_config(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    main()
