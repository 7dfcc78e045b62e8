"""Turns conversations and plain text into packed training rows.

There is no dataset on disk: every batch is generated from the seed and the step number, so a run can be repeated.
Called by ``train.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from infra.demo_model.exercises.tasks import conversation, long_conversation, practice
from infra.demo_model.exercises.tasks_tools import tool_conversation
from infra.demo_model.sample import assistant, user
from infra.demo_model.texts.corpus import long_text, plain_text
from infra.demo_model.tokenizer import END, END_OF_TEXT, START, render

#: Share of documents that are plain text; they are longer than chats on average.
PLAIN_SHARE = 0.04
#: Share of documents that are copying practice, by first step. Without this
#: practice the model learns late to copy from the prompt; the shipped weights were
#: trained without it until step 433.
COPY_SHARES = ((0, 0.0), (433, 0.25), (1000, 0.08))
#: Share of chats that are practice of the core tasks, by first step.
PRACTICE_SHARES = ((0, 0.0), (2011, 0.6))
#: Share of documents with tools, by first step.  They are five times as long as the others, so most positions are in
#: them, though not most of the trained ones.
TOOL_SHARES = ((0, 0.0), (5433, 0.3))
#: Share of these documents that ask for each offered tool, by first step; this trains more of the document.
SEVERAL_SHARES = ((0, 0.0), (5433, 0.4))
#: The number of scored positions is padded to a multiple of this with ignored ones.
ROUND_TO, IGNORED = 256, -100

Value = TypeVar("Value")


@dataclass(frozen=True)
class Document:
    """Token ids, and for each whether the model is trained to predict it."""

    ids: list[int]
    learnt: list[bool]


@dataclass(frozen=True)
class Batch:
    """Packed rows: inputs, the attention mask, and the positions that have a target."""

    ids: Tensor
    mask: Tensor
    places: Tensor
    targets: Tensor


def in_force(table: Sequence[tuple[int, Value]], step: int) -> Value:
    """Returns the value of the last entry that begins at or before a step."""
    return [value for start, value in table if start <= step][-1]


class Maker:
    """Makes documents and packs them."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.header = tokenizer.encode(f"{START}assistant\n").ids
        self.end = tokenizer.token_to_id(END)
        self.end_of_text = tokenizer.token_to_id(END_OF_TEXT)
        pieces = (tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()))
        self.words = [piece for piece in pieces if re.fullmatch(r" [A-Za-z]+", piece)]

    def chat(self, rng: Random, long: bool = False, practised: float = 0.0) -> Document:
        """A conversation; only the assistant's messages and their end tokens are trained."""
        make = long_conversation if long else practice if rng.random() < practised else conversation
        messages = make(rng)
        ids = self.tokenizer.encode(render(messages)).ids
        return Document(ids, self._assistant_part(ids))

    def _assistant_part(self, ids: list[int]) -> list[bool]:
        learnt = [False] * len(ids)
        width = len(self.header)
        inside = False
        for place in range(len(ids)):
            if inside:
                learnt[place] = True
                inside = ids[place] != self.end
            elif ids[max(0, place - width + 1) : place + 1] == self.header:
                inside = True
        return learnt

    def plain(self, rng: Random, long: bool = False) -> Document:
        """A text with the end-of-text token; all its tokens are trained."""
        ids = self.tokenizer.encode(long_text(rng) if long else plain_text(rng)).ids
        return Document([*ids, self.end_of_text], [True] * (len(ids) + 1))

    def copying(self, rng: Random) -> Document:
        """A random token sequence that occurs twice, or a chat that asks for the repetition of random words."""
        count = rng.randint(4, 40)
        if rng.random() < 0.5:
            once = [rng.randrange(3, self.tokenizer.get_vocab_size()) for _ in range(count)]
            return Document(once * 2, [False] * (count + 1) + [True] * (count - 1))
        text = "".join(rng.choice(self.words) for _ in range(count)).strip()
        request = rng.choice(("Repeat after me: {}", "Repeat: {}", "Say: {}", "{}\nRepeat this.")).format(text)
        ids = self.tokenizer.encode(render([user(request), assistant(text)])).ids
        return Document(ids, self._assistant_part(ids))

    def tooled(self, rng: Random, several: float = 0.0) -> Document:
        """A conversation with tools; calls and answers are trained.

        If the prompt does not list the tools, only the last answer is trained: the model must not call unlisted tools.
        """
        messages, tools = tool_conversation(rng, several)
        ids = self.tokenizer.encode(render(messages, tools=tools)).ids
        learnt = self._assistant_part(ids)
        if not tools:
            end = len(ids) - learnt[::-1].index(True)
            start = end - learnt[:end][::-1].index(False)
            learnt = [learn and place >= start for place, learn in enumerate(learnt)]
        return Document(ids, learnt)

    def document(self, rng: Random, long: bool, step: int) -> Document:
        """A chat, with tools or without, or, less often, a text or copying practice."""
        with_tools = in_force(TOOL_SHARES, step)
        if with_tools and rng.random() < with_tools:
            return self.tooled(rng, in_force(SEVERAL_SHARES, step))
        if rng.random() < in_force(COPY_SHARES, step):
            return self.copying(rng)
        share = 0.15 if long else PLAIN_SHARE
        return self.plain(rng, long) if rng.random() < share else self.chat(rng, long, in_force(PRACTICE_SHARES, step))

    def batch(self, step: int, rows: int, length: int, long: bool = False) -> Batch:
        """The batch of one step: each document is put into any row with enough space."""
        rng = Random(f"{self.seed}/{step}")
        packed: list[list[Document]] = [[] for _ in range(rows)]
        room = [length] * rows
        misses = 0
        # A few documents may not fit before the batch is closed, so that short ones fill the last gaps.
        while misses < 6:
            document = self.document(rng, long, step)
            size = min(len(document.ids), length)
            place = next((row for row in range(rows) if room[row] >= size), None)
            if place is None:
                misses += 1
                continue
            packed[place].append(document)
            room[place] -= size
        return self._tensors(packed, length)

    def _tensors(self, packed: list[list[Document]], length: int) -> Batch:
        ids = torch.full((len(packed), length), self.end_of_text)
        owner = torch.full((len(packed), length), -1)
        target = torch.full((len(packed), length), -1)
        for row, documents in enumerate(packed):
            start = 0
            for number, document in enumerate(documents):
                tokens = document.ids[:length]
                stop = start + len(tokens)
                ids[row, start:stop] = torch.tensor(tokens)
                owner[row, start:stop] = number
                wanted = [token if learn else -1 for token, learn in zip(tokens, document.learnt, strict=False)]
                target[row, start : stop - 1] = torch.tensor(wanted[1:])
                start = stop
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (owner[:, :, None] == owner[:, None, :]) & causal
        flat = target.reshape(-1)
        places = (flat >= 0).nonzero().squeeze(1)
        # Few distinct sizes: for each new one the CPU's matrix library prepares (and
        # keeps) a kernel, which costs time and memory.
        spare = -len(places) % ROUND_TO
        targets = torch.cat((flat[places], torch.full((spare,), IGNORED)))
        return Batch(ids, mask[:, None], F.pad(places, (0, spare)), targets)
