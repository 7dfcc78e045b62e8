"""Turns of coding agents: a question, the call of the tool that reads, its result, the answer, and what follows.

A turn is made of parts. The near layers see only the part that they are in, as they would if there were more than a
window of other text between two parts; the layer that sees far has to join them. Called by ``features.py`` and
``measure.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from infra.demo_model.agents import texts
from infra.demo_model.agents.sources import other_tool, path_argument, section
from infra.demo_model.agents.styles import (
    READERS,
    WEIGHTS,
    Reader,
    as_json,
    environment,
    failure,
    file_text,
    folder,
    path,
    pick,
    reminder,
    result,
)
from infra.demo_model.exercises.tasks import Split, draw_any
from infra.demo_model.sample import Message, assistant, user
from infra.demo_model.tokenizer import END, START, render

#: Shares of turns: an exercise without a call, a file that cannot be read.
EXERCISE_SHARE, FAILURE_SHARE = 0.15, 0.08
#: Shares of questions and of results that are further than a window away from the answer.
FAR_QUESTION_SHARE, FAR_RESULT_SHARE = 0.4, 0.06
CANNOT = "I could not read the file."
#: The end of a prompt's list of tools, as the chat template writes it.
TOOLS_END = render([user("")], tools=[{"type": "function"}]).split('"function"}', 1)[1].split(START)[0]


@dataclass
class Turn:
    """A conversation in parts, without the beginning of its system prompt and its tools."""

    reader: Reader
    folder: str
    split: Split
    parts: list[list[Message]] = field(default_factory=list)
    #: Text before the first message of a part, by the part's number.
    before: dict[int, str] = field(default_factory=dict)
    #: How the last message of a part goes on, by the part's number.
    after: dict[int, str] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Adds a message to the last part."""
        self.parts[-1].append(message)

    def cut(self, before: str) -> None:
        """Begins a new part, after other text that is too long for the near layers."""
        self.before[len(self.parts)] = before
        self.parts.append([])

    def texts(self) -> list[str]:
        """The text of each part."""
        return [self._text(number) for number in range(len(self.parts))]

    def _text(self, number: int) -> str:
        text = render(self.parts[number]) if self.parts[number] else ""
        if number in self.after:
            text = text.removesuffix(f"{END}\n") + self.after[number]
        return self.before.get(number, "") + text


def draw_reader(rng: Random) -> Reader:
    """A tool that reads, as agents have it; the last one is held out."""
    return rng.choices(READERS[:-1], WEIGHTS[:-1])[0]


def prompt_end(rng: Random, reader: Reader) -> str:
    """The last part of the tools, and what follows them in the system prompt."""
    last = as_json(other_tool(rng, path_argument(reader.argument)))
    return last[-rng.randint(40, 160) :] + TOOLS_END


def _exercise(rng: Random, turn: Turn) -> None:
    sample = draw_any(rng)
    while sample.messages[0]["role"] == "system" or len(sample.messages) > 1:
        sample = draw_any(rng)
    turn.add(user(_wrapped(rng, turn, sample.messages[-1]["content"], ())))
    _far(rng, turn, FAR_QUESTION_SHARE / 4)
    turn.add(assistant(sample.answer))


def _wrapped(rng: Random, turn: Turn, question: str, told: Sequence[str]) -> str:
    """A message of the user: the question, with reminders and other sections around it."""
    plain = rng.random() < 0.4
    form = rng.choice(texts.WRAPPERS[:5]) if plain else pick(rng, texts.WRAPPERS, turn.split)
    about = told[0] if told else environment(rng, turn.folder, turn.split)
    return form.replace("{r}", reminder(rng, turn.split)).replace("{e}", about).replace("{q}", question)


def _far(rng: Random, turn: Turn, share: float) -> None:
    """Sometimes puts a long text behind the user's, so that the near layers do not see that.

    It is part of the same message or a message of the system.
    """
    if rng.random() < share:
        text = section(rng)
        if rng.random() < 0.6:
            turn.after[len(turn.parts) - 1] = rng.choice(("\n", "\n\n")) + section(rng)[:100]
        turn.cut(text[-rng.randint(80, 500) :] + END + "\n")


def _answer(text: str) -> str:
    return f"The file says: {text.strip()}"


def _read(rng: Random, turn: Turn, where: str, fails: bool) -> str:
    """The call, its result and the answer, which is returned."""
    turn.add(assistant(turn.reader.call(where, turn.folder)))
    text = file_text(rng)
    shown = where if where.startswith("/") or turn.reader.kind != "joined" else f"{turn.folder}/{where}"
    found = failure(rng, shown, turn.folder, turn.split) if fails else result(rng, shown, text, turn.split)
    if rng.random() < 0.12:
        found += "\n\n" + reminder(rng, turn.split)
    turn.add({"role": "tool", "content": found})
    _far(rng, turn, FAR_RESULT_SHARE)
    answer = CANNOT if fails else _answer(text)
    turn.add(assistant(answer))
    return answer


def _follow_up(rng: Random, turn: Turn, said: str) -> None:
    roll = rng.random()
    if roll < 0.35:
        turn.add(user(_wrapped(rng, turn, pick(rng, texts.AGAIN, turn.split), ())))
        turn.add(assistant(said))
    elif roll < 0.75:
        _exercise(rng, turn)
    else:
        where = path(rng, turn.folder)
        forms = texts.ASKS if rng.random() < 0.6 else texts.ASKS_TWICE
        turn.add(user(_wrapped(rng, turn, pick(rng, forms, turn.split).format(f=where), ())))
        _read(rng, turn, where, fails=False)


def make_turn(rng: Random, split: Split, reader: Reader | None = None) -> Turn:
    """A conversation with an agent's client; all of it but the beginning of the prompt."""
    reader = reader or draw_reader(rng)
    turn = Turn(reader, folder(rng), split)
    told = environment(rng, turn.folder, split)
    in_prompt = rng.random() < 0.5
    if in_prompt:
        turn.cut(f"{section(rng)[-200:]}\n{told}\n{section(rng)[:60]}")
    turn.cut(prompt_end(rng, reader))
    if not in_prompt:
        for _ in range(rng.choice((0, 0, 1))):
            turn.add({"role": "system", "content": section(rng)[:300]})
        if rng.random() < 0.6:
            turn.add(user(told))
            if rng.random() < 0.4:
                turn.add(assistant("Got it. Thanks for the context!"))
            in_prompt = True
    exercised = rng.random() < EXERCISE_SHARE
    if exercised:
        _exercise(rng, turn)
        if rng.random() < 0.5:
            return turn
    where = path(rng, turn.folder)
    question = pick(rng, texts.ASKS, split).format(f=where)
    wrapped = _wrapped(rng, turn, question, (told,))
    # A relative path can be made absolute only if the directory is told.
    if not in_prompt and told not in wrapped:
        wrapped = f"{told}\n\n{wrapped}"
    turn.add(user(wrapped))
    _far(rng, turn, FAR_QUESTION_SHARE)
    said = _read(rng, turn, where, rng.random() < FAILURE_SHARE)
    if rng.random() < 0.6:
        _follow_up(rng, turn, said)
    return turn


@dataclass(frozen=True)
class Encoded:
    """Token ids of a text in parts: the part of each, whether it is learnt, and whether the far layer sees it."""

    ids: list[int]
    owner: list[int]
    learnt: list[bool]
    seen: list[bool]


#: The first tokens of a part that begins in the middle of a text are not seen: they have no context, and look to the
#: layers like the first tokens of a prompt.
HIDDEN = 4


def encode_turn(turn: Turn, encode: Callable[[str], list[int]], learnt: Callable[[list[int]], list[bool]]) -> Encoded:
    """The tokens of a turn; the answers of the assistant are learnt, but for its thanks."""
    ids: list[int] = []
    owner: list[int] = []
    taught: list[bool] = []
    seen: list[bool] = []
    for number, text in enumerate(turn.texts()):
        part = encode(text)
        ids += part
        owner += [number] * len(part)
        taught += learnt(part)
        seen += [place >= HIDDEN for place in range(len(part))]
    return Encoded(ids, owner, taught, seen)
