"""Tasks on the words of the prompt itself: copying, reversing, sorting, counting, casing.

Every answer can be derived from the prompt. ``tasks.py`` imports the module, which registers its tasks.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.sample import Expect, Sample, ask, loosen, phrase, task
from infra.demo_model.texts import prose
from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.words import (
    ADJECTIVES,
    ALL_NOUNS,
    ALL_WORDS,
    ANIMALS,
    COLOURS,
    FOODS,
    FRUITS,
    NAMES,
    PLURALS,
    VERBS,
    invent,
    person,
    plural,
    several,
)


def _word(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.75:
        return rng.choice(ALL_WORDS)
    return invent(rng) if roll < 0.9 else rng.choice(NAMES)


def _little_sentence(rng: Random) -> str:
    forms = piped(
        "{p} {v} | the {n} is {a} | {a} {p} {v} | I like {p} | my {n} can {v} | {x} likes {p} | "
        "we {v} in the {n} | the {a} {n} and the {m} | {c} {p} {v} | {x} and {y} {v} together | hello {x} | "
        "I am a {a} {n} | good morning | hello world | the {c} {n} {v}s over the {a} {m} | {p} and {q} | "
        "do not {v} the {n} | where is the {n}"
    )  # fmt: skip
    text = rng.choice(forms).format(
        p=rng.choice(PLURALS), q=rng.choice(PLURALS), v=rng.choice(VERBS), n=rng.choice(ALL_NOUNS),
        m=rng.choice(ALL_NOUNS), a=rng.choice(ADJECTIVES), c=rng.choice(COLOURS), x=person(rng), y=person(rng),
    )  # fmt: skip
    if rng.random() < 0.35:
        text = text[0].upper() + text[1:]
    return text + rng.choice(("", "", "", ".", "!"))


def _characters(rng: Random) -> str:
    pool = rng.choice(("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789", "abcXYZ0123456789-_"))
    return "".join(rng.choice(pool) for _ in range(rng.randint(2, 8)))


def _anything(rng: Random) -> str:
    """Text to be copied: words, sentences, numbers, character strings."""
    roll = rng.random()
    if roll < 0.40:
        return _little_sentence(rng)
    if roll < 0.62:
        return " ".join(_word(rng) for _ in range(rng.randint(1, 7)))
    if roll < 0.85:
        return prose.sentence(rng)
    if roll < 0.93:
        return " ".join(_characters(rng) for _ in range(rng.randint(1, 3)))
    return " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(1, 5)))


_REPEAT = piped(
    'Repeat after me: {t} | Repeat: {t} | Say: {t} | Repeat this: {t} | Say "{t}" | Repeat "{t}" | '
    "Repeat the following: {t} | Echo: {t} | Copy this text: {t} | Repeat exactly: {t} | Write: {t} | "
    'Say {t} | Just say: {t} | Repeat after me: "{t}" | Repeat the sentence: {t} | Please repeat: {t} | '
    "Echo this: {t} | Repeat the words: {t} | Repeat after me - {t} | Say this: {t} | Echo back: {t} | "
    "Print: {t} | Repeat {t} | Repeat what I say: {t} | Say the following: {t} | Reply with: {t} | "
    'Answer with "{t}"'
)  # fmt: skip


@task("repeat", 6.0)
def repeat(rng: Random) -> Sample:
    text = _anything(rng)
    prompt = loosen(rng.choice(_REPEAT), rng).format(t=text)
    return ask(prompt, text, text.lower(), Expect("cased", (text,)))


@task("repeat times", 1.0)
def repeat_times(rng: Random) -> Sample:
    word, n = _word(rng), rng.randint(2, 5)
    number = rng.choice((str(n), ("two", "three", "four", "five")[n - 2]))
    forms = piped(
        'Say {w} {n} times. | Write {w} {n} times | Repeat {w} {n} times. | Say "{w}" {n} times | '
        "Repeat the word {w} {n} times | Write the word {w} {n} times."
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, w=word, n=number)
    return ask(prompt, " ".join([word] * n), f"{word}*{n}")


@task("reverse words", 3.0)
def reverse_words(rng: Random) -> Sample:
    words = [_word(rng) for _ in range(rng.randint(2, 6))]
    forms = piped(
        "Reverse the words: {t} | Reverse the order of the words: {t} | Say these words backwards: {t} | "
        "Reverse the word order: {t} | Reverse these words: {t} | Write the words in reverse order: {t} | "
        "Reverse this list of words: {t} | Reverse the sentence word by word: {t} | "
        "Put these words in reverse order: {t}"
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, t=" ".join(words))
    return ask(prompt, " ".join(reversed(words)), " ".join(words))


@task("reverse list", 1.0)
def reverse_list(rng: Random) -> Sample:
    items = [str(rng.randint(0, 99)) for _ in range(rng.randint(3, 6))]
    if rng.random() < 0.5:
        items = several(rng, ALL_NOUNS, 3, 5)
    forms = ("Reverse the list: {t}", "Reverse this list: {t}", "Reverse: {t}", "Give me this list backwards: {t}")
    prompt, _ = phrase(rng, forms, t=", ".join(items))
    return ask(prompt, ", ".join(reversed(items)), ",".join(items))


@task("sort words", 3.0)
def sort_words(rng: Random) -> Sample:
    pool = rng.choice((ALL_NOUNS, ANIMALS, FRUITS, FOODS, sorted(NAMES), COLOURS))
    words = several(rng, pool, 2, 5)
    forms = piped(
        "Sort these words: {t} | Sort alphabetically: {t} | Put these words in alphabetical order: {t} | "
        "Sort these words alphabetically: {t} | Order the words alphabetically: {t} | Alphabetize: {t} | "
        "Sort the words {t} | Arrange in alphabetical order: {t} | Sort the following words: {t} | "
        "Sort this list of words: {t} | Sort {t}"
    )  # fmt: skip
    joined = rng.choice((" ", ", ", ", ")).join(words)
    prompt, _ = phrase(rng, forms, t=joined)
    return ask(prompt, ", ".join(sorted(words)), ",".join(sorted(words)))


@task("count words", 2.5)
def count_words(rng: Random) -> Sample:
    if rng.random() < 0.5:
        words = [_word(rng) for _ in range(rng.randint(1, 9))]
        text = " ".join(words)
    else:
        text = _little_sentence(rng)
    forms = piped(
        'How many words are in: {t} | Count the words: {t} | How many words are in "{t}"? | '
        "Count the words in this sentence: {t} | How many words does this have: {t} | Word count of: {t} | "
        'How many words are in the sentence "{t}"? | How many words are there in: {t}'
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, t=text)
    n = len(text.split())
    answer = f"There {'is' if n == 1 else 'are'} {n} word{'' if n == 1 else 's'}."
    return ask(prompt, answer, text.lower(), Expect("number", (str(n),)))


@task("count items", 1.5)
def count_items(rng: Random) -> Sample:
    items = [rng.choice(several(rng, ALL_NOUNS, 3, 3)) for _ in range(rng.randint(2, 9))]
    if rng.random() < 0.5:
        pool = several(rng, rng.choice((ANIMALS, COLOURS, FRUITS)), 2, 3)
        items = [rng.choice(pool) for _ in range(rng.randint(3, 8))]
        target = rng.choice(pool)
        forms = piped(
            "How many times does {w} appear in: {t}? | Count the word {w} in: {t} | "
            "How often is {w} in this list: {t} | How many times is {w} in the list {t}?"
        )  # fmt: skip
        prompt, _ = phrase(rng, forms, w=target, t=", ".join(items))
        n = items.count(target)
        return ask(prompt, f"{n} time{'' if n == 1 else 's'}.", target + ",".join(items), Expect("number", (str(n),)))
    forms = ("How many items are in this list: {t}?", "Count the items: {t}", "How many things are listed: {t}")
    prompt, _ = phrase(rng, forms, t=", ".join(items))
    return ask(prompt, f"There are {len(items)} items.", ",".join(items), Expect("number", (str(len(items)),)))


_SPELL_POOL = sorted(set(ALL_WORDS) | set(NAMES))


@task("spell", 2.5, split_by="wording")
def spell(rng: Random) -> Sample:
    word = rng.choice(_SPELL_POOL)
    spelled = "-".join(word)
    if rng.random() < 0.4:
        forms = piped('Spell {w}. | Spell the word {w} | How do you spell {w}? | Spell "{w}" | Can you spell {w}?')
        prompt, key = phrase(rng, forms, w=word)
        return ask(prompt, spelled, key)
    forms = piped(
        "How many letters are in {w}? | How many letters are in the word {w}? | "
        'How many letters does {w} have? | Count the letters in {w}. | How many letters are in "{w}"? | '
        "Count the letters of the word {w} | How long is the word {w}? | How many letters in {w}? | "
        "How many characters are in {w}?"
    )  # fmt: skip
    prompt, key = phrase(rng, forms, w=word)
    return ask(prompt, f"{spelled}: {len(word)} letters.", key, Expect("number", (str(len(word)),)))


@task("letters of a word", 1.5, split_by="wording")
def letters(rng: Random) -> Sample:
    word = rng.choice(_SPELL_POOL)
    if rng.random() < 0.6:
        which, place = rng.choice((("first", 0), ("last", -1)))
        forms = piped(
            "What is the {k} letter of {w}? | What's the {k} letter of the word {w}? | {k} letter of {w} | "
            'Which letter is the {k} one in {w}? | Give me the {k} letter of "{w}"'
        )  # fmt: skip
        prompt, key = phrase(rng, forms, k=which, w=word)
        letter = word[place].lower()
        return ask(
            prompt, f"The {which} letter is {letter}.", key, Expect("exact", (f"The {which} letter is {letter}",))
        )
    letter = word[0].lower() if rng.random() < 0.5 else rng.choice("abcdefghilmnoprstw")
    forms = ("Does {w} start with {l}?", "Does the word {w} start with the letter {l}?", "Does {w} begin with {l}?")
    prompt, key = phrase(rng, forms, w=word, l=letter)
    true = word[0].lower() == letter
    answer = f"Yes, {word} starts with {letter}." if true else f"No, {word} starts with {word[0].lower()}."
    return ask(prompt, answer, key, Expect("starts", ("yes" if true else "no",)))


_IRREGULAR = {
    "mouse": "mice",
    "goose": "geese",
    "sheep": "sheep",
    "deer": "deer",
    "child": "children",
    "man": "men",
    "woman": "women",
    "foot": "feet",
    "tooth": "teeth",
    "person": "people",
    "fish": "fish",
    "wolf": "wolves",
}
_UPPER = piped(
    "Write in upper case: {t} | Make this uppercase: {t} | Convert to upper case: {t} | Uppercase: {t} | "
    "Put this in capital letters: {t} | Write {t} in capital letters | Convert this to uppercase: {t} | "
    'Shout: {t} | Make "{t}" upper case | Upper case this: {t}'
)  # fmt: skip
_LOWER = piped(
    "Write in lower case: {t} | Make this lowercase: {t} | Convert to lower case: {t} | Lowercase: {t} | "
    'Convert this to lowercase: {t} | Put this in small letters: {t} | Make "{t}" lower case'
)  # fmt: skip


@task("change case", 3.0)
def change_case(rng: Random) -> Sample:
    text = " ".join(rng.choice(ALL_WORDS) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.35:
        text = _little_sentence(rng)
    if rng.random() < 0.6:
        prompt = loosen(rng.choice(_UPPER), rng).format(t=text)
        return ask(prompt, text.upper(), "up" + text.lower(), Expect("cased", (text.upper(),)))
    shown = text.upper() if rng.random() < 0.8 else text.title()
    prompt = loosen(rng.choice(_LOWER), rng).format(t=shown)
    return ask(prompt, text.lower(), "low" + text.lower(), Expect("cased", (text.lower(),)))


@task("pick a word", 2.0)
def pick_word(rng: Random) -> Sample:
    words = several(rng, ALL_NOUNS, 3, 6)
    places = ["first", "second", "third"]
    which = rng.choice(("first", "last", *places[: len(words)]))
    value = words[-1] if which == "last" else words[places.index(which)]
    joined = rng.choice((" ", ", ")).join(words)
    forms = piped(
        'What is the {k} word: {t} | What is the {k} word of "{t}"? | Give me the {k} word: {t} | '
        "Which word comes {k}: {t}? | Tell me the {k} item in this list: {t} | {k} word of: {t}"
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, k=which, t=joined)
    return ask(prompt, f"The {which} word is {value}.", which + ",".join(words), Expect("has_all", (value,)))


@task("plural", 1.0, split_by="wording")
def make_plural(rng: Random) -> Sample:
    word = rng.choice([noun for noun in ALL_NOUNS if noun not in _IRREGULAR] + list(_IRREGULAR))
    forms = piped(
        "What is the plural of {w}? | Plural of {w} | What's the plural of {w}? | "
        "Give me the plural of {w} | What is the plural form of {w}?"
    )
    prompt, key = phrase(rng, forms, w=word)
    return ask(prompt, f"The plural of {word} is {_IRREGULAR.get(word) or plural(word)}.", key)


@task("use in a sentence", 1.5)
def use_in_sentence(rng: Random) -> Sample:
    word = rng.choice(ALL_NOUNS)
    forms = piped(
        "Use the word {w} in a sentence. | Write a sentence with the word {w}. | Make a sentence with {w} | "
        "Write a sentence about a {w} | Give me a sentence with the word {w} | Write one sentence with {w}."
    )  # fmt: skip
    prompt, _ = phrase(rng, forms, w=word)
    ends = ("yesterday", "in the morning", "every day", "and smiled", "last summer", "with my friends")
    return ask(prompt, f"I saw the {word} {rng.choice(ends)}.", word, Expect("has_all", (word,)))


@task("join words", 1.0)
def join_words(rng: Random) -> Sample:
    words = several(rng, ALL_NOUNS, 2, 5)
    mark, name = rng.choice(((", ", "commas"), ("-", "dashes"), (" and ", '"and"')))
    forms = ("Join these words with {k}: {t}", "Put {k} between these words: {t}")
    prompt, _ = phrase(rng, forms, k=name, t=" ".join(words))
    return ask(prompt, mark.join(words), name + ",".join(words))


@task("is it in the list", 1.0)
def contains(rng: Random) -> Sample:
    words = several(rng, ALL_NOUNS, 3, 6)
    target = rng.choice(words) if rng.random() < 0.5 else rng.choice(ALL_NOUNS)
    forms = ("Is {w} in this list: {t}?", "Does this list contain {w}: {t}?", "Is the word {w} in: {t}?")
    prompt, _ = phrase(rng, forms, w=target, t=", ".join(words))
    true = target in words
    answer = f"Yes, {target} is in the list." if true else f"No, {target} is not in the list."
    return ask(prompt, answer, target + ",".join(words), Expect("starts", ("yes" if true else "no",)))
