"""Masks of a step: one buffer, all answers together, drafts followed and taken back without a trace."""

import random

import numpy as np
import pytest

from deepinfer.core.errors import RequestError
from deepinfer.core.grammar.gates import ThinkingGate
from deepinfer.core.grammar.masks import GrammarMasks, bits_of, forbid_unless_all
from deepinfer.core.grammar.matching import Matcher
from deepinfer.core.grammar.shaper import GrammarShaper, accept_each
from deepinfer.core.grammar.spec import StructuralTag, StructuredOutput, Tag
from deepinfer.core.shaping import PLAIN, pack_mask, unpack_mask
from deepinfer.testing.workloads import cpu_ops

VOCAB, EOS, END_THINK, DSML = 384, 1, 377, 378
BLOCK = 8

SPECS = {
    "json": StructuredOutput(json_object=True),
    "schema": StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "array"}},
            "required": ["a"],
        }
    ),
    "regex": StructuredOutput(regex=r"(ab|a[0-9]{1,3})+x?"),
    "choice": StructuredOutput(choice=["yes", "yes, but", "no"]),
    "repeat": StructuredOutput(grammar='root ::= "ab"{0,5} [a-c]{2,4} "z" | "q" root "q" | ""'),
    "left recursion": StructuredOutput(grammar='root ::= root "a" | "b"'),
    "tags": StructuredOutput(structural_tag=StructuralTag([Tag("<f>", {"type": "integer"}, "</f>")], ["<f"])),
    "control": StructuredOutput(grammar='root ::= ("a" | Token("｜DSML｜") [b-d])*'),
}


@pytest.fixture(scope="session")
def compiled(grammars):
    jobs = {name: grammars.submit(spec, grammars.source(spec)) for name, spec in SPECS.items()}
    for job in jobs.values():
        grammars.compiler.wait([job], 120)
    assert all(job.grammar is not None for job in jobs.values()), [job.error for job in jobs.values()]
    return {name: job.grammar for name, job in jobs.items()}


@pytest.fixture
def masks():
    return GrammarMasks(cpu_ops().context.runtime, VOCAB)


@pytest.fixture
def make(compiled, masks):
    def made(name, **options):
        shaper = GrammarShaper(masks, stop_token_ids=(EOS,), ends=(EOS,), **options)
        shaper.start(compiled[name])
        return shaper

    return made


def allowed(shape):
    return set(np.flatnonzero(unpack_mask(shape.mask, VOCAB)).tolist())


def state(shaper):
    """All that can be seen of a matcher."""
    over = shaper.matcher.is_over
    return over, shaper.num_outputs, shaper.state, None if over else shaper.shape(())[0].mask.tobytes()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(12))
def test_drafts_leave_no_trace_sx_2(make, masks, name, seed) -> None:
    """Whatever is accepted and however many drafts are followed, legal, illegal or the end itself."""
    rng = random.Random(f"{name} {seed}")
    shaper, twin = make(name), make(name)
    for _ in range(rng.randint(1, 8)):
        before = state(shaper)
        for count in range(BLOCK + 1):
            drafts, probe = [], make(name)
            probe.accept(accepted(twin))
            for _ in range(count):
                ids = sorted(allowed(probe.shape(())[0])) if not probe.matcher.is_over else []
                legal = [t for t in ids if t != EOS] if rng.random() < 0.9 else ids
                drafts.append(rng.choice(legal or [rng.choice([EOS, 0, 2, 70, -1, VOCAB, 1 << 30])]))
                if drafts[-1] in ids:
                    probe.accept([drafts[-1]])
            masks.fill([(shaper, drafts)])
            rows = shaper.shape(drafts)
            assert len(rows) == count + 1
            check(rows, drafts, make(name), accepted(twin))
            assert state(shaper) == before
        ids = allowed(shaper.shape(())[0])
        token = rng.choice(sorted(ids))
        shaper.accept([token])
        remember(twin, token)
        if shaper.matcher.is_over:
            break


def accepted(twin):
    return getattr(twin, "tokens", [])


def remember(twin, token):
    twin.tokens = [*accepted(twin), token]


def check(rows, drafts, fresh, known):
    """Row i is what a matcher that really went there says, up to the first draft that is not allowed or ends it."""
    fresh.accept(known)
    for row, draft in zip(rows, [*drafts, None], strict=True):
        want = fresh.shape(())[0].mask
        assert np.array_equal(row.mask, want)
        if draft is None or draft not in allowed(row) or draft == EOS:
            break
        fresh.accept([draft])
    else:
        raise AssertionError("there is always a last row")


def test_answers_of_a_step_are_masked_together_as_each_alone(make, masks) -> None:
    """Also when one walk ends at an illegal draft, and others go on."""
    texts = {"json": [93, 4, 67, 2, 70], "regex": [67, 68, 67, 18, 5], "choice": [2, 2], "left recursion": [68, 67]}
    answers = [(make(name), drafts) for name, drafts in texts.items()]
    alone = [shaper.shape(drafts) for shaper, drafts in answers]
    masks.fill(answers)
    together = [shaper.shape(drafts) for shaper, drafts in answers]
    rows = [row for shapes in together for row in shapes if row.mask is not None]
    assert sorted(row.mask_row for row in rows) == list(range(len(rows))) and masks.num_rows == len(rows)
    sent = masks.send().numpy()
    for shapes, others in zip(together, alone, strict=True):
        assert [row.mask is None for row in shapes] == [row.mask is None for row in others]
        for row, other in zip(shapes, others, strict=True):
            if row.mask is not None:
                assert np.array_equal(row.mask, other.mask) and np.array_equal(sent[row.mask_row], row.mask)
    assert masks.num_steps == 1 and masks.num_illegal_drafts == 3


def test_rows_behind_an_illegal_draft_are_plain(make, masks) -> None:
    shaper = make("regex")
    masks.fill([(shaper, [67, 2, 67, 67])])
    assert shaper.shape([67, 2, 67, 67])[2:] == [PLAIN] * 3
    assert masks.num_illegal_drafts == 1


def test_no_bits_are_set_past_the_vocabulary(make) -> None:
    """Whoever asks whether a mask leaves anything may count words."""
    shaper = make("tags")
    mask = shaper.shape(())[0].mask
    assert len(mask) * 32 == VOCAB and allowed(shaper.shape(())[0]) <= set(range(VOCAB))


def test_a_control_token_is_reached_by_name_only(make) -> None:
    ids = allowed(make("control").shape(())[0])
    assert DSML in ids and END_THINK not in ids and 0 not in ids
    for name in ("json", "schema", "regex", "choice"):
        assert not allowed(make(name).shape(())[0]) & set(range(373, 384)), name


def test_one_broken_answer_is_its_own_fault(make, masks) -> None:
    class Broken(Matcher):
        def __init__(self):
            self.inner = None

    shapers = [make("regex"), make("choice"), make("json")]
    shapers[1]._matcher = Broken()
    masks.fill([(shaper, []) for shaper in shapers])
    want = [make("regex").shape(())[0], make("json").shape(())[0]]
    assert [allowed(shapers[i].shape(())[0]) for i in (0, 2)] == [allowed(shape) for shape in want]
    with pytest.raises((TypeError, AttributeError)):
        shapers[1].shape(())


def test_min_tokens_forbids_an_end_unless_nothing_else_is_left(make) -> None:
    free = make("left recursion", min_tokens=3)
    free.accept([68])
    assert allowed(free.shape(())[0]) == allowed(make_behind(make, "left recursion", [68]).shape(())[0]) - {EOS}
    drafts = [67, 67, 67]
    rows = free.shape(drafts)
    assert [EOS in allowed(row) for row in rows] == [False, False, True, True]
    done = make("choice", min_tokens=9)
    done.accept(letters("no"))
    assert allowed(done.shape(())[0]) == {EOS}


def make_behind(make, name, tokens):
    shaper = make(name)
    shaper.accept(tokens)
    return shaper


def letters(text):
    """Tokens of single letters: a is 67."""
    return [67 + ord(letter) - ord("a") for letter in text]


def test_a_token_that_was_forced_against_the_grammar_is_an_error(make) -> None:
    shaper = make("regex")
    with pytest.raises(RequestError, match=r"output token 0 was forced to be id 80.*not allow") as caught:
        shaper.accept([80])
    assert caught.value.code == "grammar_violated"


def test_thinking_is_free_but_for_the_end(make, masks) -> None:
    shaper = make("regex", gate=ThinkingGate(END_THINK, True, (EOS,)))
    drafts = [70, END_THINK, 67, 2]
    masks.fill([(shaper, drafts)])
    rows = shaper.shape(drafts)
    assert [row.forbidden.tolist() for row in rows[:2]] == [[EOS], [EOS]] and rows[0].mask is None
    assert allowed(rows[2]) == allowed(make("regex").shape(())[0])
    assert allowed(rows[3]) == allowed(make_behind(make, "regex", [67]).shape(())[0])
    shaper.accept(drafts[:3])
    assert allowed(shaper.shape(())[0]) == allowed(rows[3])


def test_buffers_grow_and_take_turns(make, masks) -> None:
    shapers = [make("choice") for _ in range(40)]
    masks.fill([(shaper, []) for shaper in shapers])
    first = masks.send().numpy().copy()
    assert first.shape == (40, VOCAB // 32)
    masks.fill([(shapers[0], [])])
    assert masks.send().shape == (1, VOCAB // 32)
    want = pack_mask(sorted(allowed(make("choice").shape(())[0])), VOCAB)
    assert (first == want).all()


def test_answers_with_one_row_have_the_masks_that_they_would_have_alone(make, masks) -> None:
    def answers():
        """An end that is forbidden, one that is all there is, one that is not early any more, and no form of it."""
        return [
            make_behind(make, "left recursion", [68]),
            make("left recursion", min_tokens=3),
            make_behind(make, "choice", letters("no")),
            *(make(name, min_tokens=2) for name in SPECS),
        ]

    early = make("left recursion", min_tokens=3)
    early.accept([68])
    over = make("choice", min_tokens=9)
    over.accept(letters("no"))
    single, twins = [*answers(), early, over], [*answers(), early, over]
    walked = make("regex")
    assert masks.fill([(walked, [67])], single)
    sent = masks.send().numpy()
    assert len(sent) == len(single) + 2 and masks.num_rows == len(sent)
    for row, twin in zip(sent, twins, strict=False):
        assert (row == twin.shape(())[0].mask).all()
    rows = walked.shape([67])
    assert [row.mask_row for row in rows] == [len(single), len(single) + 1]
    assert allowed(rows[0]) == allowed(make("regex").shape(())[0])


def test_a_broken_answer_among_those_with_one_row_is_told(make, masks) -> None:
    class Broken(Matcher):
        def __init__(self):
            self.inner = None

    shapers = [make("regex"), make("choice")]
    shapers[1]._matcher = Broken()
    assert not masks.fill([], shapers) and masks.num_rows == 0
    assert allowed(shapers[0].shape(())[0]) == allowed(make("regex").shape(())[0])


def test_ids_are_forbidden_but_where_nothing_else_is_allowed() -> None:
    masks = np.stack([pack_mask(ids, 96) for ids in ((0, 31, 40, 95), (31, 95), (), (5,), (31, 32))])
    forbid_unless_all(masks, [0, 1, 2, 3], bits_of([95, 31, 31]))
    left = [np.flatnonzero(unpack_mask(mask, 96)).tolist() for mask in masks]
    assert left == [[0, 40], [31, 95], [], [5], [31, 32]]
    forbid_unless_all(masks, [4], bits_of(()))
    assert np.flatnonzero(unpack_mask(masks[4], 96)).tolist() == [31, 32]


def test_answers_go_on_together_as_each_alone(make) -> None:
    shapers = [make("regex"), make("choice"), make("left recursion")]
    assert accept_each(shapers, [67, *letters("n"), 68]) == {}
    twins = [make_behind(make, name, [token]) for name, token in (("regex", 67), ("choice", letters("n")[0]))]
    assert [state(shaper) for shaper in shapers[:2]] == [state(twin) for twin in twins]
    faults = accept_each(shapers, [68, 80, 67])
    assert list(faults) == [1] and faults[1].code == "grammar_violated"
    assert "output token 1 was forced to be id 80" in str(faults[1])
    assert state(shapers[0]) == state(make_behind(make, "regex", [67, 68]))
