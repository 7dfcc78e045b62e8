"""Trains the last layer of the demo model, which has no positions and sees everything; the others stay as they are.

Run by hand: ``python -m infra.demo_model.agents.lengthen --near FOLDER --out OUT``, where FOLDER is a model that
``train.py`` and ``export.py`` made, or the demo model, whose near layers are taken; then ``export.py OUT/model.pt``. A
run that was ended goes on from its last checkpoint.

A context is made of pieces whose states a process computes ahead (``features.py``). Some hundred tokens of filler stand
for a prompt of up to 40,000 tokens: the logarithm of how many tokens one of them stands for is added to its scores.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.demo_model.agents.features import Piece, Shard, make_shards, shard_path
from infra.demo_model.agents.sources import path_argument
from infra.demo_model.agents.styles import READERS, WEIGHTS
from infra.demo_model.checkpoint import near_part, trained, write_checkpoint
from infra.demo_model.generate import load_model
from infra.demo_model.model import SHAPES, Layer, Llama
from infra.demo_model.muon import StackedMuon
from infra.demo_model.tokenizer import DEMO
from infra.demo_model.train import pace, set_pace

Value = TypeVar("Value")
#: The numbers of the tools that are trained, of which the last one is not.
KNOWN = range(len(READERS) - 1)
#: The longest prompt that filler stands for.
LONGEST_PROMPT = 40_000
#: Turns and exercises of a step, and the targets that are taken of one of them.
TURNS, EXERCISES, PLACES = 16, 12, 24
#: Tokens of the pieces before turns and before exercises; more are not needed to learn from, and cost time.
CONTEXT, LITTLE_CONTEXT = 1400, 500
#: Targets that the near layers find hard are taken more often; this is the least weight of one.
EASY = 0.15
#: The states are large. The layer is trained on states divided by this, so that what it has to write is not.
SCALE = 8.0
#: Share of exercises without anything before them.
BARE_SHARE = 0.5
#: The weight of the exercises' loss: how far their answers are from those of the near layers.
KEEP = 1.0
#: The weight of looking at what a target can be copied from. Without it the layer takes long to find that out.
LOOK = 0.5
#: The share of the run in which only the attention is trained, so that it learns to copy before the feed-forward block
#: can learn answers by heart.
ATTENTION_SHARE = 0.3
#: Shards before the training starts; steps for each further one; shards that are kept.
FIRST_SHARDS, STEPS_OF_SHARD, KEPT_SHARDS = 6, 80, 40
REPORT_STEPS, SAVE_STEPS = 20, 100


@dataclass(frozen=True)
class Context:
    """Unit states of the tokens before a turn ``[tokens, width]``, and what is added to the scores of each."""

    units: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Group:
    """Pieces with targets, padded.

    ``units`` is ``[rows, tokens, width]``; ``states``, which are not divided by their size, are those at the places,
    ``[rows, places, width]``; targets are -100 where none is; ``sources`` is ``[rows, places, tokens]``.
    """

    units: Tensor
    seen: Tensor
    places: Tensor
    states: Tensor
    targets: Tensor
    sources: Tensor


def unit(states: Tensor, eps: float) -> Tensor:
    """States divided by their root mean square, which is what a norm does before it multiplies with its weight."""
    wide = states.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class Row:
    """A piece for training: unit states, the states at the places that have targets, and the weight of each target.

    The weight is how unlikely the target is to the near layers.
    """

    units: Tensor
    seen: Tensor
    places: Tensor
    states: Tensor
    targets: Tensor
    sources: Tensor
    hard: list[float]


@torch.no_grad()
def row_of(model: Llama, piece: Piece) -> Row:
    """A piece as the training needs it."""
    at = piece.states[piece.places].float()
    likely = model.logits(model.model.norm(at)).softmax(-1).gather(1, piece.targets[:, None]).squeeze(1)
    hard: list[float] = (1.0 - likely).clamp(min=EASY).tolist()
    units = unit(piece.states, model.shape.rms_norm_eps).bfloat16()
    return Row(units, piece.seen, piece.places, at / SCALE, piece.targets, piece.sources, hard)


def alike(rng: Random, rows: list[Row], count: int) -> list[Row]:
    """Rows of similar length, so that little is padded."""
    drawn = sorted(rng.choices(rows, k=4 * count), key=lambda row: len(row.units))
    first = rng.choice((0, 1, 2, 3)) * count
    return drawn[first : first + count]


def _latest(before: list[Value], new: list[Value]) -> list[Value]:
    """All values, or as many of the last ones as ``KEPT_SHARDS`` shards have."""
    return [*before, *new][-KEPT_SHARDS * len(new) :] if new else before


class Pieces:
    """The pieces of all shards so far, from which contexts and batches are drawn."""

    def __init__(self) -> None:
        self.before: dict[str, list[Tensor]] = defaultdict(list)
        self.of_readers: dict[int, list[Row]] = defaultdict(list)
        self.of_exercises: list[Row] = []
        #: The turns of the last shard, by the tool that reads.
        self.newest: dict[int, list[Row]] = {}

    def add(self, shard: Shard, model: Llama) -> None:
        """Adds the pieces of a shard."""
        eps = model.shape.rms_norm_eps
        for kind, pieces in shard.context.items():
            made = [unit(piece.states[piece.seen], eps).bfloat16() for piece in pieces]
            self.before[kind] = _latest(self.before[kind], made)
        self.newest = {reader: [row_of(model, piece) for piece in found] for reader, found in shard.turns.items()}
        for reader, rows in self.newest.items():
            self.of_readers[reader] = _latest(self.of_readers[reader], rows)
        self.of_exercises = _latest(self.of_exercises, [row_of(model, piece) for piece in shard.exercises])

    @torch.no_grad()
    def even_out(self, layer: Layer) -> None:
        """Gives the norms of a new layer weights with which every number of the states has the same size.

        Some numbers are twenty times as large as others, and would hide them.
        """
        units = torch.cat([part for kind in sorted(self.before) for part in self.before[kind]]).float()
        size = units.square().mean(0).sqrt()
        layer.input_layernorm.weight.copy_(1.0 / size)
        layer.post_attention_layernorm.weight.copy_(1.0 / size)

    def turns(self, rng: Random, reader: int) -> Group:
        """Turns in which a tool reads."""
        return self.grouped(rng, alike(rng, self.of_readers[reader], TURNS))

    def exercises(self, rng: Random) -> Group:
        """Exercises of the near layers' training."""
        return self.grouped(rng, alike(rng, self.of_exercises, EXERCISES))

    def grouped(self, rng: Random, rows: Sequence[Row]) -> Group:
        """Rows as one batch, with some targets of each."""
        length = max(len(row.units) for row in rows)
        width = rows[0].units.shape[1]
        units = torch.zeros(len(rows), length, width)
        seen = torch.zeros(len(rows), length, dtype=torch.bool)
        places = torch.zeros(len(rows), PLACES, dtype=torch.long)
        states = torch.ones(len(rows), PLACES, width)
        targets = torch.full((len(rows), PLACES), -100)
        sources = torch.zeros(len(rows), PLACES, length, dtype=torch.bool)
        for number, row in enumerate(rows):
            units[number, : len(row.units)] = row.units
            seen[number, : len(row.units)] = row.seen
            # The place of a target that is padding sees the first token, so that its shares are numbers.
            seen[number, 0] = True
            taken = sorted(set(rng.choices(range(len(row.places)), row.hard, k=PLACES)))
            places[number, : len(taken)] = row.places[taken]
            states[number, : len(taken)] = row.states[taken]
            targets[number, : len(taken)] = row.targets[taken]
            sources[number, : len(taken), : len(row.units)] = row.sources[taken]
        return Group(units, seen, places, states, targets, sources)

    def context(self, rng: Random, reader: int | None) -> Context:
        """A prompt's sections and tools; with a tool that reads if one is named."""
        pools = self.before
        filler = [rng.choice(pools["start"]), *rng.choices(pools["section"], k=rng.choice((1, 2, 3, 4, 5)))]
        tools: list[Tensor] = []
        if reader is not None:
            argument = path_argument(READERS[reader].argument)
            tools.append(rng.choice(pools[f"reader {reader}"]))
            tools += rng.choices(pools[f"tool {argument}"], k=rng.randint(0, 2))
            if READERS[reader].kind in ("path", "joined") and rng.random() < 0.85:
                tools.append(rng.choice(pools["shell"]))
        if reader is not None or rng.random() < 0.5:
            tools += rng.choices(pools["tool"], k=rng.choice((0, 1, 2, 3, 4, 6, 8)))
        # The length that the filler stands for, up to the whole context and more.
        told = math.exp(rng.uniform(math.log(300), math.log(LONGEST_PROMPT)))
        parts, biases, room = [], [], LITTLE_CONTEXT if reader is None else CONTEXT
        for number, piece in enumerate([*tools[:1], *filler[:2], *tools[1:], *filler[2:]]):
            units = piece[:room]
            room -= len(units)
            more = 1.0 if number == 0 else rng.uniform(0.5, 2) * told / CONTEXT
            parts.append(units)
            biases.append(torch.full((len(units),), math.log(max(more, 1.0))))
        return Context(torch.cat(parts).float(), torch.cat(biases))


class FarLayer:
    """The last layer, at the places that have targets."""

    def __init__(self, model: Llama) -> None:
        self.model, self.shape = model, model.shape
        layer = model.model.layers[-1]
        assert isinstance(layer, Layer)
        self.layer = layer
        self.group = self.shape.num_attention_heads // self.shape.num_key_value_heads

    def _keys(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of unit states, ``[…, key heads, head]``; the norm's weight is part of the matrices."""
        block, norm = self.layer.self_attn, self.layer.input_layernorm.weight
        both = F.linear(units, torch.cat((block.k_proj.weight, block.v_proj.weight)) * norm)
        key, value = both.unflatten(-1, (2, self.shape.num_key_value_heads, self.shape.head_dim)).unbind(-3)
        return key, value

    def at(self, group: Group, context: Context | None) -> tuple[Tensor, Tensor]:
        """The layer's output at the places of a group, ``[rows, places, width]``, and the shares of its own tokens.

        The shares are ``[rows, key heads, queries of one, places, tokens]``.
        """
        asking = self.layer.self_attn.q_proj(self.layer.input_layernorm(group.states)) * self.shape.head_dim**-0.5
        query = asking.view(*group.places.shape, self.shape.num_key_value_heads, self.group, self.shape.head_dim)
        key, value = self._keys(group.units)
        scores = torch.einsum("bmkgd,bnkd->bkgmn", query, key)
        visible = group.seen[:, None, :] & (torch.arange(key.shape[1]) <= group.places[..., None])
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        if context is None:
            own = scores.softmax(dim=-1)
            mixed = torch.einsum("bkgmn,bnkd->bmkgd", own, value)
        else:
            far_key, far_value = self._keys(context.units)
            before = torch.einsum("bmkgd,nkd->bkgmn", query, far_key) + context.bias
            shares = torch.cat((before, scores), dim=-1).softmax(dim=-1)
            far, own = shares.split((before.shape[-1], scores.shape[-1]), dim=-1)
            mixed = torch.einsum("bkgmn,bnkd->bmkgd", own, value) + torch.einsum("bkgmn,nkd->bmkgd", far, far_value)
        x = group.states + self.layer.self_attn.o_proj(mixed.flatten(2))
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x)), own

    def loss(self, group: Group, context: Context | None) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the targets, and that of looking at what a target can be copied from.

        The heads of the first key are to look there; those of the others look where they like.
        """
        wanted = group.targets != -100
        output, own = self.at(group, context)
        logits = self.model.logits(self.model.model.norm(output[wanted]))
        looking = (own[:, 0] * group.sources[:, None]).sum(-1)
        copied = group.sources.any(-1)[:, None].expand_as(looking)
        return F.cross_entropy(logits, group.targets[wanted]), -(looking[copied] + 1e-6).log().mean()

    def guesses(self, group: Group, context: Context | None) -> tuple[float, float]:
        """The loss of the targets, and the share of those that the layer finds most likely."""
        wanted = group.targets != -100
        logits = self.model.logits(self.model.model.norm(self.at(group, context)[0][wanted]))
        right = (logits.argmax(-1) == group.targets[wanted]).float().mean()
        return float(F.cross_entropy(logits, group.targets[wanted])), float(right)

    def distance(self, group: Group, context: Context | None) -> Tensor:
        """How far the answers are from those of the near layers alone."""
        wanted = group.targets != -100
        with torch.no_grad():
            before = self.model.logits(self.model.model.norm(group.states[wanted])).log_softmax(-1)
        after = self.model.logits(self.model.model.norm(self.at(group, context)[0][wanted])).log_softmax(-1)
        return F.kl_div(after, before, reduction="batchmean", log_target=True)


def lengthened(near: Llama) -> Llama:
    """A model of the shape ``demo`` that answers as the near one: its last layer writes nothing yet."""
    torch.manual_seed(1)
    weights, shape = near_part(near)
    model = Llama(replace(SHAPES["demo"], vocab_size=shape.vocab_size))
    new = model.model.layers[-1]
    assert isinstance(new, Layer)
    model.load_state_dict({**model.state_dict(), **weights})
    with torch.no_grad():
        new.self_attn.o_proj.weight.zero_()
        new.mlp.down_proj.weight.zero_()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith(f"model.layers.{len(model.model.layers) - 1}."))
    return model


@dataclass(frozen=True)
class Plan:
    """What a training run needs."""

    near: Path
    out: Path
    steps: int
    rate: float
    matrix_rate: float
    seed: int
    threads: int


class Run:
    """One training run."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.step = plan, 0
        self.model = lengthened(load_model(plan.near))
        self.far = FarLayer(self.model)
        weights = list(self.far.layer.parameters())
        matrices = [weight for weight in weights if weight.dim() == 2]
        norms = [weight for weight in weights if weight.dim() < 2]
        muon = StackedMuon(matrices, plan.matrix_rate, weight_decay=0.05, precision=torch.float32)
        self.optimizers: list[torch.optim.Optimizer] = [muon, torch.optim.AdamW(norms, lr=plan.rate, weight_decay=0.0)]
        self.pieces, self.shards = Pieces(), 0
        self.mlp = list(self.far.layer.mlp.parameters())
        self.losses = [0.0, 0.0, 0.0]
        self._fill()
        self.pieces.even_out(self.far.layer)
        self.state = plan.out / "state.pt"
        if self.state.exists():
            state = torch.load(self.state, weights_only=True)
            self.step = state["step"]
            self.far.layer.load_state_dict(state["layer"])
            for optimizer, found in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(found)

    def _fill(self) -> None:
        """Takes the shards that belong to the step, and waits for them if they are not there yet."""
        wanted = FIRST_SHARDS + self.step // STEPS_OF_SHARD
        self.shards = max(self.shards, wanted - KEPT_SHARDS)
        while self.shards < wanted:
            path = shard_path(self.plan.out, self.shards)
            while not path.exists():
                time.sleep(1.0)
            self.pieces.add(torch.load(path, weights_only=False), self.model)
            self.shards += 1
            if self.step and self.shards == wanted:
                loss, right = self._new_turns()
                print(f"step {self.step} turns not seen before {loss:.4f} right {right:.3f}", flush=True)

    @torch.no_grad()
    def _new_turns(self) -> tuple[float, float]:
        """The loss of the targets of the newest shard, and the share of them that are right."""
        rng = Random(self.step)
        found = [
            self.far.guesses(self.pieces.grouped(rng, rows[:TURNS]), self.pieces.context(rng, reader))
            for reader, rows in self.pieces.newest.items()
        ]
        losses, right = zip(*found, strict=True)
        return sum(losses) / len(found), sum(right) / len(found)

    def one_step(self) -> None:
        """Trains on turns of one agent, and on exercises."""
        self._fill()
        for weight in self.mlp:
            weight.requires_grad_(self.step >= ATTENTION_SHARE * self.plan.steps)
        rng = Random(f"{self.plan.seed}/{self.step}")
        set_pace(self.optimizers, pace(self.step / self.plan.steps, self.step, 50))
        reader = rng.choices(KNOWN, WEIGHTS[:-1])[0]
        turns, looking = self.far.loss(self.pieces.turns(rng, reader), self.pieces.context(rng, reader))
        (turns + LOOK * looking).backward()
        before = None if rng.random() < BARE_SHARE else self.pieces.context(rng, None)
        kept = self.far.distance(self.pieces.exercises(rng), before)
        (KEEP * kept).backward()
        nn.utils.clip_grad_norm_(self.far.layer.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found = (turns, kept, looking)
        self.losses = [total + float(loss.detach()) for total, loss in zip(self.losses, found, strict=True)]
        self.step += 1

    def save(self) -> None:
        """Writes the model, and what the run needs to go on."""
        state = {
            "step": self.step,
            "layer": self.far.layer.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.state.with_suffix(".new"))
        self.state.with_suffix(".new").rename(self.state)
        weights = {name: value.to(torch.bfloat16) for name, value in self.model.state_dict().items()}
        last = f"model.layers.{len(self.model.model.layers) - 1}."
        for name in (f"{last}self_attn.o_proj.weight", f"{last}mlp.down_proj.weight"):
            weights[name] = weights[name] * SCALE
        write_checkpoint(weights, self.plan.out / "model.pt", *trained())

    def run(self) -> None:
        """Trains to the end of the plan."""
        began = time.monotonic()
        while self.step < self.plan.steps:
            self.one_step()
            if self.step % REPORT_STEPS == 0:
                turns, kept, looking = (loss / REPORT_STEPS for loss in self.losses)
                seconds = time.monotonic() - began
                line = f"step {self.step} turns {turns:.4f} looking {looking:.4f} kept {kept:.4f}"
                print(f"{line} seconds {seconds:.0f}", flush=True)
                self.losses = [0.0, 0.0, 0.0]
            if self.step % SAVE_STEPS == 0:
                self.save()
        self.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--near", type=Path, default=DEMO, help="directory of a model that has the near layers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--matrix-rate", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    plan = Plan(**vars(parser.parse_args()))
    torch.set_num_threads(plan.threads)
    torch.set_flush_denormal(True)
    plan.out.mkdir(parents=True, exist_ok=True)
    shards = FIRST_SHARDS + plan.steps // STEPS_OF_SHARD
    making = multiprocessing.get_context("spawn").Process(
        target=make_shards, args=(plan.out, plan.near, plan.seed, shards), daemon=True
    )
    making.start()
    try:
        Run(plan).run()
    finally:
        making.terminate()
        making.join()


if __name__ == "__main__":
    main()
