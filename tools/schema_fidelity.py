"""Runs the schema suite and writes `docs/schema_fidelity.md` from what came out: `python tools/schema_fidelity.py`."""

from __future__ import annotations

import runpy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from deepinfer.core.grammar.json_schema import JsonOptions, SchemaError, schema_to_ebnf
from deepinfer.core.grammar.vocabulary import GrammarVocabulary
from deepinfer.core.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "schema_fidelity.md"
GROUPS = ("types", "numbers", "strings", "arrays", "objects", "combinations")
MARK = "¦"
"""Stands in a text in front of the character at which it must be refused."""

VOCAB_SIZE, EOS = 384, 1

_HEAD = """# How faithfully JSON schemas are kept

Written by `tools/schema_fidelity.py` from a run of the suite in `tests/core/grammar/schema_suite`, and held against
it by a test. Each case is a schema with texts that must be generated whole, token by token, and texts that must be
refused, most of them at a given character; `jsonschema` confirms which texts satisfy the schema.

What a grammar lets through always satisfies the schema. *Exact* keywords let through all that does; *subset* keywords
leave something out, which the suite shows and the last column names. That properties come in the schema's order is
said of `properties` alone, not of each keyword about objects. Schemas that are malformed, that nothing satisfies, or
that no grammar can keep are refused when the request is submitted, with a JSON pointer to the keyword at fault.

"accepted" and "refused" count texts, "pairs" one of each under the same schema, "narrower" texts that satisfy the
schema and cannot be generated, "no schema" schemas that are refused at submit.
"""


@dataclass(frozen=True)
class SuiteCase:
    """A schema and what must become of some texts, or where it must be refused.

    Attributes:
        valid, invalid, narrower: texts; those in `narrower` satisfy the schema and are refused nevertheless.
        refused: JSON pointer of the refusal; None where the schema is good.
        kind: why it is refused.
    """

    keyword: str
    schema: Any
    valid: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    narrower: list[str] = field(default_factory=list)
    refused: str | None = None
    why: str = ""
    kind: Literal["", "malformed", "unsatisfiable", "unsupported"] = ""
    compact: bool = False

    @property
    def options(self) -> JsonOptions:
        """How JSON may be written."""
        return JsonOptions(max_whitespace=0) if self.compact else JsonOptions()


@lru_cache
def load() -> tuple[list[SuiteCase], dict[str, str]]:
    """All cases, and the notes on each keyword in the order of the table."""
    cases: list[SuiteCase] = []
    notes: dict[str, str] = {}
    for group in GROUPS:
        data = runpy.run_path(str(ROOT / "tests" / "core" / "grammar" / "schema_suite" / f"{group}.py"))
        cases += [SuiteCase(**case) for case in data["CASES"]]
        notes |= data["NOTES"]
    return cases, notes


class Runner:
    """Feeds texts to grammars, token by token, with the small tokenizer."""

    def __init__(self) -> None:
        import xgrammar

        self._library = xgrammar
        self.tokenizer = Tokenizer.from_dir(ROOT / "tests" / "data")
        tokens = GrammarVocabulary(self.tokenizer, VOCAB_SIZE, (EOS,)).token_bytes()
        info = xgrammar.TokenizerInfo(tokens, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, ebnf: str) -> Any:
        """A compiled grammar."""
        return self._compiler.compile_grammar(ebnf)

    def stops_at(self, compiled: Any, text: str) -> int | None:
        """The byte at which the token begins that a grammar refuses; -1 if it refuses the end, None if nothing."""
        matcher = self._library.GrammarMatcher(compiled)
        at = 0
        for token in self.tokenizer.encode(text):
            if not matcher.accept_token(token):
                return at
            at += len(self.tokenizer.id_to_bytes(token))
        return None if matcher.accept_token(EOS) else -1

    def faults(self, case: SuiteCase) -> list[str]:
        """What is wrong with our treatment of a case."""
        try:
            ebnf = schema_to_ebnf(case.schema, case.options)
        except SchemaError as error:
            if case.refused is None:
                return [f"refused at {error.pointer!r}: {error}"]
            right = error.pointer == case.refused and case.why in str(error)
            return [] if right else [f"refused at {error.pointer!r}, not {case.refused!r}, or otherwise: {error}"]
        if case.refused is not None:
            return [f"not refused at {case.refused!r}"]
        compiled = self.compile(ebnf)
        found = [f"{t} stops at {s}" for t in case.valid if (s := self.stops_at(compiled, t)) is not None]
        found += [f"{text} is let through" for text in case.narrower if self.stops_at(compiled, text) is None]
        return found + [fault for text in case.invalid if (fault := self._wrong_end(compiled, text))]

    def _wrong_end(self, compiled: Any, marked: str) -> str:
        """What is wrong where a text must be refused at its mark."""
        before, _, behind = marked.partition(MARK)
        text = before + behind
        stop = self.stops_at(compiled, text)
        place = len(before.encode())
        if stop is None:
            return f"{text} is let through"
        if stop == -1:
            return "" if not behind else f"{marked} is refused at its end only"
        tokens = self.tokenizer.encode(text[: len(text)])
        at = 0
        for token in tokens:
            size = len(self.tokenizer.id_to_bytes(token))
            if at == stop:
                return "" if at <= place < at + size else f"{marked} is refused in the token at byte {stop}"
            at += size
        raise AssertionError("a stop is where a token begins")


def page(runner: Runner) -> str:
    """The whole page.

    Raises:
        ValueError: the suite does not pass.
    """
    cases, notes = load()
    faults = [f"{case.keyword}: {case.schema}: {fault}" for case in cases for fault in runner.faults(case)]
    if faults:
        raise ValueError("the schema suite does not pass:\n" + "\n".join(faults))
    lines = [
        "| keyword | fidelity | accepted | refused | pairs | narrower | no schema | what to know |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    totals = [0] * 5
    for keyword, note in notes.items():
        of = [case for case in cases if case.keyword == keyword]
        counts = [
            sum(len(case.valid) for case in of),
            sum(len(case.invalid) for case in of),
            sum(min(len(case.valid), len(case.invalid)) for case in of),
            sum(len(case.narrower) for case in of),
            sum(case.refused is not None for case in of),
        ]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(f"| {keyword} | {_fidelity(of)} | {' | '.join(map(str, counts))} | {note} |")
    lines.append(f"| all | | {' | '.join(map(str, totals))} | |")
    return f"{_HEAD}\n" + "\n".join(lines) + "\n"


def _fidelity(cases: list[SuiteCase]) -> str:
    if not any(case.valid for case in cases):
        return "refused"
    kept = "subset" if any(case.narrower for case in cases) else "exact"
    return kept + (", partly refused" if any(case.kind == "unsupported" for case in cases) else "")


if __name__ == "__main__":
    TARGET.write_text(page(Runner()), encoding="utf-8")
