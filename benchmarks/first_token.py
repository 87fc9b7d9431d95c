"""Seconds from nothing to a first token: loading a checkpoint on the CPU, then answering one short question.

    python benchmarks/first_token.py [CHECKPOINT] [--repeats 5]

The share of reading the file alone, measured in the same process, says what of it no engine could save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from deepinfer import LLM, SamplingParams

TINY = Path(__file__).resolve().parents[1] / "assets" / "deepinfer-tiny"


def measure(folder: Path) -> dict[str, float]:
    """Seconds of reading, of loading and of the first token."""
    began = time.perf_counter()
    for file in sorted(folder.iterdir()):
        file.read_bytes()
    read = time.perf_counter()
    with LLM(str(folder), backend="cpu") as llm:
        loaded = time.perf_counter()
        conversation = [{"role": "user", "content": "What is 348 + 275?"}]
        (answer,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=1), thinking=False)
        done = time.perf_counter()
    assert answer.error is None and answer.content == "6", answer
    return {"reading": read - began, "loading": loaded - read, "first token": done - loaded, "in all": done - read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=TINY)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    runs = [measure(options.checkpoint) for _ in range(options.repeats)]
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print("first run  " + "  ".join(f"{name} {seconds:.2f} s" for name, seconds in runs[0].items()))
    print("median     " + "  ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items()))
    if options.json:
        options.json.write_text(json.dumps({"first": runs[0], "median": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
