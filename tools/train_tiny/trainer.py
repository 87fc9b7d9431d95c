"""One training step, and the state that a run resumes from."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.models.deepseek_v41_flash.config import ModelConfig
from deepinfer.models.deepseek_v41_flash.engram_tables import EngramConstants
from deepinfer.models.interface import Vocabulary
from tools.train_tiny.data import Batch
from tools.train_tiny.functions import Functions, compiled_functions
from tools.train_tiny.graphs import CapturedSteps
from tools.train_tiny.losses import losses, parts
from tools.train_tiny.model import Backbone
from tools.train_tiny.optim import Optimizer
from tools.train_tiny.settings import Phase, Plan
from tools.train_tiny.store import WeightStore

STATE_FILE = "state.pt"


class ResumeError(RuntimeError):
    """A state belongs to another plan or configuration."""


class DivergedError(RuntimeError):
    """A loss is not a number, and so are weights since that step; the last saved state is from before."""


@dataclass(frozen=True)
class StepReport:
    """What a step says of itself, on the device until it is read.

    Attributes:
        values: [5] losses: text, balance, index, draft, confidence.
        counts: [4] answer tokens, right ones; draft places reached, accepted ones.
    """

    values: Tensor
    counts: Tensor

    def line(self) -> str:
        """For people. Waits for the device."""
        text, balance, index, draft, confidence = self.values.tolist()
        answers, right, reached, accepted = self.counts.tolist()
        parts = [f"loss {text:.4f}", f"answer tokens {right / max(answers, 1):.4f}", f"balance {balance:.3f}"]
        if index:
            parts.append(f"index {index:.3f}")
        if draft:
            parts.append(f"draft {draft:.3f} accepted {accepted / max(reached, 1):.3f} confidence {confidence:.3f}")
        return "  ".join(parts)


class Trainer:
    """Weights, optimiser and the number of steps done.

    Args:
        config: content of `config.json`.
        vocabulary: the run's tokenizer.
        plan: of the run.
        device: where it runs.
        dtype: of activations.
        compiled: compile the element-wise functions, hundreds of small operations that become a few, and capture steps.
    """

    def __init__(
        self,
        config: dict[str, Any],
        vocabulary: Vocabulary,
        plan: Plan,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compiled: bool = False,
    ) -> None:
        self.config = config
        self.plan = plan
        self.device = device
        parsed = ModelConfig.from_dict(config)
        self.store = WeightStore(parsed, plan.seed).to(device)
        constants = EngramConstants.build(parsed.text, vocabulary).to(device)
        functions = compiled_functions(device) if compiled else Functions()
        self.backbone = Backbone(self.store, constants, dtype, functions=functions)
        self.measured = Backbone(self.store, constants, dtype)
        """The same weights through functions as they are written: what a probe says must not hang on a compiler."""
        self.optimizer = Optimizer(self.store, plan.matrix_lr, plan.other_lr, plan.table_lr)
        self.step = 0
        captures = compiled and device.type == "cuda"
        self._run = CapturedSteps(self._one_step, device) if captures else self._one_step

    @property
    def phase(self) -> Phase:
        """Of the next step."""
        return self.plan.phase(self.step)

    def train(self, batch: Batch) -> StepReport:
        """One step on a batch, which has to be that of `step`."""
        self.optimizer.set_rate(self.plan.rate(self.step))
        values, counts = self._run(batch.to(self.device), self.phase)
        self.step += 1
        return StepReport(values, counts)

    def _one_step(self, batch: Batch, phase: Phase) -> tuple[Tensor, Tensor]:
        self.store.zero_grad(set_to_none=True)  # of a capture that failed
        found = []
        loads: dict[str, Tensor] = {}
        for part in parts(batch):
            part_losses = losses(self.backbone, part, batch, phase)
            part_losses.total.backward()
            found.append(part_losses)
            for name, load in part_losses.loads.items():
                loads[name] = loads[name] + load if name in loads else load
        self.optimizer.step(loads)
        values, counts = (torch.stack([getattr(part, name) for part in found]).sum(0) for name in ("values", "counts"))
        return values, counts

    def save(self, folder: Path) -> None:
        """Write the state; an older one stays whole until the new one is."""
        state = {
            "plan": asdict(self.plan),
            "config": self.config,
            "step": self.step,
            "weights": self.store.state_dict(),
            "optimizer": self.optimizer.state(),
        }
        fresh = folder / f"{STATE_FILE}.new"
        torch.save(state, fresh)
        os.replace(fresh, folder / STATE_FILE)

    def resume(self, folder: Path) -> None:
        """Go on from the state in `folder`.

        Raises:
            ResumeError: it was made with another plan or configuration.
            FileNotFoundError: there is none.
        """
        state = torch.load(folder / STATE_FILE, map_location=self.device, weights_only=True)
        for name, mine in (("plan", asdict(self.plan)), ("config", self.config)):
            if state[name] != mine:
                changed = sorted(key for key in mine if state[name].get(key) != mine[key])
                raise ResumeError(f"{folder / STATE_FILE}: its {name} differs in {', '.join(changed)}")
        self.store.load_state_dict(state["weights"])
        self.optimizer.load(state["optimizer"])
        self.step = state["step"]

    def check(self, report: StepReport) -> None:
        """Refuse to go on from a loss that is no number.

        Raises:
            DivergedError: it is none.
        """
        if not bool(torch.isfinite(report.values).all()):
            raise DivergedError(f"step {self.step - 1}: losses {report.values.tolist()}; resume from the last state")


def as_served(phase: Phase) -> Phase:
    """The phase without what only training does: what a probe measures."""
    return replace(phase, index=False, draft=False)
