"""Grammars and regular expressions are usable, or refused at once with the rule named."""

import pytest

from deepinfer.core.grammar.ebnf_check import GrammarError, check_ebnf, check_regex


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= root "a" | "b"',
        'root ::= x y\nx ::= root | "b"\ny ::= "" | "c"',
        'root ::= ("a" | root)* ")" "(" [)(|]',
        'root ::= "a"+ Token(3) [^a-z]',
        'root ::= TagDispatch(("<f>", x), loop_after_dispatch=true, excludes=())\nx ::= "a"',
        'root ::= "a"{0,100000} # many\nunused ::= unused',
        'root ::= "a"{0000000001} "{9999999}" [{9999999}] # {9999999}',
        'root ::= "a" (="b")',
        'root ::= (x | y) z\nx ::= x{0,3} y*\ny ::= y? "b"\nz ::= (z | y y)+',
    ],
)
def test_usable_grammars_pass(grammar) -> None:
    check_ebnf(grammar)


@pytest.mark.parametrize(
    ("grammar", "what"),
    [
        ("", "empty"),
        ("root ::= ", "Expect element"),
        ('start ::= "a"', '"root" is not found'),
        ("root ::= missing", '"missing" is not defined'),
        ('root ::= "a"\nroot ::= "b"', "multiple times"),
        ('root ::= "a', "line 1"),
        ('root ::= "x" loop\nloop ::= loop "a"', "'loop' can never match"),
        ('root ::= "x" other\nother ::= "b" third\nthird ::= other', "'third' can never match"),
        ('root ::= "x" y{2,3}\ny ::= y', "'y' can never match"),
        ('root ::= "x" | y\ny ::= (z | y) "a"\nz ::= z y', "'z' can never match"),
        ("root ::= []", "'root' has an empty character class"),
        ('root ::= "a"{1,1000000000}', "'{1,1000000000}' counts beyond"),
        ('root ::= "a"{4294967297}', "'{4294967297}' counts beyond"),  # 1 in 32 bits
        ('root ::= "{1}" [{2}"] { 0 , 3000000000 } # {4}', "'{ 0 , 3000000000 }' counts beyond"),
        ('root ::= "a"{5,2}', "larger than upper bound"),
        ("a" * (1 << 21), "at most"),
    ],
)
def test_others_are_refused_with_the_place(grammar, what) -> None:
    with pytest.raises(GrammarError, match="grammar: ") as caught:
        check_ebnf(grammar)
    assert what in str(caught.value)


@pytest.mark.parametrize("pattern", ["", "a+|b", "[a-z]{2,9}", "\\{9999999\\}"])
def test_usable_patterns_pass(pattern) -> None:
    check_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(a", "parenthesis"),
        ("[z-a]", "lower bound"),
        ("(?=a)", "Lookahead"),
        ("a{99999999}", "beyond"),
        ("a{1," + "9" * 5000 + "}", "beyond"),
    ],
)
def test_other_patterns_are_refused(pattern, what) -> None:
    with pytest.raises(GrammarError, match="regex: ") as caught:
        check_regex(pattern)
    assert what in str(caught.value)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("between", [" | ", " "])
def test_a_long_chain_of_rules_is_read_once(order, between) -> None:
    """Quadratic work on these would take minutes to hours."""
    names = [f"r{place}" for place in range(20_000)]
    rules = [f"{name} ::= {after}" for name, after in zip(names, [*names[1:], '"a"'], strict=True)]
    check_ebnf("\n".join([f"root ::= {between.join(names[::order])}", *rules]))
    with pytest.raises(GrammarError, match=r"rule 'r.*' can never match"):
        check_ebnf("\n".join([f"root ::= {between.join(names[::order])}", *rules[:-1], f"{names[-1]} ::= root"]))
