"""Natural text of clear licence, from what is installed anyway."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

_ROOT = Path(__file__).resolve().parents[2]
_MIN_CHARS = 60


@dataclass(frozen=True)
class Source:
    """Paragraphs of one origin.

    Attributes:
        name: what it is.
        licence: under which it may be used.
        paragraphs: its text in pieces.
    """

    name: str
    licence: str
    paragraphs: tuple[str, ...]


def natural_text() -> tuple[Source, ...]:
    """All sources, in a fixed order."""
    reference = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    documents = sorted((_ROOT / "docs").glob("*.md"))
    own = "\n\n".join(path.read_text(encoding="utf-8") for path in documents)
    return (
        Source("the Python language reference (pydoc_data.topics)", "PSF-2.0", _paragraphs(reference)),
        Source("the documentation of this project, English and Chinese", "Apache-2.0", _paragraphs(own)),
    )


def _paragraphs(text: str) -> tuple[str, ...]:
    pieces = (re.sub(r"[ \t]+", " ", piece).strip() for piece in re.split(r"\n\s*\n", text))
    return tuple(piece for piece in pieces if len(piece) >= _MIN_CHARS)
