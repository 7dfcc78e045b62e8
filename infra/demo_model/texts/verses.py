"""A grammar of short poems on any topic.

Every line is a pattern written for this model. Called by ``tasks_chat.py`` and ``corpus.py``.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.words import ANIMALS, COLOURS, FRUITS, NATURE, PLACES, THINGS

#: Lines grouped by their rhyme; ``{t}`` is the topic.
_RHYMES: tuple[tuple[str, ...], ...] = (
    piped(
        "I see the {t} in morning light, | It keeps me company at night, | "
        "It makes the greyest hour bright, | It shines for me so warm and white, | "
        "I think of it with all my might,"
    ),
    piped(
        "The {t} is dear to me, | It lives beside the quiet sea, | It makes my heart feel light and free, | "
        "As gentle as a dream can be, | It rests beneath the old oak tree,"
    ),
    piped(
        "I sing about the {t} today, | It never seems to go away, | It helps me laugh, it helps me play, | "
        "It shines on every cloudy day, | I only want to watch and stay,"
    ),
    ("Oh {t}, you make me smile,", "I sit with you a little while,", "I walked to you for half a mile,"),
    piped(
        "The {t} knows a song, | It hums it softly all day long, | It makes me feel both calm and strong, | "
        "With such a friend, what could go wrong,"
    ),
)  # fmt: skip

_SEA = (
    "The sea is wide, the sea is blue,\nIt sings a quiet song for you.\n"
    "The waves roll in, the waves roll out,\nAnd little fish swim all about.",
    "The sea is deep, the sea is wide,\nIt comes and goes with every tide.\n"
    "A silver wave, a grain of sand,\nThe water softly meets the land.",
)

TOPICS = sorted(
    {f"the {word}" for word in (*NATURE, *PLACES)}
    | {f"a {word}" for word in (*THINGS, *ANIMALS) if word[0] not in "aeiou"}
    | {
        "love",
        "friendship",
        "music",
        "time",
        "hope",
        "home",
        "cats",
        "dogs",
        "nature",
        "happiness",
        "my mother",
        "coffee",
    }
    | {f"{colour} {word}s" for colour in COLOURS[:4] for word in ("rose", "bird", "star")}
    | {f"{word}s" for word in FRUITS if word[-1] != "y"}
)


def _noun(topic: str) -> str:
    return topic.removeprefix("the ").removeprefix("a ").removeprefix("my ")


def poem(rng: Random, topic: str) -> str:
    """Four lines in two rhyming pairs; the first line names the topic."""
    if topic == "the sea" and rng.random() < 0.8:
        return rng.choice(_SEA)
    first, second = rng.sample(_RHYMES, 2)
    lines = [first[0], rng.choice(first[1:]), rng.choice(second[1:])]
    rest = [line for line in second[1:] if line != lines[2]]
    lines.append(rng.choice(rest))
    text = "\n".join(lines).format(t=_noun(topic))
    if _noun(topic).endswith("s") and " is " in text.split("\n")[0]:
        text = text.replace(" is ", " are ", 1)
    return text[:-1] + "."
