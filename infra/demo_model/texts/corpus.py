"""Plain text for language modelling: stories, plain facts, little sequences.

All of it is generated; docstrings are used only to train the tokenizer. For chats see ``tasks.py``. Called by
``batches.py``, ``tokenizer.py`` and ``evaluate.py``.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.texts import facts
from infra.demo_model.texts.prose import docstrings
from infra.demo_model.texts.stories import story
from infra.demo_model.texts.verses import TOPICS, poem
from infra.demo_model.texts.words import article


def _capital_lines(rng: Random) -> str:
    pairs = rng.sample(sorted(facts.CAPITALS.items()), rng.randint(1, 6))
    return " ".join(f"The capital of {country} is {city}." for country, city in pairs)


def _opposite_lines(rng: Random) -> str:
    pairs = rng.sample(sorted(facts.OPPOSITES.items()), rng.randint(2, 6))
    return " ".join(f"The opposite of {one} is {other}." for one, other in pairs)


def _thing_lines(rng: Random) -> str:
    lines = [
        f"{thing[0].upper()}{thing[1:]} is {colour}."
        for thing, colour in rng.sample(sorted(facts.COLOUR_OF.items()), 2)
    ]
    for kind, members in rng.sample(sorted(facts.KINDS.items()), 2):
        if kind != "colour":
            one = rng.choice(members)
            lines.append(f"{article(one).capitalize()} {one} is {article(kind)} {kind}.")
    return " ".join(lines)


def _general_lines(rng: Random) -> str:
    return " ".join(
        answer
        for _, answer in rng.sample(facts.GENERAL, 3)
        if not answer.startswith(("It ", "Neither", "Nothing", "William"))
    )


def _counting(rng: Random) -> str:
    start, step = rng.choice(((1, 1), (1, 1), (0, 1), (2, 2), (5, 5), (10, 10), (rng.randint(1, 80), 1)))
    mark = rng.choice((", ", " ", ", "))
    return mark.join(str(start + step * place) for place in range(rng.randint(6, 20)))


def _sequence(rng: Random) -> str:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    rows = (
        ", ".join(facts.DAYS),
        ", ".join(facts.MONTHS),
        ", ".join(letters),
        " ".join(letters.lower()),
        "one, two, three, four, five, six, seven, eight, nine, ten",
        "The quick brown fox jumps over the lazy dog.",
        "Hello, world!",
    )
    return rng.choice(rows)


def _calculations(rng: Random) -> str:
    lines = []
    for _ in range(rng.randint(2, 8)):
        a, b = rng.randint(0, 50), rng.randint(0, 50)
        lines.append(f"{a} + {b} = {a + b}" if rng.random() < 0.6 else f"{max(a, b)} - {min(a, b)} = {abs(a - b)}")
    return "\n".join(lines)


def _verse(rng: Random) -> str:
    return poem(rng, rng.choice(TOPICS))


def plain_text(rng: Random) -> str:
    """Returns one document: in seven of ten cases a story, in the others one of the other kinds of text."""
    if rng.random() < 0.7:
        return story(rng)
    makers = (
        _capital_lines,
        _opposite_lines,
        _thing_lines,
        _general_lines,
        _counting,
        _sequence,
        _calculations,
        _verse,
    )
    return rng.choice(makers)(rng) or story(rng)


def long_text(rng: Random) -> str:
    """Several documents one after the other, for the long rows."""
    return "\n\n".join(story(rng) for _ in range(rng.randint(4, 9)))


def tokenizer_prose(characters: int) -> list[str]:
    """Docstrings up to a total size; they widen the tokenizer's English vocabulary."""
    kept: list[str] = []
    total = 0
    for text in docstrings():
        if total > characters:
            break
        kept.append(text)
        total += len(text)
    return kept
