"""Trains the demo model from scratch on the CPU and writes checkpoints.

Run by hand:
``python -m infra.demo_model.train --minutes 60 --out FOLDER`` or, to repeat a run,
``--steps N``.  ``export.py`` turns a checkpoint into the model directory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.demo_model.batches import IGNORED, Batch, Maker, in_force
from infra.demo_model.model import Llama, Shape
from infra.demo_model.tokenizer import DEMO, load

#: Rows and length of an ordinary batch, by first step: prompts with tools do not fit into 256 tokens.
USUAL = ((0, (16, 256)), (5433, (4, 512)))
#: The same for the occasional long batches.
LONG, LONG_EVERY = ((0, (4, 1024)), (5433, (2, 1024))), 8
WARM_UP, DECAY_FROM = 0.02, 0.45


@dataclass(frozen=True)
class Plan:
    """Duration and learning rates of the training."""

    minutes: float
    steps: int
    rate: float
    matrix_rate: float
    seed: int
    out: Path
    tokenizer: Path = DEMO
    start: Path | None = None
    compile: bool = False
    checkpoint_minutes: float = 4.0
    threads: int = 2


def pace(progress: float) -> float:
    """Factor of the learning rate: warm-up, constant, then a linear decrease to zero."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    if progress < DECAY_FROM:
        return 1.0
    return max(1.0 - (progress - DECAY_FROM) / (1.0 - DECAY_FROM), 0.0)


def optimizers(model: Llama, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers if it has a rate, AdamW for all other parameters."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    if plan.matrix_rate <= 0:
        decayed = {"params": [*matrices, model.model.embed_tokens.weight], "weight_decay": 0.05}
        rest = {"params": [weight for weight in others if weight.dim() < 2], "weight_decay": 0.0}
        return [torch.optim.AdamW([decayed, rest], lr=plan.rate, betas=(0.9, 0.97), fused=True)]
    muon = torch.optim.Muon(matrices, lr=plan.matrix_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=plan.rate, betas=(0.9, 0.97), weight_decay=0.0, fused=True)]


def set_pace(found: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in found:
        for group in optimizer.param_groups:
            group.setdefault("full_rate", group["lr"])
            group["lr"] = group["full_rate"] * factor


def loss_of(model: Llama, batch: Batch) -> Tensor:
    """Mean cross-entropy over the positions that have a target."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(batch.ids, batch.mask)
        # Only the positions with a target are scored: the vocabulary is the widest
        # matrix, and more than half of all positions are prompts.
        logits = model.logits(hidden.reshape(-1, hidden.shape[-1])[batch.places])
    return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED)


class Run:
    """One training run: its model, its clock and its log."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(plan.seed)
        self.plan = plan
        self.maker = Maker(load(plan.tokenizer), plan.seed)
        self.model = Llama(Shape(vocab_size=self.maker.tokenizer.get_vocab_size()))
        self.plain_names = list(self.model.state_dict())
        self.optimizers = optimizers(self.model, plan)
        self.step = self.tokens = 0
        if plan.start:
            self._take_up(plan.start)
        if plan.compile:
            self.model.model = torch.compile(self.model.model, dynamic=False)
        self.first = self.step
        self.start = self.saved = time.monotonic()

    def _take_up(self, checkpoint: Path) -> None:
        """Continues from the weights and step number of a checkpoint; the optimizers start anew."""
        state = torch.load(checkpoint, weights_only=True)
        self.model.load_state_dict(state["weights"])
        self.step, self.tokens = state["step"], state["tokens"]

    def progress(self) -> float:
        """How much of the plan is done, from 0 to 1."""
        if self.plan.steps:
            return (self.step - self.first) / self.plan.steps
        return (time.monotonic() - self.start) / (self.plan.minutes * 60)

    def one_step(self) -> float:
        """Trains on one batch and returns its loss."""
        set_pace(self.optimizers, pace(self.progress()))
        long = self.step % LONG_EVERY == LONG_EVERY - 1
        rows, length = in_force(LONG if long else USUAL, self.step)
        batch = self.maker.batch(self.step, rows, length, long)
        loss = loss_of(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += rows * length
        return float(loss.detach())

    def save(self) -> None:
        """Write a checkpoint under the plain parameter names."""
        values = self.model.state_dict().values()
        weights = {name: value.clone() for name, value in zip(self.plain_names, values, strict=True)}
        state = {
            "weights": weights,
            "step": self.step,
            "tokens": self.tokens,
            "minutes": (time.monotonic() - self.start) / 60,
        }
        torch.save(state, self.plan.out / "partial.pt")
        (self.plan.out / "partial.pt").rename(self.plan.out / "model.pt")
        self.saved = time.monotonic()

    def run(self) -> None:
        """Train to the end of the plan, with a checkpoint every few minutes."""
        recent: list[float] = []
        while self.progress() < 1.0:
            recent.append(self.one_step())
            if self.step % 50 == 0:
                self._report(recent)
                recent = []
            if time.monotonic() - self.saved > self.plan.checkpoint_minutes * 60:
                self.save()
        self.save()

    def _report(self, recent: list[float]) -> None:
        seconds = time.monotonic() - self.start
        loss = sum(recent) / len(recent)
        print(
            f"step {self.step} progress {self.progress():.3f} loss {loss:.4f} seconds {seconds:.0f}",
            flush=True,
        )


def arguments() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="number of steps to make, instead of a time")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--matrix-rate", type=float, default=6e-3, help="rate of Muon; 0 trains all with AdamW")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=DEMO, help="folder of tokenizer.json")
    parser.add_argument("--start", type=Path, help="checkpoint to go on from (checkpoint.py makes one)")
    parser.add_argument("--threads", type=int, default=2, help="1 where other work fills the cores: two would wait")
    parser.add_argument("--compile", action="store_true", help="compile the trunk: a slow start, then faster")
    return Plan(**vars(parser.parse_args()))


def main() -> None:
    torch.set_flush_denormal(True)  # tiny moments and probabilities would slow the CPU down
    plan = arguments()
    torch.set_num_threads(plan.threads)
    plan.out.mkdir(parents=True, exist_ok=True)
    Run(plan).run()


if __name__ == "__main__":
    main()
