"""Questions on the facts of ``facts.py``: capitals, opposites, colours, calendar, kinds.

A held-out instance here is a wording that training did not use for this fact; the fact itself is trained. Importing the
module registers its tasks.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.sample import Expect, Sample, ask, fold, loosen, phrase, task
from infra.demo_model.texts import facts
from infra.demo_model.texts.lists import piped, split_words
from infra.demo_model.texts.words import article


def _bare(country: str) -> str:
    return country.removeprefix("the ")


def _yes_no(true: bool, yes: str, no: str) -> tuple[str, Expect]:
    return (f"Yes, {yes}", Expect("starts", ("yes",))) if true else (f"No, {no}", Expect("starts", ("no",)))


_CAPITAL = piped(
    "What is the capital of {c}? | What's the capital of {c}? | Capital of {c} | Name the capital of {c}. | "
    "Which city is the capital of {c}? | Tell me the capital of {c} | capital city of {c}? | "
    "What city is the capital of {c}? | Do you know the capital of {c}? | What is the capital city of {c}? | "
    "whats the capital of {c} | Can you tell me the capital of {c}? | Give me the capital of {c}. | "
    "The capital of {c} is?"
)  # fmt: skip


@task("capital", 4.0, split_by="wording")
def capital(rng: Random) -> Sample:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    roll = rng.random()
    if roll < 0.7:
        prompt, key = phrase(rng, _CAPITAL, c=country)
        return ask(fold(prompt, rng), f"The capital of {country} is {city}.", key, Expect("has_all", (city,)))
    if roll < 0.85 and country != "England" and city != "Singapore":
        forms = piped(
            "{x} is the capital of which country? | Which country has the capital {x}? | "
            "What country is {x} the capital of?"
        )  # fmt: skip
        prompt, key = phrase(rng, forms, x=city)
        return ask(fold(prompt, rng), f"{city} is the capital of {country}.", key, Expect("has_all", (_bare(country),)))
    shown = city if rng.random() < 0.5 else rng.choice(list(facts.CAPITALS.values()))
    forms = ("Is {x} the capital of {c}?", "Is the capital of {c} {x}?", "Is {x} the capital city of {c}?")
    prompt, key = phrase(rng, forms, x=shown, c=country)
    right = f"{city} is the capital of {country}."
    answer, expect = _yes_no(shown == city, right, right)
    return ask(fold(prompt, rng), answer, key, expect)


@task("continent", 1.0, split_by="wording")
def continent(rng: Random) -> Sample:
    name, countries = rng.choice(list(facts.CONTINENTS.items()))
    country = rng.choice(countries)
    forms = piped(
        "On which continent is {c}? | Where is {c}? | Which continent is {c} on? | "
        "What continent is {c} in? | Where is {c} located? | In which continent is {c}?"
    )  # fmt: skip
    prompt, key = phrase(rng, forms, c=country)
    return ask(fold(prompt, rng), f"{country} is in {name}.", key, Expect("has_all", (name,)))


@task("opposite", 2.0, split_by="wording")
def opposite(rng: Random) -> Sample:
    word, other = rng.choice(list(facts.OPPOSITES.items()))
    forms = piped(
        "What is the opposite of {w}? | Opposite of {w} | What's the opposite of {w}? | "
        "Give me the opposite of {w}. | Tell me the opposite of {w} | What is the antonym of {w}? | "
        "{w} is the opposite of what? | What is the opposite of the word {w}? | "
        'What is the opposite of "{w}"?'
    )  # fmt: skip
    prompt, key = phrase(rng, forms, w=word)
    return ask(prompt, f"The opposite of {word} is {other}.", key)


@task("colour of", 1.5, split_by="wording")
def colour_of(rng: Random) -> Sample:
    thing, colour = rng.choice(list(facts.COLOUR_OF.items()))
    forms = piped(
        "What color is {t}? | What colour is {t}? | What is the color of {t}? | What is the colour of {t}? | "
        "Which color does {t} have? | Tell me the color of {t} | Which color is {t}?"
    )  # fmt: skip
    prompt, key = phrase(rng, forms, t=thing)
    answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
    return ask(fold(prompt, rng), answer, key, Expect("has_all", (colour,)))


@task("animals", 2.0, split_by="wording")
def animals(rng: Random) -> Sample:
    roll = rng.random()
    if roll < 0.35:
        animal, sound = rng.choice(list(facts.SOUNDS.items()))
        forms = piped(
            "What sound does {a} {n} make? | What does {a} {n} say? | What noise does {a} {n} make? | "
            "Which sound does {a} {n} make? | How does {a} {n} sound?"
        )  # fmt: skip
        prompt, key = phrase(rng, forms, a=article(animal), n=animal)
        return ask(prompt, f'{article(animal).capitalize()} {animal} says "{sound}".', key, Expect("has_all", (sound,)))
    if roll < 0.7:
        animal, baby = rng.choice(list(facts.BABIES.items()))
        forms = piped(
            "What is a baby {n} called? | What do you call a baby {n}? | What is the name for a young {n}? | "
            "Name of a baby {n}?"
        )  # fmt: skip
        prompt, key = phrase(rng, forms, n=animal)
        return ask(prompt, f"A baby {animal} is called a {baby}.", key, Expect("has_all", (baby,)))
    legs, group = rng.choice(list(facts.LEGS.items()))
    animal = rng.choice(group)
    forms = ("How many legs does {a} {n} have?", "How many legs has {a} {n}?", "Number of legs of {a} {n}?")
    prompt, key = phrase(rng, forms, a=article(animal), n=animal)
    shown = "no" if legs == 0 else str(legs)
    return ask(prompt, f"{article(animal).capitalize()} {animal} has {shown} legs.", key)


@task("kind of thing", 2.0, split_by="wording")
def kind_of(rng: Random) -> Sample:
    kind, members = rng.choice(list(facts.KINDS.items()))
    thing = rng.choice(members)
    if rng.random() < 0.3:
        forms = ("What is {a} {t}?", "What kind of thing is {a} {t}?") if kind != "colour" else ("What is {t}?",)
        prompt, key = phrase(rng, forms, a=article(thing), t=thing)
        subject = thing.capitalize() if kind == "colour" else f"{article(thing).capitalize()} {thing}"
        return ask(prompt, f"{subject} is {article(kind)} {kind}.", key, Expect("has_all", (kind,)))
    if rng.random() < 0.3:
        forms = ("Name {a} {k}.", "Give me {a} {k}", "Tell me the name of {a} {k}", "Give me an example of {a} {k}.")
        prompt, _ = phrase(rng, forms, a=article(kind), k=kind)
        return ask(prompt, thing.capitalize() + ".", "!" + kind, Expect("has_any", tuple(members)))
    asked = kind if rng.random() < 0.5 else rng.choice([other for other in facts.KINDS if other != kind])
    if thing == "orange":
        asked = "fruit"
    first = thing if kind == "colour" else f"{article(thing)} {thing}"
    prompt, key = phrase(rng, ("Is {f} {a} {k}?", "Is {f} {a} {k}? Yes or no?"), f=first, a=article(asked), k=asked)
    answer, expect = _yes_no(
        asked == kind, f"{first} is {article(kind)} {kind}.", f"{first} is {article(kind)} {kind}."
    )
    return ask(prompt, answer, key, expect)


@task("name three", 1.0, split_by="wording")
def name_three(rng: Random) -> Sample:
    kind, members = rng.choice(list(facts.KINDS.items()))
    n, word = rng.choice(((2, "two"), (3, "three"), (3, "3"), (2, "2"), (4, "four"), (5, "five"), (3, "three")))
    many = "pieces of furniture" if kind == "piece of furniture" else kind + "s"
    if kind == "colour" and rng.random() < 0.5:
        many = "colors"
    forms = piped(
        "Name {n} {k}. | Give me {n} {k} | List {n} {k} | Tell me {n} {k} | Can you name {n} {k}? | Name me {n} {k}"
    )
    prompt, key = phrase(rng, forms, n=word, k=many)
    answer = ", ".join(rng.sample(members, n)).capitalize() + "."
    return ask(prompt, answer, key, Expect("has_any", tuple(members)))


_BY_SIZE = split_words("ant bee mouse frog squirrel cat fox dog wolf lion horse elephant whale")


@task("size of animals", 1.0, split_by="wording")
def sizes(rng: Random) -> Sample:
    small, big = sorted(rng.sample(range(len(_BY_SIZE)), 2))
    pair = [_BY_SIZE[small], _BY_SIZE[big]]
    word = rng.choice(("bigger", "larger", "smaller"))
    right, other = pair if word == "smaller" else pair[::-1]
    rng.shuffle(pair)
    shown = [f"{article(name)} {name}" for name in pair]
    forms = piped(
        "What is {w}, {a} or {b}? | Which is {w}: {a} or {b}? | Which animal is {w}, {a} or {b}? | Is {a} or {b} {w}?"
    )
    prompt, key = phrase(rng, forms, w=word, a=shown[0], b=shown[1])
    answer = f"{article(right).capitalize()} {right} is {word} than {article(other)} {other}."
    return ask(prompt, answer, key, Expect("exact", (answer,)))


@task("days and months", 3.0, split_by="wording")
def calendar(rng: Random) -> Sample:
    names, unit = (facts.DAYS, "day") if rng.random() < 0.5 else (facts.MONTHS, "month")
    place = rng.randrange(len(names))
    name = names[place]
    roll = rng.random()
    if unit == "month" and roll < 0.2:
        prompt, key = phrase(rng, ("How many days does {m} have?", "How many days are in {m}?"), m=name)
        n = facts.MONTH_DAYS[name]
        return ask(fold(prompt, rng), f"{name} has {n} days.", key, Expect("number", (str(n),)))
    if unit == "month" and roll < 0.4:
        ordinals = split_words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
        forms = piped("What is the {o} month? | Which month is the {o}? | Name the {o} month of the year.")
        prompt, key = phrase(rng, forms, o=ordinals[place])
        return ask(fold(prompt, rng), f"The {ordinals[place]} month is {name}.", key)
    step, word = rng.choice(((1, "after"), (-1, "before")))
    value = names[(place + step) % len(names)]
    forms = piped(
        "What {u} comes {w} {d}? | Which {u} comes {w} {d}? | What comes {w} {d}? | "
        "What is the {u} {w} {d}? | Which {u} is {w} {d}? | Tell me the {u} {w} {d}"
    )  # fmt: skip
    if unit == "day":
        relative = "tomorrow" if step == 1 else "yesterday"
        verb = "is" if step == 1 else "was"
        forms = (
            *forms,
            f"If today is {{d}}, what day {verb} {relative}?",
            f"Today is {{d}}. What day {verb} {relative}?",
        )
    prompt, key = phrase(rng, forms, u=unit, w=word, d=name)
    return ask(fold(prompt, rng), f"{value} comes {word} {name}.", key, Expect("starts", (value,)))


@task("general facts", 5.0, split_by="wording")
def general(rng: Random) -> Sample:
    number = rng.randrange(len(facts.GENERAL))
    questions, answer = facts.GENERAL[number]
    place = rng.randrange(len(questions))
    prefix = rng.choice(
        ("", "", "", "", "Do you know: ", "A question: ", "Please answer: ", "I wonder: ", "Question: ")
    )
    text = questions[place]
    prompt = prefix + loosen(text, rng) if prefix else loosen(text, rng)
    # The plain question is always trained: the model cannot know the fact otherwise.
    key = f"{prefix}{text}" if prefix else "!" + text
    return ask(fold(prompt, rng), answer, key, Expect("exact", (answer,)))
