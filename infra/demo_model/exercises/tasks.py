"""All tasks together: drawing from a split, and conversations of several turns.

The generators are in the ``tasks_*`` modules, which register themselves when this module imports them. Called by
``batches.py``, ``tokenizer.py`` and ``evaluate.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Literal

from infra.demo_model.exercises import (  # noqa: F401  (imported to be registered)
    tasks_chat,
    tasks_extract,
    tasks_facts,
    tasks_followup,
    tasks_numbers,
    tasks_unknown,
    tasks_words,
)
from infra.demo_model.exercises.tasks_chat import MEMORY_KINDS, remembered
from infra.demo_model.sample import REGISTRY, Message, Sample, Task, assistant, is_held_out
from infra.demo_model.texts.lists import piped

Split = Literal["train", "held out"]

SYSTEM_PROMPTS = piped(
    "You are a helpful assistant. | You are a helpful assistant | You are a friendly assistant. | "
    "You are a helpful AI assistant. | Answer briefly. | Be concise. | You are a chatbot. | "
    "Answer the user's questions. | You are Antiphon's demo model. | "
    "You are a helpful, honest assistant. Answer the questions of the user. | Be polite. | "
    "Answer in one sentence. | You are an assistant. | You are a helpful and harmless assistant. | "
    "Help the user. | You are an AI. | Keep your answers short. | Always answer truthfully."
)  # fmt: skip


@lru_cache(maxsize=1)
def _mixture() -> tuple[list[Task], list[float]]:
    tasks = list(REGISTRY.tasks.values())
    return tasks, [task.weight for task in tasks]


def task_names() -> list[str]:
    return list(REGISTRY.tasks)


def draw(name: str, rng: Random, split: Split) -> Sample:
    """Draws an instance of one task from ``split``."""
    task = REGISTRY.tasks[name]
    while True:
        sample = task.make(rng)
        if is_held_out(name, sample.key) == (split == "held out"):
            return replace(sample, task=name)


def draw_any(rng: Random) -> Sample:
    """A training instance of any task, by weight."""
    tasks, weights = _mixture()
    return draw(rng.choices(tasks, weights)[0].name, rng, "train")


def _system(rng: Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []


def _without_system(sample: Sample) -> list[Message]:
    kept = [message for message in sample.messages if message["role"] != "system"]
    return [*kept, assistant(sample.answer)]


def _single(rng: Random) -> list[Message]:
    sample = draw_any(rng)
    if sample.messages[0]["role"] == "system":
        return [*sample.messages, assistant(sample.answer)]
    return [*_system(rng), *_without_system(sample)]


def _small_turns(rng: Random, count: int) -> list[Message]:
    """``count`` consecutive samples, without tasks about things that were *not* said."""
    turns: list[Message] = []
    while count > 0:
        sample = draw_any(rng)
        if sample.task in ("not told", "memory", "use the name") or sample.messages[0]["role"] == "system":
            continue
        turns += _without_system(sample)
        count -= 1
    return turns


def _with_memory(rng: Random, most: int) -> list[Message]:
    """The user tells one or two things; after other turns, questions about them follow."""
    kinds = rng.sample(sorted(set(MEMORY_KINDS)), rng.choice((1, 1, 2)))
    if "name" not in kinds and rng.random() < 0.6:
        kinds[0] = "name"
    told = [_train_memory(rng, kind) for kind in kinds]
    messages = [message for opening, _, _ in told for message in opening]
    messages += _small_turns(rng, rng.randint(0, most))
    rng.shuffle(told)
    for _, question, answer in told:
        messages += [question, assistant(answer)]
    return messages


def _train_memory(rng: Random, kind: str) -> tuple[list[Message], Message, str]:
    while True:
        opening, question, answer, value = remembered(rng, kind)
        if not is_held_out("memory", f"{kind}{value.lower()}"):
            return opening, question, answer


def conversation(rng: Random) -> list[Message]:
    """One training conversation, mostly short."""
    roll = rng.random()
    if roll < 0.62:
        return _single(rng)
    if roll < 0.86:
        return [*_system(rng), *_small_turns(rng, rng.randint(2, 4))]
    return [*_system(rng), *_with_memory(rng, 3)]


#: Tasks that nearly every new user tries, and tasks that need many examples.
CORE = piped(
    "add | add | add | subtract | subtract | multiply | divide | word problem | sort numbers | sort numbers | "
    "compare | largest or smallest | repeat | repeat | json | json | extract | answer from text | capital | "
    "days and months | opposite | convert units | sort words | reverse words | count words | change case | spell | "
    "small talk | small talk | greet by name | memory | go on calculating | another capital | "
    "add three | multiply two digits | repeat times | reverse list | letters of a word | join words | count items | "
    "is it in the list | count on | json list | kind of thing | use the name | not told | unknown world | "
    "reverse that | say that again | shout that"
)


def practice(rng: Random) -> list[Message]:
    """One turn, with required earlier turns, of a task in ``CORE``."""
    return _without_system(draw(rng.choice(CORE), rng, "train"))


def long_conversation(rng: Random) -> list[Message]:
    """A conversation of many turns, for the long rows."""
    return [*_system(rng), *_with_memory(rng, 24)] if rng.random() < 0.6 else _small_turns(rng, rng.randint(8, 25))
