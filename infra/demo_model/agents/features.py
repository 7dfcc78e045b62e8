"""What the near layers write for the pieces of agents' conversations, computed once and combined anew in each step.

A shard is a file of pieces: sections of prompts, tools, turns and exercises. The shard of a number depends on the seed
alone. Called by ``lengthen.py``, which starts a process that makes shards ahead of the training.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from infra.demo_model.agents import texts
from infra.demo_model.agents.sources import other_tool, path_argument, section
from infra.demo_model.agents.styles import READERS, as_json, pick, reader_tool, reminder
from infra.demo_model.agents.turns import HIDDEN, Encoded, encode_turn, make_turn
from infra.demo_model.batches import Maker
from infra.demo_model.generate import load_model
from infra.demo_model.model import Llama, document_mask, rope_tables, views
from infra.demo_model.tokenizer import DEMO, START, load

#: Token positions that are computed at once.
POSITIONS = 4096
#: Numbers of pieces in a shard. Turns are the pieces that need most variety: of a thousand turns the layer learns the
#: answers by heart.
SECTIONS, STARTS, TOOLS, TOOLS_OF_PATHS, TOOLS_OF_READERS, SHELLS, TURNS, EXERCISES = 4, 2, 6, 1, 1, 1, 160, 40
#: Tokens of a section; an exercise is cut after as many as the window has.
SECTION, LONGEST = 320, 512
#: Neighbours on each side that are compared to find from where a token can be copied, and how many have to be alike.
NEIGHBOURS, ALIKE = 6, 4
TOOLS_BEGIN = "\n\nYou may call functions. Their signatures are in <tools></tools>:\n<tools>\n"
#: The batch of ``Maker.document`` from which on its mixture is that of the end of the training.
_LATE = 10_000


@dataclass
class Piece:
    """States of a text's tokens ``[tokens, width]``, whether each is seen, and the places that have a target.

    ``sources`` says for each place from which tokens its target can be copied, ``[places, tokens]``.
    """

    states: Tensor
    seen: Tensor
    places: Tensor
    targets: Tensor
    sources: Tensor


@dataclass
class Shard:
    """Pieces by kind; turns by the tool that reads."""

    context: dict[str, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    turns: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    exercises: list[Piece] = field(default_factory=list)


@torch.inference_mode()
def near_states(model: Llama, rows: Sequence[Encoded]) -> list[Tensor]:
    """For each row what the layers with positions write ``[tokens, width]``; a layer sees only its part of a row."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place].ids))
    longest = max(len(row.ids) for row in rows)
    cos, sin = rope_tables(model.shape, longest)
    near_layers = model.shape.num_hidden_layers - sum(model.model.far)
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    while order:
        length = len(rows[order[-1]].ids)
        count = max(POSITIONS // length, 1)
        taken, order = order[-count:], order[:-count]
        ids = torch.zeros(len(taken), length, dtype=torch.long)
        owner = torch.full((len(taken), length), -1)
        for row, place in enumerate(taken):
            ids[row, : len(rows[place].ids)] = torch.tensor(rows[place].ids)
            owner[row, : len(rows[place].ids)] = torch.tensor(rows[place].owner)
        near, far = views(model.shape, cos[:length], sin[:length], document_mask(owner, torch.float32))
        states = model.model.states(ids, near, far, near_layers)
        for row, place in enumerate(taken):
            found[place] = states[row, : len(rows[place].ids)].to(torch.bfloat16)
    return found


class ShardMaker:
    """Makes shards of training pieces."""

    def __init__(self, model: Llama, tokenizer: Path = DEMO, seed: int = 1) -> None:
        self.model, self.seed = model, seed
        self.maker = Maker(load(tokenizer), seed)
        self.encode = self.maker.encode
        self.words = bare_words(self.maker.tokenizer)

    def _context(self, text: str, whole: bool = False, limit: int = 900) -> Encoded:
        ids = self.encode(text)[:limit]
        seen = [whole or place >= HIDDEN for place in range(len(ids))]
        return Encoded(ids, [0] * len(ids), [False] * len(ids), seen)

    def _contexts(self, rng: Random) -> list[tuple[str, Encoded]]:
        found: list[tuple[str, Encoded]] = []
        for _ in range(SECTIONS):
            text = "\n\n".join(section(rng) for _ in range(3))
            found.append(("section", self._context(text, limit=SECTION)))
        for _ in range(STARTS):
            opening = f"{START}system\n{pick(rng, texts.OPENINGS, 'train')}\n\n{section(rng)}"
            found.append(("start", self._context(opening, whole=True, limit=SECTION)))
        found += [("section", self._context(reminder(rng, "train"))) for _ in range(STARTS)]
        found += [("tool", self._tool(rng, other_tool(rng, "file_path", *_without_path(rng)))) for _ in range(TOOLS)]
        for argument in sorted({path_argument(reader.argument) for reader in READERS}):
            for _ in range(TOOLS_OF_PATHS):
                name, arguments = rng.choice([pair for pair in texts.OTHER_TOOLS if "@" in pair[1]])
                found.append((f"tool {argument}", self._tool(rng, other_tool(rng, argument, name, arguments))))
        for number, reader in enumerate(READERS[:-1]):
            found += [(f"reader {number}", self._tool(rng, reader_tool(rng, reader))) for _ in range(TOOLS_OF_READERS)]
        shells = [rng.choice(texts.SHELLS) for _ in range(SHELLS)]
        return found + [("shell", self._tool(rng, other_tool(rng, "path", *shell))) for shell in shells]

    def _tool(self, rng: Random, tool: dict[str, object]) -> Encoded:
        before = rng.choice(('"string"}}, "required": []}}}\n', '"additionalProperties": false}}}\n', TOOLS_BEGIN))
        return self._context(before + as_json(tool) + "\n")

    def _exercise(self, rng: Random) -> Encoded:
        document = self.maker.document(rng, rng.random() < 0.1, _LATE)
        ids = document.ids[:LONGEST]
        return Encoded(ids, [0] * len(ids), document.learnt[:LONGEST], [True] * len(ids))

    def make(self, number: int) -> Shard:
        """The shard of a number."""
        rng = Random(f"{self.seed}/shard/{number}")
        contexts = self._contexts(rng)
        turns = [make_turn(rng, "train") for _ in range(TURNS)]
        learnt = self.maker.assistant_part
        rows = [row for _, row in contexts] + [encode_turn(turn, self.encode, learnt) for turn in turns]
        rows += [self._exercise(rng) for _ in range(EXERCISES)]
        pieces = [
            _piece(row, states, self.words) for row, states in zip(rows, near_states(self.model, rows), strict=True)
        ]
        shard = Shard()
        for (kind, _), piece in zip(contexts, pieces, strict=False):
            shard.context[kind].append(piece)
        for turn, piece in zip(turns, pieces[len(contexts) :], strict=False):
            shard.turns[READERS.index(turn.reader)].append(piece)
        shard.exercises = pieces[len(contexts) + len(turns) :]
        return shard


def _without_path(rng: Random) -> tuple[str | None, str]:
    """A known tool without the path of a file, or None for an invented one."""
    if rng.random() < 0.2:
        return None, ""
    return rng.choice([pair for pair in texts.OTHER_TOOLS if "@" not in pair[1]])


def bare_words(tokenizer: Tokenizer) -> np.ndarray:
    """For each token the first token that is the same but for a space before it."""
    first: dict[str, int] = {}
    texts_of = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
    return np.array([first.setdefault(text.lstrip(" ") or text, token) for token, text in enumerate(texts_of)])


def sources_of(ids: Sequence[int], places: Sequence[int], seen: Sequence[bool], words: np.ndarray) -> np.ndarray:
    """Where the token after each place can be copied from: ``[places, tokens]``.

    A source is an earlier token that is the same but for a space, and whose neighbours on both sides are most like
    those of the place.
    """
    token = words[np.array(ids)]
    same = token[:, None] == token[None, :]
    after, before = same.astype(np.int8), np.zeros(same.shape, np.int8)
    for _ in range(NEIGHBOURS):
        after[:-1, :-1] = same[:-1, :-1] * (1 + after[1:, 1:])
        before[1:, 1:] = same[:-1, :-1] * (1 + before[:-1, :-1])
    following = np.array(places) + 1
    score = np.where(same[following], after[following] + before[following], 0)
    score[np.arange(len(ids))[None, :] >= following[:, None]] = 0
    score[:, ~np.array(seen)] = 0
    best = score.max(axis=1, keepdims=True)
    return (score == best) & (best >= ALIKE)


def _piece(row: Encoded, states: Tensor, words: np.ndarray) -> Piece:
    places = [place - 1 for place, learn in enumerate(row.learnt) if learn and place]
    sources = sources_of(row.ids, places, row.seen, words) if places else np.zeros((0, len(row.ids)), np.bool_)
    targets = torch.tensor([row.ids[place + 1] for place in places])
    return Piece(states, torch.tensor(row.seen), torch.tensor(places), targets, torch.from_numpy(sources))


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:04d}.pt"


def make_shards(folder: Path, model: Path, seed: int, stop: int) -> None:
    """Writes the shards up to a number that are not there yet; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    parent = os.getppid()
    maker = ShardMaker(load_model(model), seed=seed)
    for number in range(stop):
        target = shard_path(folder, number)
        if os.getppid() != parent:
            return
        if not target.exists():
            torch.save(maker.make(number), target.with_suffix(".new"))
            target.with_suffix(".new").rename(target)
