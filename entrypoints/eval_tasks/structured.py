"""Answers with a form: the fields of a sentence as JSON, and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.entrypoints.eval_tasks.atoms import Atoms
from deepinfer.entrypoints.eval_tasks.item import Answer, Call, Item, Language

_SENTENCES = {
    "en": (
        "{name} is {age} years old and lives in {city}.",
        "{name}, aged {age}, comes from {city}.",
        "In {city} lives {name}, who is {age}.",
    ),
    "zh": ("{name}今年{age}岁，住在{city}。", "住在{city}的{name}今年{age}岁。", "{name}来自{city}，{age}岁。"),
}
_EXTRACT = {"en": "\nExtract {} as JSON.", "zh": "\n提取{}，输出JSON。"}
_FIELDS = {"en": ("name", "age", "city"), "zh": ("姓名", "年龄", "城市")}


def extract(atoms: Atoms, language: Language) -> Item:
    """Two or three fields of a sentence as a JSON object, in the order they are asked for."""
    rng = atoms.rng
    found: list[Any] = [atoms.name(language), atoms.number(10, 99), atoms.place(language)]
    name, age, city = found
    text = rng.choice(_SENTENCES[language]).format(name=name, age=age, city=city)
    wanted = rng.sample(range(3), rng.choice((2, 3)))
    fields = [_FIELDS[language][place] for place in wanted]
    value = {field: found[place] for field, place in zip(fields, wanted, strict=True)}
    question = text + _EXTRACT[language].format((", " if language == "en" else "、").join(fields))
    return Item(
        "extract", language, question, Answer(json.dumps(value, ensure_ascii=False)), form="json", atoms=atoms.drawn
    )


def tool_call(atoms: Atoms, language: Language) -> Item:
    """The call of one of two or three tools that a sentence asks for."""
    rng = atoms.rng
    names = rng.sample(sorted(_TOOLS), rng.choice((2, 2, 3)))
    wanted = rng.choice(names)
    question, arguments = _TOOLS[wanted][1](atoms, language)
    tools = tuple({"type": "function", "function": _TOOLS[name][0]} for name in names)
    answer = Answer(calls=(Call(wanted, arguments),))
    return Item("tool_call", language, question, answer, form="calls", tools=tools, atoms=atoms.drawn)


def _schema(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
    }


def _weather(atoms: Atoms, language: Language) -> tuple[str, dict[str, Any]]:
    city = atoms.place(language)
    return ("What is the weather in {}?" if language == "en" else "{}的天气怎么样？").format(city), {"city": city}


def _timer(atoms: Atoms, language: Language) -> tuple[str, dict[str, Any]]:
    minutes = atoms.number(10, 99)
    wording = "Set a timer for {} minutes." if language == "en" else "定时{}分钟。"
    return wording.format(minutes), {"minutes": minutes}


def _message(atoms: Atoms, language: Language) -> tuple[str, dict[str, Any]]:
    name, word = atoms.name(language), atoms.word()
    wording = "Send {} the message {}." if language == "en" else "给{}发消息：{}"
    return wording.format(name, word), {"to": name, "text": word}


def _train(atoms: Atoms, language: Language) -> tuple[str, dict[str, Any]]:
    start, end = atoms.several(lambda: atoms.place(language), 2)
    wording = "Find a train from {} to {}." if language == "en" else "查找从{}到{}的火车。"
    return wording.format(start, end), {"start": start, "end": end}


_TOOLS: Mapping[str, tuple[dict[str, Any], Callable[[Atoms, Language], tuple[str, dict[str, Any]]]]] = {
    "get_weather": (_schema("get_weather", "Weather of a city", city="string"), _weather),
    "set_timer": (_schema("set_timer", "Start a timer", minutes="integer"), _timer),
    "send_message": (_schema("send_message", "Send a message", to="string", text="string"), _message),
    "find_train": (_schema("find_train", "Find a train", start="string", end="string"), _train),
}
