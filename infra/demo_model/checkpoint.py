"""Converts the shipped model directory into a checkpoint, so that training can continue from it.

The reverse is ``export.py``; ``grow.py`` makes a checkpoint of a larger shape. Run by hand:
``python -m infra.demo_model.checkpoint START.pt``, then ``train.py --start START.pt``. The export rounded the weights
to bfloat16; training compensates for this.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from infra.demo_model.generate import load_model
from infra.demo_model.tokenizer import DEMO

RESULTS = Path(__file__).with_name("results.json")


def write_checkpoint(weights: dict[str, Tensor], out: Path, step: int, tokens: int, shape: str = "demo") -> None:
    """Writes weights of a shape with the number of steps and tokens that they were trained on."""
    state = {"weights": weights, "shape": shape, "step": step, "tokens": tokens, "minutes": 0.0}
    torch.save(state, out)


def trained() -> tuple[int, int]:
    """Returns the number of steps and tokens that the shipped weights were trained on."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["training"]
    return found["steps"], found["token positions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO)
    arguments = parser.parse_args()
    write_checkpoint(load_model(arguments.model).state_dict(), arguments.out, *trained())


if __name__ == "__main__":
    main()
