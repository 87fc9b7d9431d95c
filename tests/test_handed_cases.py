"""Public bug reports that this engine must not repeat: each is named by a test that is collected, or by an op's case.

The reports are faults of other engines, turned into small inputs (`SX-1` and so on); a test that stands for one has its
id in its name (`sx_1`), its docstring, its parameters or a comment. This index holds only that none is forgotten.
"""

import ast
import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUM_CASES = {
    "SX": range(1, 6),  # structured output with speculation and mixed batches
    "SG": range(1, 7),  # schemas, regular expressions and grammars
    "ST": range(1, 5),  # stop strings, text, finish reasons
    "SA": range(1, 9),  # sampling
    "LD": range(1, 4),  # logprobs and determinism
    "KV": range(1, 6),  # cache, prefix reuse, preemption, cancelling
    "AP": range(1, 3),  # the API under bad input
    "MN": range(1, 7),  # the model's numbers
    "LC": (1, 2, 3, 4, 5, 11),  # loading, tokenizer, chat format
    "D": (1, 2, 3, 4, 5, 11, 12, 13),  # what users of DeepInfer 0.1.0 run into
}
CASES = [f"{kind}-{number}" for kind, numbers in NUM_CASES.items() for number in numbers]
_ID = re.compile(r"\b(?:SX|SG|ST|SA|LD|KV|AP|MN|LC|D)-\d+\b")
_ID_IN_NAME = re.compile(r"_((?:sx|sg|st|sa|ld|kv|ap|mn|lc|d)_\d+)(?=_|$)")


def _ids_of_tests() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        if path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                cases = _ID.findall("\n".join(lines[first - 1 : node.end_lineno]))
                cases += [name.upper().replace("_", "-") for name in _ID_IN_NAME.findall(node.name)]
                for case in cases:
                    found.setdefault(case, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def _ids_of_op_cases() -> set[str]:
    """Ids in the names of cases that every backend must pass, and that the suite runs on the CPU."""
    must_pass = (TESTS / "conformance" / "mustpass.json").read_text(encoding="utf-8")
    assert isinstance(json.loads(must_pass), dict)
    return set(_ID.findall(must_pass))


@pytest.fixture(scope="module")
def ids_of_tests() -> dict[str, list[str]]:
    return _ids_of_tests()


@pytest.mark.parametrize("case", CASES)
def test_a_report_has_a_test(ids_of_tests, case) -> None:
    assert case in ids_of_tests or case in _ids_of_op_cases()


def test_no_test_names_a_report_that_there_is_not(ids_of_tests) -> None:
    assert ids_of_tests.keys() <= set(CASES)
