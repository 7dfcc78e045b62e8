"""Forms of one agent: its tool that reads, its environment section, its paths and how it frames results.

The last fifth of each list of forms is held out of training and only measured. Called by ``sources.py`` and
``turns.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from infra.demo_model.agents import texts
from infra.demo_model.exercises.tasks import Split
from infra.demo_model.sample import Tool, call_text
from infra.demo_model.texts.prose import sentence
from infra.demo_model.texts.stories import story
from infra.demo_model.texts.words import ALL_NOUNS, ALL_WORDS, CITIES, COLOURS, NAMES, invent, several

Value = TypeVar("Value")


def pick(rng: Random, forms: Sequence[Value], split: Split) -> Value:
    """One of the forms that belong to a split: the last fifth is held out."""
    first_held = len(forms) - max(len(forms) // 5, 1)
    return rng.choice(forms[first_held:] if split == "held out" else forms[:first_held])


# ---------------------------------------------------------------- tools that read


@dataclass(frozen=True)
class Reader:
    """A tool that reads files: its name, its argument, and how the argument names the file."""

    name: str
    argument: str
    #: ``path``; ``joined``, for which a relative path is made absolute; ``line``, a command; ``list``, one as a list.
    kind: str

    def call(self, path: str, folder: str) -> str:
        """The text of the call that reads a file."""
        absolute = path if path.startswith("/") else f"{folder}/{path}"
        values: dict[str, Any] = {"path": path, "joined": absolute, "line": f"cat {path}", "list": ["cat", path]}
        return call_text(self.name, {self.argument: values[self.kind]})


READERS = (
    Reader("Read", "file_path", "path"),
    Reader("read_file", "file_path", "joined"),
    Reader("exec_command", "cmd", "line"),
    Reader("read", "filePath", "path"),
    Reader("read_file", "absolute_path", "joined"),
    Reader("shell", "command", "list"),
    Reader("shell_command", "command", "line"),
    Reader("read_file", "path", "joined"),
    Reader("view_file", "path", "path"),
    Reader("bash", "command", "line"),
    Reader("open_file", "filename", "path"),
)
#: How often each is drawn: most often those of the known agents.
WEIGHTS = (5, 5, 5, 5, 2, 2, 2, 1.5, 1, 1, 1)

_ABOUT = (
    "The absolute path to the file to read", "Path of the file", "The path to the file", "Absolute path of the file.",
    "The absolute path to the file or directory to read", "Where the file is", "Path of the file to be read.",
)  # fmt: skip
_READS = (
    "Reads a file from the local filesystem.", "Read a file from disk.", "Reads and returns the content of a file.",
    "Returns the text of a file.", "Read a file or directory.", "Reads a text file.", "Shows a file with line numbers.",
)  # fmt: skip
_RUNS = (
    "Runs a command in a shell.", "Runs a shell command and returns its output.", "Executes a command.",
    "Runs a command in a PTY, and returns output or the id of a session.", "Runs a program.",
)  # fmt: skip
_COMMANDS = ("The command to run.", "Shell command to execute.", "The command")
_BOUNDS = {"minimum": 0, "maximum": 9007199254740991}
_OPTIONS: dict[str, dict[str, Any]] = {
    "offset": {"type": "integer", "description": "The line to start at."},
    "limit": {"type": "integer", "description": "The number of lines."},
    "pages": {"type": "string", "description": "Pages of a PDF, such as 1-5."},
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "workdir": {"type": "string", "description": "Where the command runs."},
    "timeout_ms": {"type": "number", "description": "The longest time in milliseconds."},
    "justification": {"type": "string", "description": "One sentence for the user."},
    "with_escalated_permissions": {"type": "boolean"},
    "login": {"type": "boolean", "description": "Whether the shell is a login shell."},
    "prefix_rule": {"type": "array", "items": {"type": "string"}, "description": "Words that a command begins with."},
    "tty": {"type": "boolean", "description": "True for a PTY."},
    "yield_time_ms": {"type": "number", "description": "How long to wait for output."},
}


def prose(rng: Random, low: int, high: int) -> str:
    """A few sentences."""
    return " ".join(sentence(rng) for _ in range(rng.randint(low, high)))


def description(rng: Random, first: str) -> str:
    """What a tool is said to do: one sentence, or a page."""
    roll = rng.random()
    if roll < 0.25:
        return first
    if roll < 0.55:
        return f"{first} {prose(rng, 1, 4)}"
    lines = [rng.choice(("- {}", "{}", "* {}")).format(prose(rng, 1, 2)) for _ in range(rng.randint(2, 9))]
    return f"{first}\n\n{rng.choice(('Usage:', 'Notes:', ''))}\n" + "\n".join(lines)


def tool(rng: Random, name: str, about: str, properties: dict[str, Any], required: Sequence[str]) -> Tool:
    """A tool's definition, with the parts that agents write differently."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(required)}
    roll = rng.random()
    if roll < 0.35:
        parameters = {"$schema": "https://json-schema.org/draft/2020-12/schema", **parameters}
    elif roll < 0.55:
        parameters = {"properties": properties, "required": list(required), "type": "object"}
    if rng.random() < 0.4:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name, "description": about}
    if rng.random() < 0.15:
        function["strict"] = False
    return {"type": "function", "function": {**function, "parameters": parameters}}


def reader_tool(rng: Random, reader: Reader) -> Tool:
    """The definition of a tool that reads."""
    runs = reader.kind in ("line", "list")
    more = _SWITCHES if runs else _OPTIONS
    first: dict[str, Any] = {"type": "string"}
    if reader.kind == "list":
        first = {"type": "array", "items": {"type": "string"}}
    about = rng.choice(_COMMANDS if runs else _ABOUT)
    if reader.kind == "joined" and rng.random() < 0.5:
        about += " (e.g., '/home/user/project/file.txt'). Relative paths are not supported."
    first = {"description": about, **first} if rng.random() < 0.3 else {**first, "description": about}
    named = {key: dict(more[key]) for key in list(more)[: rng.randint(0, len(more))]}
    for schema in named.values():
        if schema["type"] == "integer" and rng.random() < 0.4:
            schema |= _BOUNDS
    text = description(rng, rng.choice(_RUNS if runs else _READS))
    if not runs and rng.random() < 0.4:
        text += f"\n- The {reader.argument} parameter must be an absolute path."
    return tool(rng, reader.name, text, {reader.argument: first, **named}, [reader.argument])


# ---------------------------------------------------------------- paths and texts of files


def _word(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.3:
        return rng.choice(texts.STEMS)
    if roll < 0.5:
        return rng.choice(ALL_WORDS)
    if roll < 0.75:
        return invent(rng)
    if roll < 0.85:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789_") for _ in range(rng.randint(3, 9)))
    return f"{rng.choice(ALL_WORDS)}{rng.choice('-_')}{rng.choice((invent(rng), str(rng.randint(1, 99))))}"


def file_name(rng: Random) -> str:
    name = _word(rng)
    return (name.capitalize() if rng.random() < 0.1 else name) + rng.choice(texts.ENDINGS)


def folder(rng: Random) -> str:
    """An absolute path of a directory."""
    depth = rng.choice((1, 2, 2, 3, 3, 4, 5))
    parts = [rng.choice(texts.FOLDERS) if rng.random() < 0.6 else _word(rng) for _ in range(depth)]
    return "/" + "/".join((rng.choice(("tmp", "home", "work", "root", "srv", "workspace")), *parts))


def path(rng: Random, within: str) -> str:
    """A path of a file as a user gives it: a name, with folders, or absolute."""
    roll, name = rng.random(), file_name(rng)
    if roll < 0.45:
        return name
    if roll < 0.6:
        return "/".join([_word(rng) for _ in range(rng.randint(1, 2))] + [name])
    return f"{within if rng.random() < 0.75 else folder(rng)}/{name}"


def _line(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.3:
        return sentence(rng)
    if roll < 0.5:
        words = several(rng, ALL_WORDS, 3, 9)
        return " ".join(words).capitalize() + rng.choice((".", ".", "!", ""))
    if roll < 0.62:
        return rng.choice(("{a}: {b}", "{a} = {b}", "- {b}", "{b}", "# {b}", "{a}={b}")).format(
            a=rng.choice(ALL_NOUNS), b=rng.choice((invent(rng), str(rng.randint(0, 9999)), rng.choice(COLOURS)))
        )
    if roll < 0.85:
        form = rng.choice((
            "The {n} opens at {k}.", "{m} lives in {c}.", "The {n} of {m} is {d}.", "Bring {k} {n}s.",
            "{m} has {k} {n}s.", "The password is {i}.", "The secret word is {i}.", "Meet {m} in {c} at {k}.",
            "The {n} is {d}.", "{i} {i} {i}", "Hello from {c}.", "The code is {k}.", "My name is {m}.",
            "The answer is {k}.", "Buy {k} {n}s and a {n}.",
        ))  # fmt: skip
        return form.format(
            n=rng.choice(ALL_NOUNS), m=rng.choice(NAMES), c=rng.choice(CITIES), d=rng.choice(COLOURS),
            i=invent(rng), k=rng.randint(1, rng.choice((12, 100, 9999))),
        )  # fmt: skip
    return rng.choice(story(rng).split(". ")).strip(" .\n").replace("\n", " ") + "."


def file_text(rng: Random) -> str:
    """The text of a small file."""
    lines = [_line(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4)))]
    if len(lines) > 2 and rng.random() < 0.1:
        lines.insert(1, "")
    return "\n".join(lines)


# ---------------------------------------------------------------- results and sections


def result(rng: Random, where: str, text: str, split: Split) -> str:
    """What a tool that reads answers."""
    number, frame = pick(rng, texts.FRAMES, split)
    lines = text.split("\n")
    shown = "\n".join(number.format(i=place) + line for place, line in enumerate(lines, 1))
    code = "".join(rng.choice("0123456789abcdef") for _ in range(6))
    return frame.format(x=shown, p=where, c=code, e=len(lines) + 1)


def failure(rng: Random, where: str, within: str, split: Split) -> str:
    """What a tool that cannot read answers."""
    code = "".join(rng.choice("0123456789abcdef") for _ in range(6))
    return pick(rng, texts.FAILURES, split).format(p=where, d=within, c=code)


def day(rng: Random) -> str:
    year, month, number = rng.randint(2024, 2027), rng.randint(1, 12), rng.randint(1, 28)
    names = ("Sunday, November", "Monday, March", "Friday, May", "Sun Nov", "Tue Jan", "Wed Jul")
    return f"{year}-{month:02d}-{number:02d}" if rng.random() < 0.6 else f"{rng.choice(names)} {number}, {year}"


def environment(rng: Random, within: str, split: Split) -> str:
    return pick(rng, texts.ENVIRONMENTS, split).format(d=within, t=day(rng))


def reminder(rng: Random, split: Split) -> str:
    text = pick(rng, texts.REMINDERS, split).replace("{t}", day(rng))
    while "{s}" in text:
        text = text.replace("{s}", sentence(rng), 1)
    return text


def as_json(value: object) -> str:
    """A value as the chat template writes it."""
    return json.dumps(value, ensure_ascii=False)
