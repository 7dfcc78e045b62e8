"""A grammar of little stories: a hero, a wish or a trouble, a helper, a good end.

Every sentence pattern is written for this model; none comes from a collection. Called by ``corpus.py`` (plain text) and
``tasks_chat.py``.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.texts.lists import piped, split_words
from infra.demo_model.texts.plots import PLOTS
from infra.demo_model.texts.words import ANIMALS, COLOURS, FRUITS, NAMES, PLACES, article

_HEROES = (
    *ANIMALS,
    "boy",
    "girl",
    "boy",
    "girl",
    "dragon",
    "robot",
    "princess",
    "wizard",
    "farmer",
    "sailor",
    "knight",
    "king",
    "queen",
)
_TRAITS = split_words(
    "little small young brave clever kind curious gentle lonely cheerful shy funny tiny happy sleepy lazy"
)
_SETTINGS = split_words("big small old quiet green dark beautiful sunny wide strange warm cold lonely")
_TREASURES = split_words(
    "book pen lamp cup spoon box bag ball kite drum bell clock key mirror blanket hat shoe glove ring coin "
    "stone shell feather candle basket rope cart flute pencil map flag umbrella button letter toy doll puzzle"
)
_MEALS = split_words("soup bread rice cake salad honey cookies pie porridge pancakes cheese tea")
_OPENINGS = piped(
    "Once upon a time, there was a {trait} {hero} named {name}. | "
    "Once upon a time, there lived a {trait} {hero} whose name was {name}. | "
    "Once upon a time, in a {adj} {place}, there was a {trait} {hero} named {name}. | "
    "One day, a {trait} {hero} named {name} went to the {place}. | "
    "Long ago, a {trait} {hero} lived near a {adj} {place}. The name of the {hero} was {name}. | "
    "There was once a {trait} {hero} called {name}. | {name} was a {trait} {hero}."
)
_HABITS = piped(
    "{name} lived near the {place} and loved to play there. | Every day {name} walked to the {place}. | "
    "{name} liked {food} and long walks in the {place}. | "
    "{name} had a {colour} {thing} and took it everywhere. | {He} loved to look at the stars at night. | "
    "{name} and {pos} friend {friend} played together every morning."
)


_CLOSINGS = ("", "", "The end.", "And they lived happily ever after.")
_SKILLS = piped("swim|sing|dance|read|paint|jump over the brook|climb a tree|ride a bike|bake bread|play the drum")


def _pronouns(rng: Random) -> dict[str, str]:
    he = rng.choice(("he", "she"))
    if he == "he":
        return {"he": "he", "He": "He", "him": "him", "pos": "his", "poss": "his"}
    return {"he": "she", "He": "She", "him": "her", "pos": "her", "poss": "hers"}


def _cast(rng: Random, hero: str | None) -> dict[str, str]:
    name, friend = rng.sample(NAMES, 2)
    place, place2 = rng.sample(PLACES, 2)
    return {
        "hero": hero or rng.choice(_HEROES), "other": rng.choice(ANIMALS), "name": name, "friend": friend,
        "place": place, "place2": place2, "thing": rng.choice(_TREASURES), "food": rng.choice(_MEALS),
        "fruit": rng.choice(FRUITS[:12]),
        "colour": rng.choice(COLOURS), "adj": rng.choice(_SETTINGS), "trait": rng.choice(_TRAITS),
        "skill": rng.choice(_SKILLS),
        **_pronouns(rng),
    }  # fmt: skip


def _fill(template: str, cast: dict[str, str]) -> str:
    text = template
    for slot in ("adj", "other", "hero", "colour", "trait", "thing"):
        text = text.replace(f"a {{{slot}}}", f"{article(cast[slot])} {cast[slot]}")
        text = text.replace(f"A {{{slot}}}", f"{article(cast[slot]).capitalize()} {cast[slot]}")
    return text.format(**cast).replace("cherrys", "cherries")


def story(rng: Random, hero: str | None = None) -> str:
    """One story; ``hero``: the kind of its hero."""
    cast = _cast(rng, hero)
    plot = rng.choice(PLOTS)
    steps = [rng.choice(step) for step in plot.steps]
    opening = rng.choice(_OPENINGS[:3] if hero else _OPENINGS)
    parts = [opening, rng.choice(_HABITS), *steps, rng.choice(plot.ends)]
    closing = rng.choice(_CLOSINGS)
    lines = [_fill(part, cast) for part in (*parts, closing) if part]
    return " ".join(lines)
