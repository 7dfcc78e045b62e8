"""Tasks that read something out of a given text: JSON from a sentence, short answers.

Free text is not covered: the sentences come from patterns, though with ever new names and numbers. Importing the module
registers its tasks.
"""

from __future__ import annotations

import json
from random import Random

from infra.demo_model.sample import Expect, Sample, ask, phrase, task
from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.words import (
    ANIMALS,
    COLOURS,
    JOBS,
    OBJECT_NOUNS,
    PLACES,
    article,
    person,
    plural,
    town,
)

#: Fields, and sentences that contain them.
_SCHEMAS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("name", "age"), piped(
        "{name} is {age} years old. | {name} is {age}. | My name is {name} and I am {age} years old. | "
        "{age}-year-old {name} likes music. | {name}, {age}, likes to read. | "
        "I am {name}, {age} years old. | {name} turned {age} today. | {name} is {age} years old and happy."
    )),
    (("name", "city"), piped(
        "{name} lives in {city}. | {name} is from {city}. | My name is {name} and I live in {city}. | "
        "{name} moved to {city}. | I am {name} from {city}."
    )),
    (("name", "job"), ("{name} is {ajob}.", "{name} works as {ajob}.", "My name is {name} and I am {ajob}.")),
    (("name", "age", "city"), piped(
        "{name} is {age} years old and lives in {city}. | {name}, {age}, lives in {city}. | "
        "My name is {name}, I am {age} and I live in {city}. | {name} from {city} is {age} years old."
    )),
    (("name", "city", "job"), ("{name} is {ajob} in {city}.", "{name} lives in {city} and works as {ajob}.")),
    (("product", "price"), piped(
        "The {product} costs {price} dollars. | A {product} for {price} euros. | "
        "{price} dollars for the {product}. | The price of the {product} is {price}."
    )),
    (("item", "quantity"), piped(
        "I want {quantity} {items}. | Please order {quantity} {items}. | We need {quantity} {items}."
    )),
    (("animal", "color"), piped(
        "The {animal} is {color}. | I saw a {color} {animal}. | A {color} {animal} runs through the garden."
    )),
    (("name", "animal"), ("{name} has a {animal}.", "{name} owns a {animal}.", "The {animal} belongs to {name}.")),
    (("name", "email"), piped(
        "{name} can be reached at {email}. | The email of {name} is {email}. | Write to {name}: {email}"
    )),
)  # fmt: skip

_JSON_ASKS = piped(
    "Give me JSON with {f}: {s} | Give me a JSON object with {f}: {s} | Extract {f} as JSON: {s} | "
    "Return JSON with {f}: {s} | Write JSON with the keys {f} for this sentence: {s} | "
    "Convert to JSON with {f}: {s} | JSON with {f}: {s} | Extract the {f} as JSON from: {s} | "
    "{s} Give me JSON with {f}. | {s} Return this as JSON with {f}. | "
    "From this text extract {f} and answer in JSON: {s} | Turn this into JSON with {f}: {s} | "
    "Output JSON ({f}): {s} | Make a JSON object with {f} from this: {s} | {s} Extract {f} as JSON."
)  # fmt: skip


def _listed(fields: list[str], rng: Random) -> str:
    if rng.random() < 0.2:
        fields = [f'"{name}"' for name in fields]
    if len(fields) == 1 or rng.random() < 0.25:
        return ", ".join(fields)
    return ", ".join(fields[:-1]) + " and " + fields[-1]


def _values(rng: Random) -> dict[str, object]:
    name, job = person(rng), rng.choice(JOBS)
    item = rng.choice(OBJECT_NOUNS)
    return {
        "name": name, "age": rng.randint(1, 99), "city": town(rng), "job": job, "ajob": f"{article(job)} {job}",
        "product": rng.choice(OBJECT_NOUNS), "price": rng.randint(1, 999), "item": item, "items": plural(item),
        "quantity": rng.randint(2, 60), "animal": rng.choice(ANIMALS), "color": rng.choice(COLOURS),
        "email": f"{name.lower()}@{rng.choice(('example.com', 'mail.org', 'home.net'))}",
    }  # fmt: skip


@task("json", 6.0)
def to_json(rng: Random) -> Sample:
    fields, sentences = rng.choice(_SCHEMAS)
    values = _values(rng)
    sentence = rng.choice(sentences).format(**values)
    wanted = list(fields)
    if rng.random() < 0.15:
        rng.shuffle(wanted)
    if rng.random() < 0.1:
        wanted = wanted[:1]
    prompt, _ = phrase(rng, _JSON_ASKS, f=_listed(wanted, rng), s=sentence)
    text = json.dumps({name: values[name] for name in wanted}, ensure_ascii=False)
    return ask(prompt, text, sentence.lower(), Expect("json", (text,)))


@task("json list", 1.5)
def json_list(rng: Random) -> Sample:
    if rng.random() < 0.5:
        items: list[object] = [rng.choice(OBJECT_NOUNS) for _ in range(rng.randint(2, 5))]
    else:
        items = [rng.randint(0, 99) for _ in range(rng.randint(2, 6))]
    shown = ", ".join(map(str, items))
    if rng.random() < 0.4 and len(items) > 2:
        shown = ", ".join(map(str, items[:-1])) + f" and {items[-1]}"
    forms = piped(
        "Write as a JSON list: {t} | Give me a JSON array of: {t} | Make a JSON list with {t} | "
        "Convert to a JSON array: {t} | Return a JSON list: {t} | Turn this into a JSON list: {t} | "
        "JSON array: {t}"
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, t=shown)
    text = json.dumps(items)
    return ask(prompt, text, shown, Expect("json", (text,)))


#: Questions about a sentence pattern: field, wordings, form of the answer.
_ASKED: dict[str, tuple[tuple[str, ...], str]] = {
    "name": (piped(
        "Who is mentioned in this sentence: {s} | What is the name of the person: {s} | "
        "Extract the name: {s} | Find the name in this text: {s} | {s} What is the name of the person? | "
        "Which person is named here: {s}"
    ), "{v}"),
    "age": (piped(
        "Extract the age: {s} | How old is the person: {s} | {s} How old is {name}? | "
        "What is the age of {name}? {s} | Find the age in: {s}"
    ), "{v}"),
    "city": (piped(
        "Which city is mentioned: {s} | Extract the city: {s} | Find the city in this text: {s} | "
        "{s} Which city is it? | What city is named in: {s}"
    ), "{v}"),
    "job": (piped(
        "Extract the job: {s} | What is the job of {name}? {s} | {s} What does {name} do? | "
        "{s} What is the job?"
    ), "{v}"),
    "price": (piped(
        "Extract the price: {s} | {s} What is the price? | {s} How much is the {product}? | "
        "How much is the {product}? {s} | Find the price: {s}"
    ), "{v}"),
    "color": (("Extract the color: {s}", "{s} What color is the {animal}?", "What color is mentioned: {s}"), "{v}"),
    "animal": (("Which animal is mentioned: {s}", "Extract the animal: {s}", "{s} Which animal is it?"), "{v}"),
    "email": (piped(
        "Extract the email: {s} | Find the email address: {s} | What is the email address in: {s} | "
        "{s} What is the email of {name}?"
    ), "{v}"),
}  # fmt: skip


@task("extract", 5.0)
def extract(rng: Random) -> Sample:
    fields, sentences = rng.choice(_SCHEMAS)
    known = [name for name in fields if name in _ASKED]
    if not known:
        return extract(rng)
    values = _values(rng)
    sentence = rng.choice(sentences).format(**values)
    questions, form = _ASKED[rng.choice(known)]
    field = next(name for name in known if _ASKED[name][0] is questions)
    slots = {"s": sentence, **{name: values[name] for name in ("name", "product", "animal")}}
    prompt, _ = phrase(rng, questions, **slots)
    value = str(values[field])
    return ask(prompt, form.format(v=value), sentence.lower())


_SCENES = (
    ("The {n} is in the {p}.", "Where is the {n}?", "The {n} is in the {p}."),
    ("{x} has {ac} {c} {n}.", "What color is the {n} of {x}?", "The {n} of {x} is {c}."),
    ("{x} put the {n} in the {p}.", "Where did {x} put the {n}?", "{x} put the {n} in the {p}."),
    ("{x} is in the {p}.", "Where is {x}?", "{x} is in the {p}."),
    ("{x} went to the {p}.", "Where did {x} go?", "{x} went to the {p}."),
    ("{x} gave the {n} to {y}.", "Who has the {n} now?", "{y} has the {n}."),
    ("{x} gave the {n} to {y}.", "Who gave the {n} to {y}?", "{x} gave the {n} to {y}."),
    ("{x} likes {m} but not {o}.", "What does {x} like?", "{x} likes {m}."),
    ("The {n} costs {k} dollars.", "How much does the {n} cost?", "The {n} costs {k} dollars."),
    ("{x} lives in {t}.", "Where does {x} live?", "{x} lives in {t}."),
    ("{x} is {k} years old.", "How old is {x}?", "{x} is {k} years old."),
    ("There are {k} {m} in the {p}.", "How many {m} are in the {p}?", "There are {k} {m} in the {p}."),
    ("{x} is older than {y}.", "Who is older, {x} or {y}?", "{x} is older than {y}."),
    ("{x} is taller than {y}.", "Who is taller?", "{x} is taller than {y}."),
)


def _scene(rng: Random, scene: tuple[str, str, str]) -> tuple[str, str, str]:
    a, b = rng.sample(OBJECT_NOUNS, 2)
    colour = rng.choice(COLOURS)
    slots = {
        "n": rng.choice(OBJECT_NOUNS), "p": rng.choice(PLACES), "c": colour, "ac": article(colour),
        "x": person(rng), "y": person(rng),
        "m": plural(a), "o": plural(b), "k": rng.randint(2, 99), "t": town(rng),
    }  # fmt: skip
    text, question, answer = (part.format(**slots) for part in scene)
    return text, question, answer


@task("answer from text", 5.0)
def from_text(rng: Random) -> Sample:
    """One to four sentences of different kinds and a question about one of them."""
    scenes = [_scene(rng, scene) for scene in rng.sample(_SCENES, rng.randint(1, 4))]
    _, question, answer = rng.choice(scenes)
    text = " ".join(scene[0] for scene in scenes)
    forms = ("{t} {q}", "{t} {q}", "{t}\n{q}", "{q} {t}", "Text: {t} Question: {q}", "Context: {t}\nQuestion: {q}",
             "Read this: {t} {q}", "Answer the question from the text. {t} {q}")  # fmt: skip
    return ask(rng.choice(forms).format(t=text, q=question), answer, (text + question).lower())
