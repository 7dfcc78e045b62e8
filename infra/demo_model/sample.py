"""Task instances: their data, wording, judging and assignment to a split.

The ``tasks_*`` modules register generators here; ``tasks.py`` draws from the registry.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, str]
#: The definition of a function in an API request.
Tool = dict[str, Any]

#: One instance in this many is held out of training.
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Expect:
    """How an answer is judged: ``kind`` names the rule, ``gold`` its values."""

    kind: str
    gold: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One task instance: a conversation that ends with the user, and its answer.

    ``key`` names the content for the split: two samples with the same key are the
    same question, however they are worded.  ``tools`` are offered in the prompt.
    """

    messages: tuple[Message, ...]
    answer: str
    key: str
    expect: Expect | None = None
    task: str = ""
    tools: tuple[Tool, ...] = ()

    @property
    def judged_by(self) -> Expect:
        """The rule for the answer; by default it must equal the reference answer."""
        return self.expect or Expect("exact", (self.answer,))


Generator = Callable[[Random], Sample]


@dataclass(frozen=True)
class Task:
    """A named generator and its share of the training mixture."""

    name: str
    weight: float
    make: Generator
    split_by: str


@dataclass
class Registry:
    """All tasks by name, filled by the ``@task`` decorator at import."""

    tasks: dict[str, Task] = field(default_factory=dict)


REGISTRY = Registry()


def task(name: str, weight: float, split_by: str = "content") -> Callable[[Generator], Generator]:
    """Register a generator.

    ``split_by`` documents what is new in a held-out instance: ``content`` (its operands or words are not in the
    training data) or ``wording`` (the fact is in the training data, this wording is not).
    """

    def add(make: Generator) -> Generator:
        REGISTRY.tasks[name] = Task(name, weight, make, split_by)
        return make

    return add


def is_held_out(name: str, key: str) -> bool:
    """Whether the instance ``key`` of task ``name`` is held out of training."""
    if key.startswith("!"):
        return False
    return zlib.crc32(f"{name}|{key}".encode()) % HELD_OUT_ONE_IN == 0


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The assistant's text for a tool call, in the form of the chat template."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def ask(prompt: str, answer: str, key: str, expect: Expect | None = None) -> Sample:
    """A one-turn sample."""
    return Sample((user(prompt),), answer, key, expect)


# ---------------------------------------------------------------- phrasing

_POLITE = (
    "Please {}", "Can you {}", "Could you {}", "Hey, {}", "Hi! {}", "Now {}", "I need you to {}",
    "Would you {}", "Ok, {}", "Can you please {}", "Hello, {}", "Could you please {}",
)  # fmt: skip
_ASKING = ("Hey, {}", "Hi, {}", "Tell me, {}", "Quick question: {}", "Hello! {}", "Please tell me: {}", "So, {}")
_QUESTION = re.compile(r"^(what|who|which|where|when|how|is|are|does|do|can|why|whats|what's)\b", re.IGNORECASE)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _with_manners(text: str, rng: Random) -> str:
    if "{" in text[:2] or text.startswith("I "):
        return text
    question = bool(_QUESTION.match(text))
    return rng.choice(_ASKING if question else _POLITE).format("\0").replace("\0", _lower_first(text))


def loosen(template: str, rng: Random) -> str:
    """Vary manners, casing and end punctuation as people do; slots stay untouched."""
    text = template
    if rng.random() < 0.15:
        text = _with_manners(text, rng)
    roll = rng.random()
    if roll < 0.18:
        text = text.lower()
    elif roll < 0.26:
        text = _lower_first(text)
    if text[-1] in ".?!":
        roll = rng.random()
        if roll < 0.25:
            text = text[:-1]
        elif roll < 0.29:
            text = text[:-1] + rng.choice(("!", "??", " ?", "...", "!!", "."))
    elif rng.random() < 0.06:
        text += rng.choice((".", " please", ", please.", " please."))
    return text


def phrase(rng: Random, templates: Sequence[str], **slots: object) -> tuple[str, str]:
    """A prompt from one template, and the key of its wording with these slots."""
    template = rng.choice(templates)
    key = template + "|" + "|".join(str(value).lower() for value in slots.values())
    return loosen(template, rng).format(**slots), key


def fold(text: str, rng: Random, chance: float = 0.15) -> str:
    """The prompt, sometimes in lower case, as typed in a hurry."""
    return text.lower() if rng.random() < chance else text


# ---------------------------------------------------------------- judging


def squash(text: str) -> str:
    """Normalizes a text: lower case, single spaces, no final full stop or quotes."""
    return re.sub(r"\s+", " ", text.lower()).strip().strip("\"'").rstrip(".!")


def _holds_words(text: str, gold: str) -> bool:
    pattern = r"(?<![a-z0-9])" + re.escape(gold.lower()) + r"(?![a-z0-9])"
    return re.search(pattern, text.lower()) is not None


def _same_json(text: str, gold: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(gold))
    except ValueError:
        return False


_CALL = re.compile(r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", re.DOTALL)


def read_call(text: str) -> Tool | None:
    """The call if ``text`` is exactly one (an object with only ``name`` and ``arguments``), else None."""
    found = _CALL.fullmatch(text)
    try:
        call = json.loads(found[1]) if found else None
    except ValueError:
        return None
    well_formed = (
        isinstance(call, dict) and call.keys() == {"name", "arguments"} and isinstance(call["arguments"], dict)
    )
    return call if well_formed else None


def _last_number(text: str) -> str:
    found = re.findall(r"-?\d+", text)
    return found[-1] if found else ""


def passes(expect: Expect, text: str) -> bool:
    """Whether ``text`` is a right answer."""
    gold = expect.gold
    rules: dict[str, Callable[[], bool]] = {
        "exact": lambda: squash(text) == squash(gold[0]),
        "cased": lambda: text.strip() == gold[0],
        "one_of": lambda: squash(text) in {squash(value) for value in gold},
        "has_all": lambda: all(_holds_words(text, value) for value in gold),
        "has_any": lambda: any(_holds_words(text, value) for value in gold),
        "number": lambda: _last_number(text) == gold[0],
        "json": lambda: _same_json(text, gold[0]),
        "call": lambda: read_call(text) == json.loads(gold[0]),
        "no call": lambda: bool(text.strip()) and "tool_call" not in text,
        "starts": lambda: squash(text).startswith(squash(gold[0])),
    }
    return rules[expect.kind]()
