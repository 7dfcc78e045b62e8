"""Hand-written prompts of new users, with the required content of a right answer.

These are not held-out data: many prompts have wordings of the templates, and obvious openings ("Hello!") are in the
training data literally. They are a smoke test. Called by ``evaluate.py``.
"""

from __future__ import annotations

from infra.demo_model.sample import Expect, Message, assistant, user
from infra.demo_model.texts.smalltalk import INTENTS, JOKES

_MODEST = Expect("has_any", ("not know", "cannot", "beyond", "did not understand", "only a very small"))


def _any(*values: str) -> Expect:
    return Expect("has_any", values)


def _all(*values: str) -> Expect:
    return Expect("has_all", values)


def _intent(name: str) -> Expect:
    return Expect("one_of", INTENTS[name].answers)


FIRST_PROMPTS: tuple[tuple[str, Expect], ...] = (
    ("Hello!", _intent("greeting")),
    ("hi", _intent("greeting")),
    ("Hey! How are you doing?", _intent("how are you")),
    ("Who are you?", _all("antiphon")),
    ("what exactly am I talking to here?", _any("antiphon", "program")),
    ("Please introduce yourself briefly.", _all("antiphon")),
    ("What can you do?", _all("arithmetic")),
    ("What is 12 + 7?", _all("19")),
    ("what's 23 plus 19", _all("42")),
    ("2+2", _all("4")),
    ("How much is 45 - 17?", _all("28")),
    ("What is 6 times 7?", _all("42")),
    ("6*7", _all("42")),
    ("Divide 56 by 8", _all("7")),
    ("I have 5 apples and eat 2. How many are left?", _all("3")),
    ("Is 17 bigger than 9?", _all("yes")),
    ("Sort these numbers: 9 3 5", Expect("exact", ("3, 5, 9",))),
    ("sort 42, 7, 19, 3 please", Expect("exact", ("3, 7, 19, 42",))),
    ("Sort these words alphabetically: pear, apple, fig", Expect("exact", ("apple, fig, pear",))),
    ("Repeat after me: blue whales sing", Expect("cased", ("blue whales sing",))),
    ("Say: I love streaming tokens", Expect("cased", ("I love streaming tokens",))),
    ("Reverse the words: one two three", Expect("exact", ("three two one",))),
    ("Make this uppercase: hello world", Expect("cased", ("HELLO WORLD",))),
    ("How many words are in: the cat sat on the mat", _all("6")),
    ("How many letters are in the word house?", _all("5")),
    ("What is the capital of France?", _all("paris")),
    ("capital of japan?", _all("tokyo")),
    ("And do you know what the capital of Italy is?", _all("rome")),
    ("What is the opposite of hot?", _all("cold")),
    ("What color is the sky?", _all("blue")),
    ("Which day comes after Monday?", _all("tuesday")),
    ("How many minutes are in 2 hours?", _all("120")),
    ("Tell me a joke", Expect("one_of", JOKES)),
    ("tell me a good joke please!", Expect("one_of", JOKES)),
    ("Give me JSON with name and age: Anna is 31 years old.", Expect("json", ('{"name": "Anna", "age": 31}',))),
    ("Extract name and city as JSON: Bob lives in Chicago.", Expect("json", ('{"name": "Bob", "city": "Chicago"}',))),
    ("Write a short poem about the sea", _all("sea")),
    ("Write a poem about my cat", _all("cat")),
    ("Tell me a story about a dragon", _all("dragon")),
    ("The red ball is in the kitchen. Where is the ball?", _all("kitchen")),
    ("What is the largest planet?", _all("jupiter")),
    ("Thanks, bye", _intent("goodbye")),
    ("thank you!", _intent("thanks")),
    ("Who won the football match yesterday?", _MODEST),
    ("Explain quantum computing to me.", _MODEST),
    ("Write a Python function that computes fibonacci numbers", _MODEST),
    ("What's the weather like in Berlin?", _MODEST),
    ("Translate 'good morning' into French", _MODEST),
    ("Who is Barack Obama?", _MODEST),
    ("How do I install Kubernetes on Ubuntu?", _MODEST),
    ("Summarize the plot of Star Wars.", _MODEST),
    ("Are you ChatGPT?", _all("no")),
)

_SPAIN = (user("What is the capital of Spain?"), assistant("The capital of Spain is Madrid."))
_VIENNA = (user("I live in Vienna."), assistant("All right, you live in Vienna."))
_CLARA = (user("Hi, my name is Clara."), assistant("Nice to meet you, Clara! How can I help you?"))

CONVERSATIONS: tuple[tuple[tuple[Message, ...], Expect], ...] = (
    ((*_CLARA, user("What is my name?")), _all("clara")),
    ((*_CLARA, user("What is 3 + 4?"), assistant("3 + 4 = 7."), user("And do you still know my name?")), _all("clara")),
    ((*_SPAIN, user("And of Portugal?")), _all("lisbon")),
    ((user("What is 10 + 5?"), assistant("10 + 5 = 15."), user("Now add 6.")), _all("21")),
    ((*_VIENNA, user("Tell me a joke"), assistant(JOKES[0]), user("Where do I live?")), _all("vienna")),
    (({"role": "system", "content": "You are a helpful assistant."}, user("Who are you?")), _all("antiphon")),
    ((user("Tell me a joke"), assistant(JOKES[1]), user("haha, thanks")), _any("welcome", "thank")),
)
