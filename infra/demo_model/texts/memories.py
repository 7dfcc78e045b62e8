"""Statements of users about themselves, and later questions about them, as data.

``tasks.py`` inserts turns between them. Called by ``tasks_chat.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.demo_model.texts.lists import piped


@dataclass(frozen=True)
class Memory:
    """Wordings of a statement, the reply, wordings of the later question, and its answer."""

    tells: tuple[str, ...]
    reply: str
    questions: tuple[str, ...]
    answer: str


TOLD = piped(
    "My name is {v}. | I am {v}. | I'm {v} | Hi, my name is {v}. | Hello, I am {v}. | Call me {v}. | "
    "Hi, I'm {v}! | My name is {v}, nice to meet you. | Please call me {v} | Hello! My name is {v} | "
    "I am called {v} | This is {v} | Hey, {v} here."
)

MEMORIES = {
    "name": Memory(
        TOLD,
        "Nice to meet you, {v}! How can I help you?",
        piped(
            "What is my name? | What's my name? | Do you remember my name? | Who am I? | Do you know my name? | "
            "Say my name. | Can you tell me my name? | What did I say my name was? | How am I called? | "
            "whats my name | Tell me my name"
        ),
        "Your name is {v}.",
    ),
    "age": Memory(
        piped("I am {v} years old. | I'm {v} years old | My age is {v}."),
        "All right, you are {v} years old.",
        piped("How old am I? | What is my age? | Do you remember how old I am? | Tell me my age"),
        "You are {v} years old.",
    ),
    "city": Memory(
        piped("I live in {v}. | I am from {v}. | My home is {v} | I live in {v} now."),
        "All right, you live in {v}.",
        piped(
            "Where do I live? | Which city do I live in? | Where am I from? | Do you remember where I live? | "
            "What is my city?"
        ),
        "You live in {v}.",
    ),
    "colour": Memory(
        piped("My favorite color is {v}. | My favourite colour is {v}. | I like the color {v} best."),
        "All right, you like {v}.",
        piped(
            "What is my favorite color? | What is my favourite colour? | Which color do I like? | "
            "What color do I like best?"
        ),
        "Your favorite color is {v}.",
    ),
    "food": Memory(
        piped("I like {v}. | My favorite food is {v}. | I love {v}"),
        "All right, you like {v}.",
        piped("What do I like? | What is my favorite food? | What food do I like?"),
        "You like {v}.",
    ),
    "job": Memory(
        piped("I am {a} {v}. | I work as {a} {v}. | My job is {v}"),
        "All right, you are {a} {v}.",
        piped("What is my job? | What do I do for a living? | What do I work as?"),
        "You are {a} {v}.",
    ),
    "pet": Memory(
        piped("I have a {v} called {w}. | My {v} is called {w}. | The name of my {v} is {w}."),
        "All right, your {v} is called {w}.",
        piped(
            "What is the name of my {v}? | What is my {v} called? | How is my {v} called? | "
            "Do you remember the name of my {v}?"
        ),
        "Your {v} is called {w}.",
    ),
    "number": Memory(
        piped("Remember the number {v}. | Please remember this number: {v} | The number is {v}. | My number is {v}"),
        "All right, I will remember {v}.",
        piped(
            "What was the number? | Which number did I tell you? | What number should you remember? | "
            "What is the number?"
        ),
        "The number is {v}.",
    ),
    "word": Memory(
        piped(
            "Remember the word {v}. | The secret word is {v}. | Please remember this word: {v} | The password is {v}"
        ),
        "All right, I will remember {v}.",
        piped(
            "What was the word? | What is the secret word? | Which word did I tell you? | "
            "What word did you remember? | What is the password?"
        ),
        "The word is {v}.",
    ),
}
