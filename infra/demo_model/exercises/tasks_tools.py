"""Tools: a call in Hermes' form, an answer with its result, and a plain answer where no tool is needed.

These tasks are not in the mixture of the other tasks: they have tools in the prompt, are drawn only by
``tool_conversation``, and are in a separate table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from infra.demo_model.exercises.tasks import SYSTEM_PROMPTS, Split, draw_any
from infra.demo_model.exercises.tool_questions import Question, offered, other_tools, place, question
from infra.demo_model.sample import Expect, Message, Sample, Tool, assistant, call_text, is_held_out, user
from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.tools import SUBJECTS
from infra.demo_model.texts.words import ALL_NOUNS, ALL_WORDS, CITIES, COLOURS, JOBS, NAMES, invent, several

_SKIES = piped(
    "sunny | rainy | cloudy | windy | snow | fog | clear | light rain | heavy rain | storm | hot | cold | dry | mild"
)
_STATES = piped("shipped | on time | delayed | cancelled | delivered | in transit | landed | boarding | packed | lost")
_DONE = piped("ok | done | started | sent | success | confirmed | on | accepted")
_RESULTS: dict[str, Callable[[Random], str]] = {
    "sky": lambda rng: rng.choice((rng.choice(_SKIES), f"{rng.choice(_SKIES)}, {rng.randint(-9, 38)} degrees")),
    "degrees": lambda rng: rng.choice(("{} degrees", "{} °C", "{} C", "{}")).format(rng.randint(-9, 38)),
    "clock": lambda rng: f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
    "digits": lambda rng: "".join(rng.choice("0123456789") for _ in range(rng.randint(5, 8))),
    "mail": lambda rng: f"{invent(rng)}@{invent(rng)}.com",
    "job": lambda rng: f"{rng.choice(JOBS)} in {place(rng)}",
    "age": lambda rng: str(rng.randint(1, 99)),
    "money": lambda rng: f"{rng.randint(1, 400)}{rng.choice(('', '.50', '.99', ' dollars', ' euros'))}",
    "state": lambda rng: rng.choice(_STATES),
    "large": lambda rng: str(rng.randint(1000, 9_999_999)),
    "length": lambda rng: f"{rng.randint(5, 9999)} km",
    "noun": lambda rng: f"a {rng.choice(ALL_WORDS)} {rng.choice(ALL_NOUNS)}",
    "invented": invent,
    "value": lambda rng: str(rng.randint(0, rng.choice((50, 1000, 99999)))),
    "number": lambda rng: f"{rng.randint(1, 999)}.{rng.randint(0, 99):02d}",
    "done": lambda rng: rng.choice(_DONE),
    "named": lambda rng: f"Hotel {invent(rng).capitalize()}",
    "sentence": lambda rng: " ".join(several(rng, ALL_WORDS, 2, 5)),
}


# ---------------------------------------------------------------- results


def _result(rng: Random, asked: Question) -> tuple[str, str, tuple[str, ...]]:
    """The tool's result, the answer that uses it, and the values that the answer must contain."""
    value = _RESULTS[asked.result_kind](rng)
    roll = rng.random()
    if roll < 0.4:
        return value, asked.answer.format(r=value), (value,)
    if roll < 0.55:
        said = asked.answer.format(r=value) if rng.random() < 0.5 else _sentence(rng, asked, value)
        return said, said, (value,)
    if roll < 0.8:
        key = rng.choice(("result", "value", "answer", "output", asked.name.split("_")[-1]))
        found: dict[str, Any] = {key: int(value) if value.isdigit() and rng.random() < 0.5 else value}
        if rng.random() < 0.4:
            found = {**asked.arguments, **found}
        return json.dumps(found, ensure_ascii=False), asked.answer.format(r=value), (value,)
    fields = rng.sample(("temperature", "sky", "wind", "status", "count", "name", "color", "code", "total", "unit"), 2)
    values = [
        rng.choice((str(rng.randint(0, 99)), rng.choice(_SKIES), rng.choice(COLOURS), invent(rng))) for _ in fields
    ]
    pairs = {field: int(text) if text.isdigit() else text for field, text in zip(fields, values, strict=True)}
    said = ", ".join(f"{field} {text}" for field, text in zip(fields, values, strict=True))
    return json.dumps(pairs), asked.answer.format(r=said), tuple(values)


def _field(rng: Random) -> str:
    return rng.choice((str(rng.randint(0, 99)), rng.choice(_SKIES), rng.choice(COLOURS), invent(rng)))


def _sentence(rng: Random, asked: Question, value: str) -> str:
    subject = str(next(iter(asked.arguments.values())))
    return rng.choice((
        "It is {r} in {v}.", "{v} is {r}.", "The result is {r}.", "{r} for {v}.", "It is {r}.", "{v} has {r}.",
        "The answer for {v} is {r}.", "{v}: {r}",
    )).format(v=subject, r=value)  # fmt: skip


def _tool_message(text: str) -> Message:
    return {"role": "tool", "content": text}


# ---------------------------------------------------------------- samples


def _draw_question(rng: Random, split: Split, any_noun: bool | None = None) -> Question:
    while True:
        found = question(rng)
        if is_held_out("tools", found.key) != (split == "held out"):
            continue
        if any_noun is None or found.group.startswith("any|") == any_noun:
            return found


def tool_call(rng: Random, split: Split, any_noun: bool) -> Sample:
    """A question whose answer is a call."""
    asked = _draw_question(rng, split, any_noun)
    wanted = json.dumps({"name": asked.name, "arguments": asked.arguments}, ensure_ascii=False)
    return Sample((user(asked.text),), asked.call(), asked.key, Expect("call", (wanted,)), tools=offered(rng, asked))


def tool_answer(rng: Random, split: Split) -> Sample:
    """A conversation with a call and its result; the answer contains the result."""
    asked = _draw_question(rng, split)
    result, answer, values = _result(rng, asked)
    messages = (user(asked.text), assistant(asked.call()), _tool_message(result))
    return Sample(messages, answer, asked.key, Expect("has_all", values), tools=offered(rng, asked))


#: Tasks with whose questions no tool of a known subject is offered, because such a tool could answer them.
_COULD_CLASH = ("unknown", "gibberish", "not told")
_SUMS = ("add", "subtract", "multiply", "divide", "too large", "word problem", "go on calculating", "compare")


def _groups_for(task_name: str) -> set[str]:
    """The groups of subjects whose tools are not offered with a question of this task."""
    if task_name.startswith(_COULD_CLASH):
        return {subject.group for subject in SUBJECTS}
    groups = {"search", "person"}
    if task_name.startswith(_SUMS):
        groups |= {"math", "convert"}
    return groups | ({"convert"} if task_name == "convert units" else set())


def no_tool_needed(rng: Random, split: Split) -> Sample:
    """A question of another task, with tools in the prompt; the answer is that of the other task."""
    while True:
        inner = draw_any(rng)
        text = inner.messages[-1]["content"]
        held = is_held_out("no tool", text.lower())
        if inner.messages[0]["role"] != "system" and held == (split == "held out"):
            break
    tools = tuple(other_tools(rng, _groups_for(inner.task), rng.choice((1, 1, 2, 3))))
    return Sample(inner.messages, inner.answer, text, Expect("no call", (inner.answer,)), tools=tools)


TOOL_TASKS: dict[str, Callable[[Random, Split], Sample]] = {
    "call a tool": lambda rng, split: tool_call(rng, split, any_noun=False),
    "call an unknown tool": lambda rng, split: tool_call(rng, split, any_noun=True),
    "answer with the result": tool_answer,
    "no tool needed": no_tool_needed,
}


def tool_conversation(rng: Random, several: float = 0.0) -> tuple[list[Message], tuple[Tool, ...]]:
    """A training conversation with tools: its messages and the tools that are offered.

    ``several``: share of conversations that have a question for each offered tool.
    """
    system: list[Message] = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
    if several and rng.random() < several:
        messages, tools = _for_each_tool(rng)
        return [*system, *messages], tools
    if rng.random() < 0.2:
        sample = no_tool_needed(rng, "train")
        return [*system, *sample.messages, assistant(sample.answer)], sample.tools
    asked = _draw_question(rng, "train")
    tools = offered(rng, asked)
    messages: list[Message] = [*system]
    if rng.random() < 0.12:
        before = no_tool_needed(rng, "train")
        messages += [*before.messages, assistant(before.answer)]
    messages += _episode(rng, asked)
    if rng.random() < 0.15:
        messages += _again(rng, asked)
    # With ``tool_choice`` "none" the server does not put the tools into the prompt.
    return messages, tools if rng.random() < 0.9 else ()


def _episode(rng: Random, asked: Question) -> list[Message]:
    result, answer, _ = _result(rng, asked)
    return [user(asked.text), assistant(asked.call()), _tool_message(result), assistant(answer)]


def _for_each_tool(rng: Random) -> tuple[list[Message], tuple[Tool, ...]]:
    """Two or three tools, and a question for each, in a different order than the tools."""
    count = rng.choice((2, 2, 2, 3))
    asked: dict[str, Question] = {}
    while len(asked) < count:
        found = _draw_question(rng, "train")
        if found.name not in asked and found.group not in {other.group for other in asked.values()}:
            asked[found.name] = found
    order = list(asked.values())
    rng.shuffle(order)
    return [message for found in order for message in _episode(rng, found)], tuple(one.tool for one in asked.values())


def _again(rng: Random, asked: Question) -> list[Message]:
    """Another question of the same kind, for another value."""
    key, value = next(iter(asked.arguments.items()))
    if len(asked.arguments) > 1 or not isinstance(value, str) or str(value) not in asked.text:
        return []
    new = rng.choice((rng.choice(CITIES), rng.choice(NAMES), invent(rng).capitalize()))
    schema = asked.tool["function"]["parameters"]["properties"][key]
    if "enum" in schema or asked.group in ("math", "order", "flight") or is_held_out("tools", new.lower()):
        return []
    text = rng.choice(("And {}?", "And for {}?", "What about {}?", "{}?", "Now {}", "And {} please")).format(new)
    answer = asked.answer.replace(value, new)
    result = _RESULTS[asked.result_kind](rng)
    return [
        user(text),
        assistant(call_text(asked.name, {key: new})),
        _tool_message(result),
        assistant(answer.format(r=result)),
    ]
