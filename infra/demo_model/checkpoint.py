"""Converts the near layers of the shipped model into a checkpoint, so that training can continue from it.

The reverse is ``export.py``; ``grow.py`` makes a checkpoint of a larger shape. The last layer, which sees far, is not
in it: ``agents/lengthen.py`` trains it when the other layers are done. Run by hand:
``python -m infra.demo_model.checkpoint START.pt``, then ``train.py --start START.pt``. The export rounded the weights
to bfloat16; training compensates for this.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from infra.demo_model.generate import load_model
from infra.demo_model.model import SHAPES, Llama, Shape
from infra.demo_model.tokenizer import DEMO

RESULTS = Path(__file__).with_name("results.json")


def write_checkpoint(weights: dict[str, Tensor], out: Path, step: int, tokens: int, shape: str = "demo") -> None:
    """Writes weights of a shape with the number of steps and tokens that they were trained on."""
    state = {"weights": weights, "shape": shape, "step": step, "tokens": tokens, "minutes": 0.0}
    torch.save(state, out)


def near_part(model: Llama) -> tuple[dict[str, Tensor], Shape]:
    """The weights without the layers that see far, and the shape of what is left."""
    kept = [number for number, far in enumerate(model.model.far) if not far]
    if kept != list(range(len(kept))):
        raise ValueError("only the last layers may see far")
    weights = {
        name: weight
        for name, weight in model.state_dict().items()
        if not name.startswith(tuple(f"model.layers.{number}." for number, far in enumerate(model.model.far) if far))
    }
    near = SHAPES["near"]
    return weights, replace(
        model.shape,
        num_hidden_layers=len(kept),
        max_position_embeddings=near.max_position_embeddings,
        sliding_window=None,
        no_rope_layers=(),
    )


def trained() -> tuple[int, int]:
    """Returns the number of steps and tokens that the shipped near layers were trained on."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["training"]
    return found["steps"], found["token positions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=DEMO)
    arguments = parser.parse_args()
    weights, _ = near_part(load_model(arguments.model))
    write_checkpoint(weights, arguments.out, *trained(), "near")


if __name__ == "__main__":
    main()
