"""What the command line's commands do; `cli.py` declares their options.

Results go to standard output, everything that accompanies them to standard error.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepinfer.core.errors import ConfigError, DeepInferError
from deepinfer.entrypoints.terminal import console, say, settle_streams

if TYPE_CHECKING:
    from deepinfer.entrypoints.batch import BatchSummary

FAILED_TO_START = 2
_STOPPED = 128


def guarded(command: Callable[[], int]) -> int:
    """Run a command and turn the errors that people can mend into a message and a status."""
    from deepinfer.core.tokenizer import TokenizerError
    from deepinfer.models.errors import CheckpointError
    from deepinfer.models.errors import ConfigError as ModelConfigError
    from deepinfer.ops.errors import OpError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return command()
    except KeyboardInterrupt:
        say("stopped")
        return _STOPPED + signal.SIGINT
    except (DeepInferError, OpError, ModelConfigError, CheckpointError, TokenizerError, OSError) as error:
        say(f"error: {error}")
        return FAILED_TO_START
    finally:
        settle_streams()


@dataclass
class BatchCommand:
    """`deepinfer run`.

    Attributes:
        source: the input.
        output: where results go.
        model: checkpoint folder; empty to take it from file or environment.
        settings: engine settings that were given.
        config: file of settings.
        settings_by_name: further ones, as `name=value`; those of `settings` go before them.
        max_tokens: for requests that do not say.
        limit: look at so many requests only.
        overwrite: begin anew.
        quiet: no progress and no summary.
    """

    source: Path
    output: Path
    model: str
    settings: dict[str, Any]
    config: Path | None = None
    settings_by_name: Sequence[str] = ()
    max_tokens: int | None = None
    limit: int | None = None
    overwrite: bool = False
    quiet: bool = False

    def run(self) -> int:
        """Do it; the exit status."""
        from deepinfer.core.config import EngineConfig, parse_settings
        from deepinfer.entrypoints.batch import count_items
        from deepinfer.entrypoints.result_file import ResultFile

        settings = parse_settings(self.settings_by_name) | self.settings
        model = self.model or settings.pop("model", "")
        config = EngineConfig.load(model, config=self.config, **settings)
        if not config.model:
            raise ConfigError("no model: give --model DIR, or set DEEPINFER_MODEL")
        self._check_paths()
        total = count_items(self.source)
        total = total if self.limit is None else min(total, self.limit)
        results = ResultFile(self.output, overwrite=self.overwrite)
        try:
            if results.num_cut:
                self._say(f"{self.output}: the last line, cut off after {results.num_cut} bytes, will be removed")
            if results.answered:
                self._say(f"{self.output}: resuming, {len(results.answered):,} items have a line already")
            summary = self._answer(config, results, total)
        finally:
            results.close()
        if not self.quiet:
            console().print(_summary_table(summary))
            if summary.speculation is not None:
                for line in summary.speculation.lines():
                    console().print(line, markup=False, highlight=False, soft_wrap=True)
        if summary.stopped_by is not None:
            self._say(f"stopped; {total - summary.num_done:,} items are left, start again to go on")
        return summary.exit_status

    def _answer(self, config: Any, results: Any, total: int) -> BatchSummary:
        from deepinfer.entrypoints.batch import BatchRunner
        from deepinfer.entrypoints.llm import LLM
        from deepinfer.entrypoints.progress import ProgressView

        view_console = console(stderr=True, quiet=self.quiet)
        with _loading(view_console, config.model):
            llm = LLM(config=config)
        if self.overwrite:
            results.clear()
        initial = min(len(results.answered), total)
        with llm, ProgressView(total, initial=initial, console=view_console) as view:

            def show(summary: BatchSummary) -> None:
                view.update(max(initial, summary.num_done), summary.num_generated_tokens)

            runner = BatchRunner(
                llm, self.source, results, max_tokens=self.max_tokens, limit=self.limit, on_progress=show
            )
            return runner.run()

    def _check_paths(self) -> None:
        from deepinfer.entrypoints.batch import same_file

        if str(self.source) == "-":
            raise ConfigError("INPUT is -: requests are not read from standard input; save them to a file and name it")
        if str(self.output) == "-":
            raise ConfigError("--output is -: results go to a file, so that a run can be resumed; name one")
        if not self.source.is_file():
            what = "is no regular file; requests are read twice" if self.source.exists() else "no such file of requests"
            raise ConfigError(f"{self.source}: {what}")
        if same_file(self.source, self.output):
            raise ConfigError(f"{self.output}: input and output are the same file")

    def _say(self, text: str) -> None:
        if not self.quiet:
            say(text)


def write_tiny(folder: Path, seed: int, quant: bool, force: bool) -> int:
    """`deepinfer make-tiny`."""
    from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

    make_tiny(folder, seed=seed, quant=quant, force=force)
    print(folder)
    return 0


def _summary_table(summary: BatchSummary) -> Table:
    seconds = max(summary.seconds, 1e-9)
    table = Table("batch", show_edge=True)
    table.add_column(justify="right")
    table.add_row("answered", f"{summary.num_answered:,}")
    table.add_row("skipped, had a line already", f"{summary.num_skipped:,}")
    if summary.num_failed_before:
        table.add_row("  of these, errors", f"{summary.num_failed_before:,}")
    table.add_row("failed", f"{summary.num_failed:,}")
    for code, count in sorted(summary.errors.items()):
        table.add_row(f"  {code}", f"{count:,}")
    table.add_row("prompt tokens", f"{summary.num_prompt_tokens:,}")
    table.add_row("generated tokens", f"{summary.num_generated_tokens:,}")
    table.add_row("generated tokens per second", f"{summary.num_generated_tokens / seconds:,.1f}")
    table.add_row("requests per second", f"{(summary.num_answered + summary.num_failed) / seconds:,.2f}")
    table.add_row("seconds", f"{summary.seconds:,.1f}")
    return table


def _loading(console: Console, model: str) -> AbstractContextManager[object]:
    if console.is_terminal:
        return console.status(f"loading {escape(model)}")
    console.print(f"loading {model}", markup=False, soft_wrap=True)
    return nullcontext()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}")
