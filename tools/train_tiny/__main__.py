"""The command line of a training run; `python -m tools.train_tiny --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from deepinfer.core.tokenizer import TOKENIZER_FILE, Tokenizer
from tools.train_tiny.card import model_card
from tools.train_tiny.data import BatchMaker
from tools.train_tiny.export import export
from tools.train_tiny.loader import batches
from tools.train_tiny.probe import Probe
from tools.train_tiny.settings import FULL, FULL_VOCAB, MINI, MINI_VOCAB, Plan, model_config
from tools.train_tiny.trainer import STATE_FILE, DivergedError, ResumeError, StepReport, Trainer, as_served
from tools.train_tiny.vocab import load_encoder

_SIZES = {"full": (FULL, FULL_VOCAB), "mini": (MINI, MINI_VOCAB)}
_REFUSED = 2
_NOISE = "<｜noise｜>"


@dataclass
class Run:
    """One piece of a training run.

    Attributes:
        trainer: weights and optimiser.
        probe: measures on held-out items.
        folder: of the run: tokenizer, state, log.
        target: where the checkpoint is exported.
        minutes: of training in this piece; None trains to the end.
        workers: processes that make batches.
        save_every: seconds between states.
        probe_every: steps between probes.
        log_every: steps between lines.
    """

    trainer: Trainer
    probe: Probe
    folder: Path
    target: Path
    minutes: float | None
    workers: int
    save_every: float
    probe_every: int
    log_every: int

    def train(self) -> None:
        """Train until the plan or the time is over, then save and export.

        Raises:
            DivergedError: a loss is no number; the last saved state is from before.
        """
        trainer, plan = self.trainer, self.trainer.plan
        began = saved = time.monotonic()
        measured_from, first, report = began, trainer.step, None
        for step, batch in batches(self.folder, plan, trainer.step, self.workers):
            report = trainer.train(batch)
            now = time.monotonic()
            is_over = self.minutes is not None and now - began > 60 * self.minutes
            if (step + 1) % self.log_every == 0 or is_over:
                self._log(report, (trainer.step - first) * plan.tokens, now - measured_from)
                if (
                    measured_from == began
                ):  # the first stretch compiles and fills queues, so it says nothing of the rest
                    measured_from, first = time.monotonic(), trainer.step
            if (step + 1) % self.probe_every == 0 and not is_over:
                self._say(self._measure())
            if is_over:
                break
            if now - saved > self.save_every:
                trainer.check(report)
                trainer.save(self.folder)
                saved = now
        if report is not None:
            trainer.check(report)
        trainer.save(self.folder)
        shares = self._measure()
        self._say(shares)
        self._export(shares, "none" if report is None else report.line())

    def _measure(self) -> dict[str, float]:
        trainer = self.trainer
        return self.probe(trainer.measured, as_served(trainer.phase), trainer.device)

    def _export(self, shares: dict[str, float], line: str) -> None:
        trainer = self.trainer
        tokenizer = (self.folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        size = export(trainer.store, trainer.config, tokenizer, self.target)
        card = model_card(trainer.store, trainer.plan, trainer.step, size, shares, line)
        (self.target / "README.md").write_text(card, encoding="utf-8")
        print(f"step {trainer.step} of {trainer.plan.steps}: {size / 1e6:.2f} MB in {self.target}", flush=True)

    def _log(self, report: StepReport, num_tokens: int, seconds: float) -> None:
        trainer = self.trainer
        trainer.check(report)
        rate = max(num_tokens, 1) / max(seconds, 1e-9)
        left = (trainer.plan.steps - trainer.step) * trainer.plan.tokens / rate / 60
        print(
            f"step {trainer.step}  {report.line()}  {rate:,.0f} tokens/s  {left:.1f} min to the end",
            flush=True,
        )

    def _say(self, shares: dict[str, float]) -> None:
        line = {"step": self.trainer.step, **shares}
        with (self.folder / "probes.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        text = "  ".join(f"{task} {100 * share:.0f}" for task, share in shares.items())
        print(f"step {self.trainer.step}  held-out items right, in percent: {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit status: 0, or 2 where the run cannot start or has diverged."""
    options = _parser().parse_args(arguments)
    try:
        _prepare(options).train()
    except (OptionError, ResumeError, DivergedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _REFUSED
    return 0


class OptionError(ValueError):
    """An option that no run can begin with."""


def _prepare(options: argparse.Namespace) -> Run:
    sizes, vocab_size = _SIZES[options.size]
    _check(options, sizes["sliding_window"])
    device = _device(options.device)
    folder: Path = options.out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out: no folder can be made there: {error}") from error
    has_state = (folder / STATE_FILE).exists()
    if has_state and not options.resume:
        raise ResumeError(f"{folder} holds a run; go on with --resume, or name another folder")
    encoder = load_encoder(folder, vocab_size)
    noise_id = encoder.token_to_id(_NOISE)
    assert noise_id is not None, "train_tokenizer adds it"
    on_cpu = device.type == "cpu"
    if not on_cpu:
        torch.set_float32_matmul_precision("high")
    trainer = Trainer(
        model_config(sizes, encoder, noise_id),
        encoder,
        _plan(options, folder),
        device=device,
        dtype=torch.float32 if on_cpu else torch.bfloat16,
        compiled=options.compile and not on_cpu,
    )
    if has_state:
        trainer.resume(folder)
    return Run(
        trainer,
        _probe(encoder, trainer.plan, options.probe_items, options.size),
        folder,
        options.export or folder / "checkpoint",
        options.minutes,
        options.workers,
        options.save_every,
        options.probe_every,
        options.log_every,
    )


def _check(options: argparse.Namespace, window: int) -> None:
    """Refuse numbers that would fail in the middle of a step, before a plan with them is kept.

    Raises:
        OptionError: one is out of range.
    """
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and not value >= least:  # so written, NaN is refused too
            raise OptionError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if options.row is not None and options.row % window:
        raise OptionError(f"--row must be a multiple of the model's window of {window}, got {options.row}")


def _probe(encoder: Tokenizer, plan: Plan, items: int, size: str) -> Probe:
    lengths = (768, 640) if size == "full" else (256, 192)
    return Probe(BatchMaker(encoder, plan), encoder, items, *lengths)


def _plan(options: argparse.Namespace, folder: Path) -> Plan:
    """The plan that was given; of a run that goes on, the one it began with, and what is given must not differ.

    Raises:
        ResumeError: it does.
    """
    given = {name: value for name in _PLANNED if (value := getattr(options, name)) is not None}
    file = folder / "plan.json"
    if not file.exists():
        plan = Plan(**given)
        file.write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")
        return plan
    kept = json.loads(file.read_text(encoding="utf-8"))
    differs = [f"{name} {value} (it began with {kept[name]})" for name, value in given.items() if kept[name] != value]
    if differs:
        raise ResumeError(f"{file}: a run keeps its plan, but given were {', '.join(differs)}")
    return Plan(**{**kept, "long_rows": tuple(kept["long_rows"])})


_LEAST = {
    "minutes": 0,
    "workers": 0,
    "save_every": 0,
    "probe_every": 1,
    "probe_items": 1,
    "log_every": 1,
    "steps": 1,
    "tokens": 1,
    "row": 1,
    "long_every": 0,
    "matrix_lr": 0,
    "other_lr": 0,
    "table_lr": 0,
}
_PLANNED = ("steps", "tokens", "seed", "row", "long_every", "matrix_lr", "other_lr", "table_lr")


def _device(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:  # the latter from a torch that is built without that device
            reason = str(error).partition("\n")[0]
            raise OptionError(f"--device {name!r} cannot be used here: {reason}") from error
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny", description="Train the small checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run: tokenizer, plan, state, log")
    parser.add_argument("--export", type=Path, help="where the checkpoint goes (default: OUT/checkpoint)")
    parser.add_argument("--minutes", type=float, help="stop, save and export after so long (default: at the end)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in OUT, if there is one")
    parser.add_argument("--size", choices=sorted(_SIZES), default="full", help="mini is for tests")
    parser.add_argument("--device", default="auto", help="a device of torch (default: its accelerator, else the CPU)")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--probe-every", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--probe-items", type=int, default=64, help="held-out items of each task")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="fuse small operations")
    plan = parser.add_argument_group("plan, fixed when a run begins")
    defaults = Plan()
    for name in _PLANNED:
        default = getattr(defaults, name)
        plan.add_argument(f"--{name.replace('_', '-')}", type=type(default), help=f"(default: {default})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
