"""Converts the shipped model directory into a checkpoint, so that training can continue from it.

The reverse is ``export.py``. Run by hand:
``python -m infra.demo_model.checkpoint START.pt``, then ``train.py --start START.pt``. The export rounded the weights
to bfloat16; training compensates for this.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from infra.demo_model.generate import load_model
from infra.demo_model.tokenizer import DEMO

RESULTS = Path(__file__).with_name("results.json")


def write_checkpoint(folder: Path, out: Path, step: int, tokens: int) -> None:
    """Write the weights of a model directory with the number of steps and tokens that they were trained on."""
    weights = load_model(folder).state_dict()
    state = {"weights": weights, "shape": "demo", "step": step, "tokens": tokens, "minutes": 0.0}
    torch.save(state, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO)
    arguments = parser.parse_args()
    trained = json.loads(RESULTS.read_text(encoding="utf-8"))["training"]
    write_checkpoint(arguments.model, arguments.out, trained["steps"], trained["token positions"])


if __name__ == "__main__":
    main()
