"""Sections of agents' prompts: instructions, and tools that do not read.

Called by ``turns.py``, ``features.py`` and ``measure.py``.
"""

from __future__ import annotations

from random import Random
from typing import Any

from infra.demo_model.agents import texts
from infra.demo_model.agents.styles import description, file_name, folder, path, prose, sentence, tool
from infra.demo_model.sample import Tool
from infra.demo_model.texts.prose import docstrings
from infra.demo_model.texts.words import invent

_KINDS = ("string", "string", "string", "string", "number", "integer", "boolean", "array", "object")


def _filled(rng: Random, form: str) -> str:
    """A form of ``texts.py`` with its slots filled, each anew."""
    slots = {
        "{t}": lambda: rng.choice(texts.OTHER_TOOLS)[0],
        "{p}": lambda: path(rng, folder(rng)),
        "{s}": lambda: sentence(rng),
        "{a}": lambda: rng.choice((invent(rng), rng.choice(rng.choice(texts.OTHER_TOOLS)[1].split() or ["x"]))),
        "{n}": lambda: str(rng.randint(1, 2000)),
        "{h}": lambda: rng.choice(texts.HEADINGS),
        "{q}": lambda: rng.choice(texts.ASKS).format(f=file_name(rng)),
    }
    for slot, make in slots.items():
        while slot in form:
            form = form.replace(slot, make(), 1)
    return form


def section(rng: Random) -> str:
    """A section of a system prompt: rules under a heading, an example, or plain prose."""
    roll = rng.random()
    if roll < 0.25:
        return "\n\n".join(rng.choice(docstrings())[:1500] for _ in range(2))
    heading = rng.choice(("# {}", "## {}", "{}:", "**{}**", "### {}")).format(rng.choice(texts.HEADINGS))
    bullet = rng.choice(("- {}", "* {}", "{}", "1. {}", " - {}"))
    lines = [bullet.format(_filled(rng, rng.choice(texts.RULES))) for _ in range(rng.randint(4, 14))]
    if rng.random() < 0.4:
        lines.insert(rng.randint(0, len(lines)), _filled(rng, rng.choice(texts.EXAMPLES)))
    return heading + "\n\n" + "\n".join(lines)


def _property(rng: Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(_KINDS)
    found: dict[str, Any] = {"type": kind}
    if kind == "string" and rng.random() < 0.15:
        found["enum"] = [invent(rng) for _ in range(rng.randint(2, 4))]
    if kind in ("integer", "number") and rng.random() < 0.4:
        found |= {"minimum": rng.randint(0, 5), "maximum": rng.choice((100, 600000, 9007199254740991))}
    if kind == "array":
        found["items"] = {"type": "string"} if depth or rng.random() < 0.6 else _object(rng)
    if kind == "object" and not depth:
        found = _object(rng)
    if rng.random() < 0.85:
        found["description"] = prose(rng, 1, 2)
    return dict(reversed(found.items())) if rng.random() < 0.3 else found


def _object(rng: Random) -> dict[str, Any]:
    names = [invent(rng) for _ in range(rng.randint(1, 3))]
    return {"type": "object", "properties": {name: _property(rng, 1) for name in names}, "required": names}


def other_tool(rng: Random, argument: str, name: str | None = None, arguments: str = "") -> Tool:
    """A tool that does not read; ``argument`` is what this agent's tools call the path of a file."""
    if name is None:
        if rng.random() < 0.75:
            name, arguments = rng.choice(texts.OTHER_TOOLS)
        else:
            verb = rng.choice(("get", "list", "make", "send", "find", "run", "browser", "db", "issue"))
            name, arguments = f"{verb}_{invent(rng)}", " ".join(invent(rng) for _ in range(rng.randint(0, 4)))
    names = [argument if part == "@" else part for part in arguments.split()]
    properties = {part: _property(rng) for part in names}
    for part in names:
        if part in (argument, "path", "command"):
            properties[part] = {"type": "string", "description": prose(rng, 1, 1)}
    return tool(rng, name, description(rng, sentence(rng)), properties, names[: rng.randint(0, 2)])


def path_argument(reader_argument: str) -> str:
    """What the other tools of an agent call the path of a file."""
    return "file_path" if reader_argument in ("cmd", "command", "absolute_path") else reader_argument
