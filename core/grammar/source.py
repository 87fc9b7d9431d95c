"""From what a request asks to the text of a grammar.

Everything becomes one EBNF text, or a regular expression: then there is one thing to compile, to cache and to name.
What the vocabulary, a schema or a model family cannot do is refused here, before the request is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.core.grammar.ebnf_check import GrammarError, check_ebnf, check_regex
from deepinfer.core.grammar.json_schema import JsonOptions, SchemaError, schema_to_ebnf
from deepinfer.core.grammar.spec import StructuralTag, StructuredOutput, StructuredOutputError, ToolCalls
from deepinfer.core.grammar.vocabulary import GrammarVocabulary, quoted, renamed
from deepinfer.ops.show import shown

SchemaToRules = Callable[[Any, str], str]
"""Called with a schema and a prefix; gives rules for JSON that satisfies it, the start being `{prefix}root`."""

ToolGrammar = Callable[[Sequence[Mapping[str, Any]], str, bool, SchemaToRules], str]
"""A model family's way to write calls: called with tools, choice, whether several may follow, and a writer of JSON
rules; gives an EBNF text with `Token("name")` for control tokens, and `Trigger("text")` where a dispatch wants a string
with some in it. ValueError where a tool cannot be written."""


@dataclass(frozen=True)
class GrammarSource:
    """What is compiled; equal sources give equal grammars.

    Attributes:
        kind: the language of the text.
        text: a grammar whose start is `root`, or a regular expression.
    """

    kind: Literal["ebnf", "regex"]
    text: str


def source_of(
    spec: StructuredOutput, vocabulary: GrammarVocabulary, tool_grammar: ToolGrammar | None = None
) -> GrammarSource:
    """The grammar that a request asks for.

    Args:
        spec: validated.
        vocabulary: the model's.
        tool_grammar: the model family's way to write calls, None where it has none.

    Raises:
        StructuredOutputError: the schema is not supported or nothing satisfies it (with the place as a JSON pointer),
            a grammar or regular expression is misspelled or can never match, or it names a control token that does not
            exist.
    """
    if spec.regex is not None or spec.grammar is not None:
        return _written(spec, vocabulary)
    if spec.choice is not None:
        return GrammarSource("ebnf", "root ::= " + " | ".join(map(quoted, dict.fromkeys(spec.choice))))
    if spec.structural_tag is not None:
        return GrammarSource("ebnf", _tags(spec.structural_tag, vocabulary, spec.max_whitespace))
    if spec.tool_calls is not None:
        return GrammarSource("ebnf", _calls(spec.tool_calls, vocabulary, spec.max_whitespace, tool_grammar))
    schema = {"type": "object"} if spec.json_object else spec.json_schema
    return GrammarSource("ebnf", json_rules(schema, spec.max_whitespace, "json_schema"))


def _written(spec: StructuredOutput, vocabulary: GrammarVocabulary) -> GrammarSource:
    """What the user wrote as a grammar."""
    try:
        if spec.regex is not None:
            check_regex(spec.regex)
            return GrammarSource("regex", spec.regex)
        assert spec.grammar is not None, "one of the two is given"
        text = vocabulary.resolve(spec.grammar)
        check_ebnf(text)
        return GrammarSource("ebnf", text)
    except GrammarError as error:
        raise StructuredOutputError(str(error)) from error


def json_rules(schema: Any, max_whitespace: int, where: str) -> str:
    """The rules of JSON that satisfies a schema, from `root` on.

    Raises:
        StructuredOutputError: no such rules can be written; `where` and a JSON pointer say why.
    """
    try:
        return schema_to_ebnf(schema, JsonOptions(max_whitespace=max_whitespace))
    except SchemaError as error:
        raise StructuredOutputError(f"{where}{error.pointer}: {error}") from error
    except RecursionError as error:
        raise StructuredOutputError(f"{where}: is nested too deeply") from error


def _tags(structure: StructuralTag, vocabulary: GrammarVocabulary, max_whitespace: int) -> str:
    """Free text that dispatches to a tag behind each trigger."""
    rules: list[str] = []
    behind: dict[str, list[str]] = {trigger: [] for trigger in structure.triggers}
    whole: list[str] = []
    for place, tag in enumerate(structure.tags):
        where = f"structural_tag.tags[{place}]"
        trigger = next(t for t in structure.triggers if tag.begin.startswith(t))
        if vocabulary.cuts_token(tag.begin, len(trigger)):
            raise StructuredOutputError(f"{where}.begin: its trigger {shown(trigger)} ends inside of a control token")
        prefix = f"tag{place}_"
        rules.append(renamed(json_rules(tag.schema, max_whitespace, f"{where}.schema"), prefix))
        inside = f"{prefix}root {vocabulary.literal(tag.end)}"
        behind[trigger].append(f"{vocabulary.literal(tag.begin[len(trigger) :])} {inside}")
        whole.append(f"{vocabulary.literal(tag.begin)} {inside}")
    free = []
    for place, (trigger, bodies) in enumerate(behind.items()):
        if bodies:
            rules.append(f"behind{place} ::= " + " | ".join(bodies))
            free.append(f"({vocabulary.trigger(trigger)}, behind{place})")
    loops = "false" if structure.stop_after_first else "true"
    rules.append(f"free ::= TagDispatch({', '.join(free)}, loop_after_dispatch={loops}, excludes=())")
    rules.append("whole ::= " + " | ".join(whole))
    if not structure.at_least_one:
        root = "free"
    else:
        root = "whole" if structure.stop_after_first else "whole free"
    return "\n".join([f"root ::= {root}", *rules])


def _calls(
    calls: ToolCalls, vocabulary: GrammarVocabulary, max_whitespace: int, tool_grammar: ToolGrammar | None
) -> str:
    if tool_grammar is None:
        raise StructuredOutputError("tool_calls: this model family has no format for calls here")

    def rules(schema: Any, prefix: str) -> str:
        return renamed(json_rules(schema, max_whitespace, "tool_calls.tools"), prefix)

    try:
        return vocabulary.resolve(tool_grammar(calls.tools, calls.choice, calls.parallel, rules))
    except StructuredOutputError:
        raise
    except ValueError as error:
        raise StructuredOutputError(f"tool_calls: {error}") from error
