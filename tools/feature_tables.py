"""Writes `docs/features.md` from the code that checks features: `python tools/feature_tables.py`."""

from __future__ import annotations

from pathlib import Path

from deepinfer.core.features import feature_tables

TARGET = Path(__file__).parents[1] / "docs" / "features.md"

_HEAD = """# What a request may ask for

Printed by `tools/feature_tables.py` from `core/features.py`, which is also what refuses a request; a test holds this
page against it. Parameters are those of `SamplingParams`. What is not refused works, alone and together, and gives the
same answer with `coupled` speculation or none, steps launched ahead or not, after preemption and in any batch.

## With the engine's modes

Some features change logits by what the request has produced (`core/shaping.py`). Such a request's next step is planned
when the one before is collected, and its drafts are brought to the host first, so that each verified row is
shaped behind the drafts before it. Other requests of the batch are not held up. With `rejection` such a request is
verified without drafts: its draft's logits are gone by then. `logits_processors` that are functions of logits wait for
the logits as well.

"""

_PAIRS = """
## With each other

`+` means that both can be had at once.

"""


def page() -> str:
    """The whole page."""
    modes, pairs = feature_tables()
    return _HEAD + modes + "\n" + _PAIRS + pairs + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
