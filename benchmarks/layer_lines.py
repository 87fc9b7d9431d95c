"""Lines of the benchmark of whole layers: what was measured, what was not, and when drafts pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One measurement.

    Attributes:
        kind: "prefill" or "decode".
        batch: sequences.
        context: tokens of each: of the prompt, or stored when decoding begins.
        speculation: with drafts.
        graphs: decode steps as graphs.
        step_us: of a decode step; of a prompt's whole prefill.
        tokens_per_s: prompt tokens, or drawn tokens, of all sequences.
        captured: share of the timed steps that were replays.
        eager: why the others were not, in words.
        drawn: tokens that a sequence drew in a step.
        best_us: what `step_us` is at best; 0 where no roof is known.
        bound: "memory" or "arithmetic", what that comes from.
        graph_mb: device memory that results in graphs take so far.
    """

    kind: str
    batch: int
    context: int
    speculation: bool
    graphs: bool
    step_us: float
    tokens_per_s: float
    captured: float
    eager: str = ""
    drawn: float = 1.0
    best_us: float = 0.0
    bound: str = ""
    graph_mb: float = 0.0

    @property
    def share(self) -> float:
        """Of the roof."""
        return self.best_us / self.step_us

    def __str__(self) -> str:
        why = f" ({self.eager})" if self.eager else ""
        roof = f" {self.share:4.0%} of {self.bound} ({self.best_us:.0f} us)" if self.best_us else ""
        run = (
            f" {self.captured:5.0%} replayed{why}, graphs hold {self.graph_mb:.0f} MB" if self.kind == "decode" else ""
        )
        return (
            f"{self.kind:8} batch {self.batch:4} context {self.context:7} "
            f"{'drafts' if self.speculation else '      '} {'graphs' if self.graphs else 'eager '} "
            f"{self.step_us:11.0f} us {self.tokens_per_s:11.0f} tokens/s{roof}{run}"
        )


@dataclass(frozen=True)
class Skipped:
    """What was asked for and not measured.

    Attributes:
        what: of it.
        why: in words.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: not measured, {self.why}"


def break_even(lines: Sequence[Line]) -> list[str]:
    """For each decode measured with and without drafts: how many drafts must be kept for speculation to pay."""
    plain = {(x.batch, x.context, x.graphs): x for x in lines if x.kind == "decode" and not x.speculation}
    said = []
    for line in lines:
        other = plain.get((line.batch, line.context, line.graphs))
        if line.kind == "decode" and line.speculation and other is not None:
            kept = line.step_us / other.step_us - 1
            how = "graphs" if line.graphs else "eager"
            said.append(
                f"batch {line.batch}, context {line.context}, {how}: drafts pay from {kept:.2f} kept of a block on"
            )
    return said
