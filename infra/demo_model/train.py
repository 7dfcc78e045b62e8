"""Trains the near layers of the demo model from scratch, on a GPU or a CPU, and writes checkpoints.

Run by hand: ``python -m infra.demo_model.train --device cuda --makers 8 --minutes 4 --out FOLDER`` or, to repeat a
run, ``--steps N``. With ``--shape`` a larger model learns the same. ``export.py`` turns a checkpoint into a model
directory, to which ``agents/lengthen.py`` adds the layer that sees far.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from infra.demo_model import STARTED
from infra.demo_model.batches import IGNORED, Batch
from infra.demo_model.makers import Batches
from infra.demo_model.model import SHAPES, Llama, document_mask
from infra.demo_model.muon import StackedMuon
from infra.demo_model.tokenizer import DEMO, load

#: The learning rate falls from this share of the run on.
DECAY_FROM = 0.25
REPORT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Duration and learning rates of the training."""

    minutes: float
    steps: int
    rate: float
    matrix_rate: float
    seed: int
    out: Path
    device: str = "cpu"
    positions: int = 4096
    makers: int = 0
    tokenizer: Path = DEMO
    shape: str = "near"
    start: Path | None = None
    compile: bool = False
    checkpoint_minutes: float = 1.0
    threads: int = 2
    float32: bool = False
    warm_up: int = 200

    @property
    def precision(self) -> torch.dtype:
        """The type of activations and of Muon's iteration; weights are float32."""
        return torch.float32 if self.float32 else torch.bfloat16


def pace(progress: float, steps: int, warm_up: int = 200) -> float:
    """Factor of the learning rate: warm-up, constant, then a linear decrease to zero."""
    if steps < warm_up:
        return (steps + 1) / warm_up
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
    muon = StackedMuon(matrices, plan.matrix_rate, weight_decay=0.05, precision=plan.precision)
    return [muon, torch.optim.AdamW(others, lr=plan.rate, betas=(0.9, 0.97), weight_decay=0.0, fused=True)]


def set_pace(found: Iterable[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in found:
        for group in optimizer.param_groups:
            group.setdefault("full_rate", group["lr"])
            group["lr"] = group["full_rate"] * factor


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A batch's array as a tensor of the device; the copy to a GPU does not wait for the GPU."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def loss_of(model: Llama, batch: Batch, device: torch.device, precision: torch.dtype) -> Tensor:
    """Mean cross-entropy over the positions that have a target."""
    ids, owner, places, targets = (
        on_device(part, device).long() for part in (batch.ids, batch.owner, batch.places, batch.targets)
    )
    # On a GPU this kernel is the fused one that takes a mask.
    fused = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if device.type == "cuda" else nullcontext()
    with torch.autocast(device.type, precision, enabled=precision != torch.float32), fused:
        hidden = model.hidden(ids, document_mask(owner, precision))
        # Only the positions with a target are scored: the vocabulary is the widest
        # matrix, and more than half of all positions are prompts.
        logits = model.logits(hidden.flatten(0, 1).index_select(0, places))
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED)


class Run:
    """One training run: its model, its clock and its log."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step = self.tokens = 0
        state = torch.load(plan.start, weights_only=True) if plan.start else None
        if state:
            self.step, self.tokens = state["step"], state["tokens"]
        self.first = self.step
        # The processes are forked before anything touches the GPU.
        self.batches = Batches(plan.tokenizer, plan.seed, plan.positions, self.step, plan.makers)
        torch.manual_seed(plan.seed)
        self.device = torch.device(plan.device)
        self.model = Llama(replace(SHAPES[plan.shape], vocab_size=load(plan.tokenizer).get_vocab_size()))
        if state:  # the optimizers start anew
            self.model.load_state_dict(state["weights"])
        self.model.to(self.device)
        self.plain_names = list(self.model.state_dict())
        self.optimizers = optimizers(self.model, plan)
        if plan.compile:
            self.model.model = torch.compile(self.model.model, dynamic=False)
        self.loss_sum = torch.zeros((), device=self.device)
        self.saved = time.monotonic()
        self.reported = (self.saved, self.step, self.tokens, 0.0)

    def progress(self) -> float:
        """How much of the plan is done, from 0 to 1; the start-up counts as part of the minutes."""
        if self.plan.steps:
            return (self.step - self.first) / self.plan.steps
        return (time.monotonic() - STARTED) / (self.plan.minutes * 60)

    def one_step(self) -> None:
        """Trains on one batch."""
        batch = self.batches.next()
        set_pace(self.optimizers, pace(self.progress(), self.step - self.first, self.plan.warm_up))
        loss = loss_of(self.model, batch, self.device, self.plan.precision)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # Reading the loss would wait for the GPU, so only reports do.
        self.loss_sum += loss.detach()
        self.step += 1
        self.tokens += batch.ids.size

    def save(self) -> None:
        """Write a checkpoint under the plain parameter names, in the precision of the shipped weights."""
        values = self.model.state_dict().values()
        weights = {
            name: value.to("cpu", torch.bfloat16, copy=True)
            for name, value in zip(self.plain_names, values, strict=True)
        }
        state = {
            "weights": weights,
            "shape": self.plan.shape,
            "step": self.step,
            "tokens": self.tokens,
            "minutes": (time.monotonic() - STARTED) / 60,
        }
        torch.save(state, self.plan.out / "partial.pt")
        (self.plan.out / "partial.pt").rename(self.plan.out / "model.pt")
        self.saved = time.monotonic()

    def run(self) -> None:
        """Train to the end of the plan, with a checkpoint every minute."""
        with self.batches:
            while self.progress() < 1.0:
                self.one_step()
                if time.monotonic() - self.reported[0] > REPORT_SECONDS:
                    self._report()
                if time.monotonic() - self.saved > self.plan.checkpoint_minutes * 60:
                    self.save()
            self.save()
        if self.step > self.reported[1]:
            self._report()

    def _report(self) -> None:
        before, step, tokens, waited = self.reported
        loss = float(self.loss_sum) / (self.step - step)
        now = time.monotonic()
        line = (
            f"step {self.step} progress {self.progress():.3f} loss {loss:.4f} seconds {now - STARTED:.0f} "
            f"positions/s {(self.tokens - tokens) / (now - before):.0f} "
            f"waiting for batches {(self.batches.waited - waited) / (now - before):.0%}"
        )
        print(line, flush=True)
        with (self.plan.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        self.loss_sum.zero_()
        self.reported = (now, self.step, self.tokens, self.batches.waited)


def arguments() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="duration, start-up included")
    parser.add_argument("--steps", type=int, default=0, help="number of steps to make, instead of a time")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--positions", type=int, default=0, help="token positions of a step; by default 4096, cuda 32768"
    )
    parser.add_argument("--makers", type=int, default=0, help="processes that make batches; 0 makes them here")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--matrix-rate", type=float, default=4e-3, help="rate of Muon; 0 trains all with AdamW")
    parser.add_argument("--warm-up", type=int, default=200, help="steps until the rates are whole")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=DEMO, help="folder of tokenizer.json")
    parser.add_argument(
        "--shape", choices=[name for name in SHAPES if name != "demo"], default="near", help="sizes of the network"
    )
    parser.add_argument("--start", type=Path, help="checkpoint to go on from (checkpoint.py and grow.py make one)")
    parser.add_argument("--threads", type=int, default=2, help="1 where other work fills the cores: two would wait")
    parser.add_argument("--compile", action="store_true", help="compile the trunk: a slow start, then faster")
    parser.add_argument("--float32", action="store_true", help="for CPUs without bfloat16 instructions")
    found = vars(parser.parse_args())
    found["positions"] = found["positions"] or (4096 if found["device"] == "cpu" else 32768)
    return Plan(**found)


def main() -> None:
    torch.set_flush_denormal(True)  # tiny moments and probabilities would slow the CPU down
    plan = arguments()
    torch.set_num_threads(plan.threads)
    plan.out.mkdir(parents=True, exist_ok=True)
    Run(plan).run()


if __name__ == "__main__":
    main()
