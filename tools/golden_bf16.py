"""Hold a backend's bfloat16 logits against golden folders, with the golden model's own bfloat16 run as the yardstick.

    python tools/golden_bf16.py FOLDER [FOLDER ...] --backend cuda_sm90

A golden folder holds a small checkpoint, `golden.safetensors` with float32 logits of prompts, and `stats.json`, which
says how far the golden model is from those logits when it runs in bfloat16. An engine that is right is about as far:
over prompts of at least 24 tokens, the mean difference may be 1.5 times that, and the share of positions with the same
best token 0.05 less. Activations are not rounded to 8 bits, since the golden model does not do that either.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer import LLM

MIN_TOKENS: Final = 24
"""Shorter prompts have too few positions for a mean to say anything."""
MOST_TIMES: Final = 1.5
LEAST_LESS: Final = 0.05


@dataclass(frozen=True)
class Line:
    """One prompt.

    Attributes:
        name: folder and prompt.
        length: its tokens.
        mean_diff: mean absolute difference of logits.
        most: what it may be.
        agreement: share of positions whose best token is the golden one.
        least: what it must be.
    """

    name: str
    length: int
    mean_diff: float
    most: float
    agreement: float
    least: float

    @property
    def holds(self) -> bool:
        """Whether both are within bounds; a NaN is not."""
        return self.mean_diff <= self.most and self.agreement >= self.least

    def __str__(self) -> str:
        verdict = "ok  " if self.holds else "FAIL"
        return (
            f"{verdict} {self.name:16} {self.length:4} tokens: mean |diff| {self.mean_diff:.4f} (at most "
            f"{self.most:.4f}), same best token {self.agreement:.3f} (at least {self.least:.3f})"
        )


def judge(name: str, got: Tensor, want: Tensor, yardstick: Mapping[str, Any]) -> Line:
    """Compare the logits of one prompt.

    Args:
        name: for people.
        got: [T, V] float32.
        want: [T, V] float32.
        yardstick: the prompt's entry in `stats.json`.
    """
    agreement = float((got.argmax(-1) == want.argmax(-1)).float().mean())
    return Line(
        name,
        want.shape[0],
        float((got - want).abs().mean()),
        MOST_TIMES * yardstick["mean_abs_diff_bf16"],
        agreement,
        yardstick["argmax_agree_bf16"] - LEAST_LESS,
    )


def compare(folder: Path, backend: str) -> Iterator[Line]:
    """Run the prompts of a golden folder that are long enough."""
    golden, stats = load_file(str(folder / "golden.safetensors")), json.loads((folder / "stats.json").read_text())
    prompts = sorted(name.removesuffix(".input_ids") for name in golden if name.startswith("prompt") and "ids" in name)
    with LLM(str(folder), backend=backend, dtype="bfloat16", activation_rounding=False) as llm:
        for prompt in prompts:
            ids = golden[f"{prompt}.input_ids"].flatten().tolist()
            if len(ids) >= MIN_TOKENS:
                want = golden[f"{prompt}.logits"].float().reshape(len(ids), -1)
                yield judge(f"{folder.name} {prompt}", llm.logits(ids), want, stats[prompt])


def main() -> int:
    """Compare, print; 0 when all holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--backend", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [line for folder in options.folders for line in compare(folder, options.backend)]
    print(*lines, sep="\n")
    return 0 if lines and all(line.holds for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
