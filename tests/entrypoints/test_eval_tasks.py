"""The tasks themselves: each accepts its own answers, refuses others, and keeps to its split."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepinfer.entrypoints.eval_tasks import SUITES, TASKS, Answer, Item, make_item, make_items
from deepinfer.entrypoints.eval_tasks.atoms import split_of
from deepinfer.entrypoints.eval_tasks.lookups import Haystack
from deepinfer.models.deepseek_v41_flash.chat import encode_chat
from deepinfer.models.deepseek_v41_flash.output_parser import parse_completion

NUM = 60


def items(task, split="held_out"):
    return [make_item(task, split, 1, number) for number in range(NUM)]


def said(item):
    """What an engine reports of the item's own answer: rendered, then parsed."""
    prompt = encode_chat(item.request)
    text = encode_chat(item.answered_request, add_generation_prompt=False).text
    assert text.startswith(prompt.text), "an answer follows its prompt"
    completion = text.removeprefix(prompt.text).removesuffix("<｜end▁of▁sentence｜>")
    return parse_completion(completion, prompt.starts_in_reasoning, tools=item.request.get("tools"))


@pytest.mark.parametrize("task", TASKS)
def test_a_task_accepts_its_own_answers(task) -> None:
    for item in items(task):
        message = said(item)
        assert item.accepts(message.content, message.tool_calls), item
        assert message.reasoning_content == item.answer.reasoning


@pytest.mark.parametrize("task", TASKS)
def test_a_task_refuses_the_answer_of_another_item(task) -> None:
    made = items(task)
    for item, other in zip(made, made[1:] + made[:1], strict=True):
        if item.answer == other.answer:
            continue
        message = said(other)
        assert not item.accepts(message.content, message.tool_calls), (item, other)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "tool_call"])
def test_a_task_refuses_a_corrupted_answer(task) -> None:
    for item in items(task):
        content = item.answer.content
        for wrong in (content[:-1], content + "0", "", content[1:]):
            assert not item.accepts(wrong), (item, wrong)
        assert not item.accepts(content, [SimpleNamespace(name="get_weather", arguments="{}")])


def test_tool_calls_are_compared_by_name_and_arguments() -> None:
    for item in items("tool_call"):
        (call,) = item.answer.calls
        right = SimpleNamespace(name=call.name, arguments=json.dumps(dict(call.arguments)))
        assert item.accepts("", [right])
        assert not item.accepts("", [])
        assert not item.accepts("", [right, right])
        assert not item.accepts("Sure.", [right])
        for arguments in ("{}", "not json", json.dumps({**call.arguments, "more": 1})):
            assert not item.accepts("", [SimpleNamespace(name=call.name, arguments=arguments)])
        assert not item.accepts("", [SimpleNamespace(name=call.name + "2", arguments=right.arguments)])


def test_json_is_compared_by_value_and_type() -> None:
    item = Item("extract", "en", "", Answer('{"age": 34, "name": "Mira"}'), form="json")
    assert item.accepts('{"name": "Mira",\n "age": 34}')
    for wrong in ('{"age": "34", "name": "Mira"}', '{"age": 34.0, "name": "Mira"}', '{"age": 34}', "[34]", "{" * 5000):
        assert not item.accepts(wrong)


RULES = {
    "sort": lambda item: sorted(members(item.question), key=int),
    "reverse": lambda item: members(item.question)[::-1],
    "copy": lambda item: members(item.question),
}


def members(question):
    """The list behind the colon of an English question."""
    return question.split(": ", 1)[1].split(", ")


@pytest.mark.parametrize("task", RULES)
def test_answers_of_lists_follow_from_the_question(task) -> None:
    english = [item for item in items(task) if item.language == "en"]
    assert len(english) > 20
    for item in english:
        assert item.answer.content == ", ".join(RULES[task](item))


def test_sums_are_right() -> None:
    for task in ("add", "think"):
        for item in items(task):
            assert int(item.answer.content) == sum(int(atom) * n for atom, n in summands(item))
            if item.answer.reasoning is not None:
                for line in item.answer.reasoning.splitlines():
                    left, right = line.split(" = ")
                    assert sum(map(int, left.split(" + "))) == int(right)


def summands(item):
    words = item.question.replace("?", " ").replace("等", " ").replace("。", " ").replace("算", " ").replace(".", " ")
    return Counter(word for word in words.split() if word.isdigit()).items()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_what_decides_an_answer_is_of_one_split(task, split) -> None:
    for item in items(task, split):
        assert item.atoms and {split_of(atom) for atom in item.atoms} == {split}
        assert any(atom in item.question for atom in item.atoms)


@pytest.mark.parametrize("task", TASKS)
def test_no_question_is_in_both_splits(task) -> None:
    trained = {item.question for item in items(task, "train")}
    assert trained.isdisjoint(item.question for item in items(task))


@pytest.mark.parametrize("task", TASKS)
def test_both_languages_come_and_items_differ(task) -> None:
    made = items(task)
    assert {item.language for item in made} == {"en", "zh"}
    assert len({item.question for item in made}) > 0.9 * NUM
    assert made == items(task)
    assert made[0] != make_item(task, "held_out", 2, 0)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("residue", [0, 1])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_pass_key_lies_where_it_was_asked_for(language, residue, depth) -> None:
    where = Haystack(3000, depth=depth, residue=residue)
    found = [make_item("pass_key", "held_out", 3, n, where=where) for n in range(12)]
    item = next(item for item in found if item.language == language)
    needle = " The pass key" if language == "en" else "通行码是"
    place = item.question.index(needle)
    assert place % 2 == residue
    assert abs(place - depth * 3000) < 320
    assert 2800 < len(item.question) <= 3200
    assert item.question.count(item.answer.content) == 1


def test_a_pass_key_needs_room() -> None:
    with pytest.raises(ValueError, match="do not fit in 10 tokens"):
        make_item("pass_key", "train", 1, 0, where=Haystack(10))


def test_unknown_tasks_and_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="task 'dance' is not one of copy"):
        make_item("dance", "train", 1, 0)
    with pytest.raises(ValueError, match="split 'test' is not one of train, held_out"):
        make_item("copy", "test", 1, 0)


def test_the_suite_holds_a_thousand_items_and_ten_depths() -> None:
    tiny = {name: make_items(spec, name, len, None) for name, spec in SUITES["tiny"].items()}
    assert sum(map(len, tiny.values())) >= 1000
    assert len({item.question for made in tiny.values() for item in made}) > 1000
    keys = tiny["pass_key_2k"]
    needles = [(" The pass key" if item.language == "en" else "通行码是") for item in keys]
    places = [item.question.index(needle) for item, needle in zip(keys, needles, strict=True)]
    for depth in range(10):
        here = places[depth::10]
        assert {place % 2 for place in here} == {0, 1}
        assert all(abs(place - depth / 9 * 2000) < 320 for place in here)
    assert len(make_items(SUITES["tiny"]["copy"], "copy", len, 3)) == 3


def test_an_item_without_reasoning_does_not_think() -> None:
    item = make_item("add", "train", 1, 0)
    assert not encode_chat(item.request).starts_in_reasoning
    thinking = replace(item, answer=replace(item.answer, reasoning="first"))
    assert encode_chat(thinking.request).starts_in_reasoning
