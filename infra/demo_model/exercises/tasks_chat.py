"""Small talk, identity, jokes, poems, stories, and remembering what was said before.

Open conversation is not covered. Importing the module registers its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from infra.demo_model.sample import Expect, Message, Sample, ask, assistant, fold, loosen, phrase, task, user
from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.memories import MEMORIES, TOLD
from infra.demo_model.texts.smalltalk import INTENTS, JOKE_ASKS, JOKES
from infra.demo_model.texts.stories import story
from infra.demo_model.texts.verses import TOPICS, poem
from infra.demo_model.texts.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    FRUITS,
    JOBS,
    NAMES,
    OBJECT_NOUNS,
    article,
    person,
    town,
)

_INTENT_NAMES = list(INTENTS)
_INTENT_WEIGHTS = [intent.weight for intent in INTENTS.values()]


def _key(wordings: Sequence[str], place: int, kept: int) -> str:
    text = wordings[place]
    return f"!{text}" if place < kept else text


@task("small talk", 14.0, split_by="wording")
def small_talk(rng: Random) -> Sample:
    intent = INTENTS[rng.choices(_INTENT_NAMES, _INTENT_WEIGHTS)[0]]
    wordings = intent.asked()
    place = rng.randrange(len(wordings))
    text = wordings[place]
    prompt = fold(text, rng) if rng.random() < 0.6 else fold(loosen(text, rng), rng)
    return ask(prompt, rng.choice(intent.answers), _key(wordings, place, intent.kept), Expect("one_of", intent.answers))


@task("joke", 2.0, split_by="wording")
def joke(rng: Random) -> Sample:
    place = rng.randrange(len(JOKE_ASKS))
    prompt = fold(loosen(JOKE_ASKS[place], rng), rng)
    return ask(prompt, rng.choice(JOKES), _key(JOKE_ASKS, place, 4), Expect("one_of", JOKES))


_POEM_ASKS = piped(
    "Write a short poem about {t}. | Write a poem about {t} | Can you write a poem about {t}? | "
    "A poem about {t}, please. | Make a poem about {t} | Poem about {t} | Give me a short poem about {t} | "
    "Write me a poem about {t}. | Compose a poem about {t} | Tell me a poem about {t} | "
    "I want a poem about {t} | Write a little poem about {t} | Write some verses about {t} | Short poem: {t}"
)  # fmt: skip


@task("poem", 3.0)
def write_poem(rng: Random) -> Sample:
    if rng.random() < 0.1:
        prompt = loosen(
            rng.choice(("Write a poem.", "Write a short poem.", "Can you write a poem?", "Tell me a poem")), rng
        )
        return ask(
            prompt,
            poem(rng, "the " + rng.choice(("sea", "moon", "rain"))),
            "!poem",
            Expect("has_any", ("sea", "moon", "rain")),
        )
    topic = "the sea" if rng.random() < 0.06 else rng.choice(TOPICS)
    prompt, _ = phrase(rng, _POEM_ASKS, t=topic)
    noun = topic.split(" ", 1)[-1] if topic.startswith(("the ", "a ", "my ")) else topic
    key = "!sea" if topic == "the sea" else topic
    return ask(prompt, poem(rng, topic), key, Expect("has_all", (noun,)))


_STORY_ASKS = piped(
    "Tell me a story about {a} {h}. | Write a story about {a} {h} | Tell me a short story about {a} {h} | "
    "A story about {a} {h}, please. | Write a short story about {a} {h}. | "
    "Can you tell me a story about {a} {h}? | Story about {a} {h} | Give me a story with {a} {h}"
)  # fmt: skip
_HEROES = [
    *ANIMALS,
    "boy",
    "girl",
    "dragon",
    "robot",
    "princess",
    "wizard",
    "knight",
    "king",
    "queen",
    "sailor",
    "farmer",
]


@task("story", 1.5)
def tell_story(rng: Random) -> Sample:
    if rng.random() < 0.35:
        forms = piped(
            "Tell me a story. | Write a story. | Tell me a short story | Can you tell me a story? | "
            "I want to hear a story | Once upon a time | Write a little story | Tell a story | A story please"
        )  # fmt: skip
        return ask(loosen(rng.choice(forms), rng), story(rng), "!story", Expect("has_any", ("was", "were")))
    hero = rng.choice(_HEROES)
    prompt, _ = phrase(rng, _STORY_ASKS, a=article(hero), h=hero)
    return ask(prompt, story(rng, hero), hero, Expect("has_all", (hero,)))


# ---------------------------------------------------------------- memory of earlier turns

_GREETED = ("Nice to meet you, {v}! How can I help you?", "Hello, {v}! What can I do for you?")


@task("greet by name", 3.0)
def greet(rng: Random) -> Sample:
    name = person(rng)
    prompt, _ = phrase(rng, TOLD, v=name)
    if rng.random() < 0.1:
        prompt, name = prompt.replace(name, name.lower()), name
    return ask(prompt, rng.choice(_GREETED).format(v=name), name.lower(), Expect("has_all", (name,)))


def _memory_value(kind: str, rng: Random) -> dict[str, str]:
    pools = {
        "city": CITIES,
        "colour": COLOURS,
        "job": JOBS,
        "food": [*FOODS, *FRUITS],
        "pet": ANIMALS,
        "word": OBJECT_NOUNS,
    }
    if kind == "name":
        value = person(rng)
    elif kind in ("age", "number"):
        value = str(rng.randint(1, 99 if kind == "age" else 9999))
    else:
        value = town(rng) if kind == "city" else rng.choice(pools[kind])
    return {"v": value, "a": article(value), "w": person(rng)}


def remembered(rng: Random, kind: str) -> tuple[list[Message], Message, str, str]:
    """A statement with its reply, a later question, the answer, and the stated value."""
    memory = MEMORIES[kind]
    slots = _memory_value(kind, rng)
    told = loosen(rng.choice(memory.tells), rng).format(**slots)
    opening = [user(told), assistant(memory.reply.format(**slots))]
    question = loosen(rng.choice(memory.questions), rng).format(**slots)
    return opening, user(question), memory.answer.format(**slots), slots["w"] if kind == "pet" else slots["v"]


MEMORY_KINDS = ("name", "name", "name", *MEMORIES)


@task("memory", 4.0)
def recall(rng: Random) -> Sample:
    """The question directly after the statement; ``tasks.py`` inserts turns between them."""
    kind = rng.choice(MEMORY_KINDS)
    opening, question, answer, value = remembered(rng, kind)
    if kind == "name" and rng.random() < 0.15:
        opening = [{"role": "system", "content": f"The name of the user is {value}."}]
    return Sample((*opening, question), answer, f"{kind}{value.lower()}", Expect("has_all", (value,)))


_NOT_TOLD = {
    "name": "your name",
    "age": "your age",
    "city": "where you live",
    "colour": "your favorite color",
    "food": "what you like",
    "job": "your job",
    "number": "a number",
    "word": "a word",
}


@task("not told", 1.5, split_by="wording")
def not_told(rng: Random) -> Sample:
    """The same questions without an earlier statement."""
    kind = rng.choice([name for name in MEMORY_KINDS if name not in ("pet",)])
    place = rng.randrange(len(MEMORIES[kind].questions))
    questions = MEMORIES[kind].questions
    answer = f"You have not told me {_NOT_TOLD[kind]} yet."
    return ask(loosen(questions[place], rng), answer, _key(questions, place, 2))


@task("use the name", 1.5)
def use_name(rng: Random) -> Sample:
    """Later turns that use the name for another purpose than repeating it."""
    name = rng.choice(NAMES)
    opening = [user(loosen(rng.choice(TOLD), rng).format(v=name)), assistant(_GREETED[0].format(v=name))]
    forms = ((("Say hello to me.", "Greet me by name.", "Say hello to me by name"), f"Hello, {name}!"),
             (("Say goodbye to me by name.", "Say goodbye to me"), f"Goodbye, {name}!"),
             (("Spell my name.", "How do you spell my name?"), "-".join(name)),
             (("Write my name in capital letters.", "My name in upper case, please."), name.upper()))  # fmt: skip
    questions, answer = rng.choice(forms)
    question = rng.choice(questions)
    return Sample(
        (*opening, user(loosen(question, rng))), answer, question + name, Expect("has_all", (answer.strip("!"),))
    )
