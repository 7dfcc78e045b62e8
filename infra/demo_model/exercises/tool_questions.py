"""Questions that a tool answers: values of arguments, definitions of tools, and which tools are offered.

``tasks_tools.py`` makes conversations of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from infra.demo_model.sample import Tool, call_text, loosen
from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.tools import (
    ANY_ABOUT,
    ANY_ASKS,
    ANY_NAMES,
    ANY_PARAMETERS,
    MORE_NOUNS,
    SUBJECTS,
    Parameter,
    Subject,
)
from infra.demo_model.texts.words import ALL_NOUNS, ALL_WORDS, CITIES, OBJECT_NOUNS, invent, person, several

_LONG_PLACES = piped(
    "New York | San Francisco | Los Angeles | Buenos Aires | Hong Kong | Mexico City | New Delhi | Cape Town | "
    "Rio de Janeiro | Tel Aviv | Saint Petersburg | Las Vegas | Kuala Lumpur | San Francisco, CA | Boston, MA | "
    "Paris, France | Tokyo, Japan | Berlin, Germany | Rome, Italy | Spain | Japan | France | Italy | Norway | Brazil | "
    "Zürich | São Paulo | Bogotá | München | Málaga"
)
_LANGUAGES = piped("French | German | Spanish | Italian | Japanese | Chinese | Portuguese | Polish | Dutch | Swedish")
_CURRENCIES = piped("euros | dollars | yen | pounds | francs | EUR | USD | GBP | JPY | CHF")
_DAYS = piped("Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday | tomorrow")
_ROOMS = piped("kitchen | bedroom | bathroom | living room | garage | hall | office | garden | cellar | attic")
_SAYINGS = piped(
    "hello | I am late | see you soon | good night | thank you | call me | dinner is ready | happy birthday | "
    "the meeting is over | I am on my way | well done | please wait"
)


@dataclass(frozen=True)
class Question:
    """One question that a tool answers: the tool, the words, and the call."""

    tool: Tool
    text: str
    arguments: dict[str, Any]
    result_kind: str
    answer: str
    key: str
    group: str

    @property
    def name(self) -> str:
        """The function that is called."""
        name: str = self.tool["function"]["name"]
        return name

    def call(self) -> str:
        """The text of the call, as the assistant writes it."""
        return call_text(self.name, self.arguments)


# ---------------------------------------------------------------- values


def place(rng: Random) -> str:
    """A city, sometimes of several words or with its country, or an invented one."""
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(CITIES)
    return rng.choice(_LONG_PLACES) if roll < 0.65 else invent(rng).capitalize()


def _full_name(rng: Random) -> str:
    return person(rng) if rng.random() < 0.5 else f"{person(rng)} {invent(rng).capitalize()}"


def _expression(rng: Random) -> str:
    most = rng.choice((9, 99, 999))
    numbers = [rng.randint(1, most) for _ in range(rng.choice((2, 2, 2, 3)))]
    text = str(numbers[0])
    for number in numbers[1:]:
        text += f" {rng.choice('++-**/')} {number}"
    return text if rng.random() < 0.85 else text.replace(" ", "")


def _topic(rng: Random) -> str:
    return " ".join(several(rng, ALL_WORDS, 1, 3)) if rng.random() < 0.7 else invent(rng)


def _letters(rng: Random, count: int) -> str:
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(count))


_VALUES: dict[str, Callable[[Random], Any]] = {
    "place": place,
    "person": _full_name,
    "thing": lambda rng: rng.choice(OBJECT_NOUNS) if rng.random() < 0.7 else invent(rng),
    "count": lambda rng: rng.randint(1, 90),
    "number": lambda rng: rng.randint(1, rng.choice((20, 100, 1000))),
    "day": lambda rng: rng.choice(_DAYS),
    "symbol": lambda rng: _letters(rng, rng.randint(3, 4)) if rng.random() < 0.6 else invent(rng).capitalize(),
    "order": lambda rng: f"{_letters(rng, rng.randint(0, 2))}{rng.randint(10, 99999)}",
    "flight": lambda rng: f"{_letters(rng, 2)}{rng.randint(10, 9999)}",
    "word": lambda rng: rng.choice(ALL_WORDS) if rng.random() < 0.6 else invent(rng),
    "language": lambda rng: rng.choice(_LANGUAGES),
    "expression": _expression,
    "currency": lambda rng: rng.choice(_CURRENCIES),
    "room": lambda rng: rng.choice(_ROOMS),
    "saying": lambda rng: rng.choice(_SAYINGS),
    "topic": _topic,
    "path": lambda rng: f"{rng.choice(ALL_NOUNS)}.{rng.choice(('txt', 'md', 'json', 'py', 'log'))}",
}


def _value(rng: Random, kind: str) -> Any:
    """A value of an argument; names are sometimes in lower case, as typed in a hurry."""
    value = _VALUES[kind](rng)
    return value.lower() if kind in ("place", "person") and rng.random() < 0.08 else value


# ---------------------------------------------------------------- tools


def _schema(rng: Random, parameter: Parameter, value: Any, described: bool) -> dict[str, Any]:
    kind = "integer" if isinstance(value, int) else "string"
    if kind == "integer" and rng.random() < 0.3:
        kind = "number"
    schema: dict[str, Any] = {"type": kind}
    if kind == "string" and rng.random() < 0.06:
        others = [_VALUES[parameter.kind](rng) for _ in range(rng.randint(1, 2))]
        choices = [value, *others]
        rng.shuffle(choices)
        schema = {"enum": choices} if rng.random() < 0.5 else {"type": kind, "enum": choices}
    if described:
        schema["description"] = rng.choice(parameter.about)
    return schema


def _optional(rng: Random) -> tuple[str, dict[str, Any]]:
    """A parameter that the question does not need, so the call does not have it."""
    forms: tuple[tuple[str, dict[str, Any]], ...] = (
        ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
        ("units", {"type": "string"}),
        ("limit", {"type": "integer"}),
        ("format", {"type": "string"}),
        ("language", {"type": "string"}),
    )
    return rng.choice(forms)


def _tool(rng: Random, name: str, about: str, parameters: Sequence[Parameter], arguments: dict[str, Any]) -> Tool:
    """A definition in OpenAI's form, with the arguments of a call."""
    described = rng.random() < 0.25
    properties = {
        key: _schema(rng, parameter, value, described)
        for parameter, (key, value) in zip(parameters, arguments.items(), strict=True)
    }
    required = list(properties)
    if rng.random() < 0.1:
        key, schema = _optional(rng)
        properties.setdefault(key, schema)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        schema["required"] = required
    if rng.random() < 0.12:
        schema["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.75:
        function["description"] = about
    if rng.random() < 0.08:
        function["strict"] = True
    return {"type": "function", "function": {**function, "parameters": schema}}


def _subject_question(rng: Random, subject: Subject) -> Question:
    arguments: dict[str, Any] = {}
    for parameter in subject.parameters:
        name = rng.choice([name for name in parameter.names if name not in arguments])
        arguments[name] = _value(rng, parameter.kind)
    values = list(arguments.values())
    tool = _tool(rng, rng.choice(subject.names), rng.choice(subject.about), subject.parameters, arguments)
    text = loosen(rng.choice(subject.asks), rng).format(*values)
    answer = rng.choice(subject.answers).format(*values, r="{r}")
    key = "|".join(str(value).lower() for value in values)
    return Question(tool, text, arguments, subject.results, answer, key, subject.group)


def _any_question(rng: Random) -> Question:
    """A tool for a noun that occurs in its name and in the question; trains the model to call unknown tools."""
    roll = rng.random()
    noun = rng.choice(MORE_NOUNS if roll < 0.4 else ALL_NOUNS) if roll < 0.75 else invent(rng)
    kind = rng.choice(("place", "person", "thing", "symbol", "order", "word"))
    value = _value(rng, kind)
    function = rng.choice(ANY_NAMES).format(f=noun.replace(" ", "_"))
    if rng.random() < 0.12:
        head, *rest = function.split("_")
        function = head + "".join(part.capitalize() for part in rest)
    parameter = Parameter(kind, (rng.choice(ANY_PARAMETERS),), piped("The name | Name | Which one | What to look up"))
    arguments = {parameter.names[0]: value}
    tool = _tool(rng, function, rng.choice(ANY_ABOUT).format(n=noun), (parameter,), arguments)
    text = loosen(rng.choice(ANY_ASKS), rng).replace("{N}", "{n}").format(value, n=noun)
    result = rng.choice(("value", "state", "noun", "named", "invented", "money", "sentence", "sky"))
    return Question(tool, text, arguments, result, f"The {noun} of {value}: {{r}}.", f"any|{noun}", f"any|{noun}")


def question(rng: Random) -> Question:
    """A question that a tool answers, of a known subject or of any noun."""
    return _subject_question(rng, rng.choice(SUBJECTS)) if rng.random() < 0.62 else _any_question(rng)


def other_tools(rng: Random, groups: set[str], count: int) -> list[Tool]:
    """Tools that do not fit: from other groups, with other names."""
    tools: list[Tool] = []
    taken = set(groups)
    while len(tools) < count:
        other = question(rng)
        if other.group not in taken and other.name not in {tool["function"]["name"] for tool in tools}:
            taken.add(other.group)
            tools.append(other.tool)
    return tools


def offered(rng: Random, asked: Question) -> tuple[Tool, ...]:
    """The needed tool, among up to two others."""
    tools = [asked.tool, *other_tools(rng, {asked.group}, rng.choice((0, 0, 0, 1, 1, 2)))]
    rng.shuffle(tools)
    names = [tool["function"]["name"] for tool in tools]
    return tuple(tools) if len(set(names)) == len(names) else (asked.tool,)
