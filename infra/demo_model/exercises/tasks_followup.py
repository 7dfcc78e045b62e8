"""Turns that refer to the previous turn: "And of Spain?", "Now add 5".

For memory over several turns see ``tasks_chat``.  Importing the module
registers its tasks.
"""

from __future__ import annotations

from random import Random

from infra.demo_model.exercises.tasks_facts import capital
from infra.demo_model.exercises.tasks_numbers import add, sort_numbers, subtract
from infra.demo_model.exercises.tasks_words import repeat
from infra.demo_model.sample import Expect, Sample, assistant, loosen, task, user
from infra.demo_model.texts import facts
from infra.demo_model.texts.lists import piped
from infra.demo_model.texts.smalltalk import JOKES
from infra.demo_model.texts.words import ALL_NOUNS, several


def _after(first: Sample, prompt: str, answer: str, key: str, expect: Expect | None = None) -> Sample:
    history = (*first.messages, assistant(first.answer))
    return Sample((*history, user(prompt)), answer, key, expect)


@task("another capital", 1.2)
def another_capital(rng: Random) -> Sample:
    first = capital(rng)
    country, city = rng.choice(list(facts.CAPITALS.items()))
    forms = piped(
        "And of {c}? | And {c}? | What about {c}? | And the capital of {c}? | And for {c}? | How about {c}? | Now {c}"
    )
    prompt = loosen(rng.choice(forms), rng).format(c=country)
    key = first.messages[-1]["content"].lower() + country
    return _after(first, prompt, f"The capital of {country} is {city}.", key, Expect("has_all", (city,)))


@task("go on calculating", 1.2)
def go_on(rng: Random) -> Sample:
    first = add(rng) if rng.random() < 0.6 else subtract(rng)
    value = int(first.answer.rstrip(".").split("= ")[-1])
    n = rng.randint(1, 50)
    if rng.random() < 0.6 or value < n:
        forms = piped(
            "Add {n}. | Now add {n} | Add {n} to that. | Plus {n}? | And plus {n}? | + {n} | "
            "And if I add {n}? | Add {n} more"
        )
        result, sign = value + n, "+"
    else:
        forms = piped(
            "Subtract {n}. | Now subtract {n} | Take away {n} | Minus {n}? | And minus {n}? | - {n} | "
            "Subtract {n} from that."
        )
        result, sign = value - n, "-"
    prompt = loosen(rng.choice(forms), rng).format(n=n)
    return _after(
        first, prompt, f"{value} {sign} {n} = {result}.", f"{value}{sign}{n}", Expect("number", (str(result),))
    )


@task("reverse that", 0.8)
def reverse_that(rng: Random) -> Sample:
    first = sort_numbers(rng)
    forms = piped(
        "Now in reverse order. | Reverse it | And in reverse? | Now the other way round | Reverse that. | Now backwards"
    )
    answer = ", ".join(reversed(first.answer.split(", ")))
    return _after(first, loosen(rng.choice(forms), rng), answer, first.key)


@task("say that again", 1.2)
def again(rng: Random) -> Sample:
    first = rng.choice((add, capital, repeat, sort_numbers))(rng)
    if rng.random() < 0.6:
        forms = piped(
            "Say that again. | Can you repeat that? | Repeat your answer. | What did you say? | Once more | "
            "Repeat that | Again please"
        )
        answer = first.answer
    else:
        forms = piped(
            "What did I say? | What was my last question? | What did I just ask? | Repeat my question. | "
            "What was my question? | What did I ask you? | What was my last message?"
        )  # fmt: skip
        answer = f'You said: "{first.messages[-1]["content"]}"'
    return _after(first, loosen(rng.choice(forms), rng), answer, first.key)


@task("another joke", 0.8)
def another_joke(rng: Random) -> Sample:
    old, new = rng.sample(JOKES, 2)
    first = Sample((user(rng.choice(("Tell me a joke", "Tell me a joke.", "Do you know a joke?"))),), old, "")
    forms = piped(
        "Another one | Another one, please. | One more | Tell me another one | Another joke | "
        "Do you know another one? | More"
    )
    others = tuple(joke for joke in JOKES if joke != old)
    return _after(first, loosen(rng.choice(forms), rng), new, old + new, Expect("one_of", others))


@task("shout that", 0.8)
def shout_that(rng: Random) -> Sample:
    words = " ".join(several(rng, ALL_NOUNS, 1, 3))
    first = Sample((user(f"Say {words}"),), words, "")
    forms = piped(
        "Now in upper case. | In capital letters please | Now in capitals | Make it upper case | "
        "Write that in upper case"
    )
    return _after(first, loosen(rng.choice(forms), rng), words.upper(), words, Expect("cased", (words.upper(),)))
