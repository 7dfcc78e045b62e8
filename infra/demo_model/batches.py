"""Turns conversations and plain text into packed training rows.

There is no dataset on disk: every batch is generated from the seed and its number, so a run can be repeated.
Imports no torch. Called by ``makers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from infra.demo_model.encoding import Encoder
from infra.demo_model.exercises.tasks import conversation, long_conversation, practice
from infra.demo_model.exercises.tasks_tools import tool_conversation
from infra.demo_model.sample import assistant, user
from infra.demo_model.texts.corpus import long_text, plain_text
from infra.demo_model.tokenizer import END, END_OF_TEXT, START, render

#: Length of a row, and of the rows of every ``LONG_EVERY``-th batch, which train the later positions.
LENGTH, LONG_LENGTH, LONG_EVERY = 512, 1024, 8
#: Share of documents with tools. They are five times as long as other documents, so they have more than half of all
#: positions, but fewer than half of the trained positions.
TOOL_SHARE = 0.2
#: Share of the documents with tools that have a question for each offered tool: more of such a document is trained.
SEVERAL_SHARE = 0.4
#: Share of copying practice among the documents without tools: (number of a batch, share from that batch on). Without
#: this practice the model learns late to copy from the prompt.
COPY_SHARES = ((0, 0.25), (1500, 0.08))
#: Share of plain text among the remaining documents, in ordinary and in long rows. On average texts are longer than
#: chats.
PLAIN_SHARE, LONG_PLAIN_SHARE = 0.04, 0.15
#: Share of chats that are practice of the core tasks.
PRACTICE_SHARE = 0.5
#: The number of scored positions is padded to a multiple of this with ignored ones.
ROUND_TO, IGNORED = 256, -100
#: A batch is closed after this many documents that fit into no row; until then short ones fill the last gaps.
MISSES = 6

Value = TypeVar("Value")
Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Document:
    """Token ids, and for each whether the model is trained to predict it."""

    ids: list[int]
    learnt: list[bool]


@dataclass(frozen=True)
class Batch:
    """Packed rows: inputs, the document that owns each position, and the positions that have a target.

    ``ids`` and ``owner`` are ``[rows, length]``; ``places`` indexes the flat positions, and ``targets`` are their
    token ids or ``IGNORED``. All are int32.
    """

    ids: Numbers
    owner: Numbers
    places: Numbers
    targets: Numbers


def in_force(table: Sequence[tuple[int, Value]], number: int) -> Value:
    """Returns the value of the last entry that begins at or before the number of a batch."""
    return [value for start, value in table if start <= number][-1]


class Maker:
    """Makes documents and packs them."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.encode = Encoder(tokenizer).encode
        self.header = tokenizer.encode(f"{START}assistant\n").ids
        self.end = tokenizer.token_to_id(END)
        self.end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        pieces = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
        self.words = [piece for piece in pieces if re.fullmatch(r" [A-Za-z]+", piece)]

    def chat(self, rng: Random, long: bool = False) -> Document:
        """A conversation; only the assistant's messages and their end tokens are trained."""
        make = long_conversation if long else practice if rng.random() < PRACTICE_SHARE else conversation
        ids = self.encode(render(make(rng)))
        return Document(ids, self.assistant_part(ids))

    def assistant_part(self, ids: list[int]) -> list[bool]:
        """Which tokens of a conversation the assistant says."""
        learnt = [False] * len(ids)
        width, place = len(self.header), 0
        for _ in range(ids.count(self.header[0])):
            place = ids.index(self.header[0], place) + 1
            if ids[place - 1 : place - 1 + width] == self.header:
                first = place - 1 + width
                stop = ids.index(self.end, first) + 1
                learnt[first:stop] = [True] * (stop - first)
        return learnt

    def plain(self, rng: Random, long: bool = False) -> Document:
        """A text with the end-of-text token; all its tokens are trained."""
        ids = self.encode(long_text(rng) if long else plain_text(rng))
        return Document([*ids, self.end_of_text], [True] * (len(ids) + 1))

    def copying(self, rng: Random) -> Document:
        """A random token sequence that occurs twice, or a chat that asks for the repetition of random words."""
        count = rng.randint(4, 40)
        if rng.random() < 0.5:
            once = [rng.randrange(3, self.tokenizer.get_vocab_size()) for _ in range(count)]
            return Document(once * 2, [False] * (count + 1) + [True] * (count - 1))
        text = "".join(rng.choice(self.words) for _ in range(count)).strip()
        request = rng.choice(("Repeat after me: {}", "Repeat: {}", "Say: {}", "{}\nRepeat this.")).format(text)
        ids = self.encode(render([user(request), assistant(text)]))
        return Document(ids, self.assistant_part(ids))

    def tooled(self, rng: Random, several: float = 0.0) -> Document:
        """A conversation with tools; calls and answers are trained.

        If the prompt does not list the tools, only the last answer is trained: the model must not call unlisted tools.
        """
        messages, tools = tool_conversation(rng, several)
        ids = self.encode(render(messages, tools=tools))
        learnt = self.assistant_part(ids)
        if not tools:
            end = len(ids) - learnt[::-1].index(True)
            start = end - learnt[:end][::-1].index(False)
            learnt = [learn and place >= start for place, learn in enumerate(learnt)]
        return Document(ids, learnt)

    def document(self, rng: Random, long: bool, number: int) -> Document:
        """A chat, with tools or without, or, less often, a text or copying practice."""
        if rng.random() < TOOL_SHARE:
            return self.tooled(rng, SEVERAL_SHARE)
        if rng.random() < in_force(COPY_SHARES, number):
            return self.copying(rng)
        if rng.random() < (LONG_PLAIN_SHARE if long else PLAIN_SHARE):
            return self.plain(rng, long)
        return self.chat(rng, long)

    def batch(self, number: int, positions: int) -> Batch:
        """The batch of one number, of about ``positions``: each document is put into any row with enough space."""
        long = number % LONG_EVERY == LONG_EVERY - 1
        length = LONG_LENGTH if long else LENGTH
        rows = max(positions // length, 1)
        rng = Random(f"{self.seed}/{number}")
        packed: list[list[Document]] = [[] for _ in range(rows)]
        room = [length] * rows
        misses = 0
        while misses < MISSES:
            document = self.document(rng, long, number)
            size = min(len(document.ids), length)
            place = next((row for row, space in enumerate(room) if space >= size), None)
            if place is None:
                misses += 1
                continue
            packed[place].append(document)
            room[place] -= size
        return self._arrays(packed, length)

    def _arrays(self, packed: list[list[Document]], length: int) -> Batch:
        shape = (len(packed), length)
        ids = np.full(shape, self.end_of_text, np.int32)
        owner = np.full(shape, -1, np.int32)
        learnt = np.zeros(shape, np.bool_)
        for row, documents in enumerate(packed):
            start = 0
            for number, document in enumerate(documents):
                tokens = document.ids[:length]
                stop = start + len(tokens)
                ids[row, start:stop] = tokens
                owner[row, start:stop] = number
                # The first token of a document has no position before it that could predict it.
                learnt[row, start + 1 : stop] = document.learnt[1:length]
                start = stop
        places = np.flatnonzero(learnt) - 1
        # Few distinct sizes: for each new one the CPU's matrix library prepares (and
        # keeps) a kernel, which costs time and memory.
        spare = -len(places) % ROUND_TO
        targets = np.pad(ids.reshape(-1)[places + 1], (0, spare), constant_values=IGNORED)
        return Batch(ids, owner, np.pad(places, (0, spare)).astype(np.int32), targets)
