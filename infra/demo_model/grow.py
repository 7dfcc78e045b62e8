"""Turns a model directory into a checkpoint of a larger shape that computes the same, for training to continue from.

Of the demo model the layers with positions are taken, which see everything in the larger shape.

To train a large model from scratch needs a GPU. A large model that begins with the knowledge of the demo model needs
only the training that makes use of its new weights, which a CPU can do. Run by hand: ``python -m infra.demo_model.grow
START.pt --shape qwen2-0.5b``, then ``train.py --start START.pt``.

Each number of the residual stream, each neuron and each head has several copies. The copies of a number of the residual
stream are written with the same weights, and read with different weights whose sum is that of the original. The copies
of a neuron or a head divide among them what the original writes. New layers write nothing at first. The idea is that of
Net2Net (Chen and others, 2015, arXiv:1511.05641).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from infra.demo_model.checkpoint import near_part, trained, write_checkpoint
from infra.demo_model.generate import load_model
from infra.demo_model.model import SHAPES, Shape
from infra.demo_model.tokenizer import DEMO

Weights = dict[str, Tensor]


class _Growth:
    """Makes the matrices of a larger shape from those of a smaller one."""

    def __init__(self, small: Shape, large: Shape, seed: int) -> None:
        if (small.head_dim, small.num_key_value_heads) != (large.head_dim, large.num_key_value_heads):
            raise ValueError("only shapes with the same size of a head and as many key/value heads can grow")
        if large.hidden_size < small.hidden_size or large.num_hidden_layers < small.num_hidden_layers:
            raise ValueError("the larger shape must be at least as wide and as deep as the smaller one")
        self.small, self.large = small, large
        self.random = torch.Generator().manual_seed(seed)
        self.copies = large.hidden_size // small.hidden_size
        self.neurons = torch.arange(large.intermediate_size) % small.intermediate_size
        group_before = small.num_attention_heads // small.num_key_value_heads
        group = large.num_attention_heads // large.num_key_value_heads
        heads = torch.arange(large.num_key_value_heads)[:, None] * group_before + torch.arange(group) % group_before
        self.heads = heads.flatten()

    def norm(self, weight: Tensor) -> Tensor:
        """A norm. Its weights are scaled, because not all of the width has copies: the root mean square changes."""
        changed = (self.copies * self.small.hidden_size / self.large.hidden_size) ** 0.5
        return torch.cat((weight.repeat(self.copies) * changed, torch.ones(self._rest())))

    def reading(self, weight: Tensor) -> Tensor:
        """A matrix that reads the residual stream, ``[outputs, width]``."""
        parts = weight[:, None, :].expand(-1, self.copies, -1) / self.copies
        noise = self._normal(parts.shape, float(parts.std()))
        parts = parts + noise - noise.mean(dim=1, keepdim=True)
        rest = self._normal((weight.shape[0], self._rest()), float(parts.std()))
        return torch.cat((parts.flatten(1), rest), dim=1)

    def writing(self, weight: Tensor) -> Tensor:
        """A matrix that writes to the residual stream, ``[width, inputs]``."""
        return torch.cat((weight.repeat(self.copies, 1), torch.zeros(self._rest(), weight.shape[1])))

    def shares(self, originals: Tensor, count: int) -> Tensor:
        """The share of each copy in what its original writes: numbers that add up to 1 for each original."""
        drawn = 0.5 + torch.rand(len(originals), generator=self.random)
        return drawn / torch.zeros(count).index_add(0, originals, drawn)[originals]

    def layer(self, weights: Weights, name: str, *, silent: bool) -> Weights:
        """A layer of the larger shape. `silent`: whether it writes only zeros to the residual stream."""
        size, loud = self.small.head_dim, 0.0 if silent else 1.0
        rows = (self.heads[:, None] * size + torch.arange(size)).flatten()
        of_heads = self.shares(self.heads, self.small.num_attention_heads).repeat_interleave(size)
        of_neurons = self.shares(self.neurons, self.small.intermediate_size)
        old = {part.removeprefix(name): weight for part, weight in weights.items() if part.startswith(name)}
        read, write = self.reading, self.writing
        return {
            "self_attn.q_proj.weight": read(old["self_attn.q_proj.weight"][rows]),
            "self_attn.k_proj.weight": read(old["self_attn.k_proj.weight"]),
            "self_attn.v_proj.weight": read(old["self_attn.v_proj.weight"]),
            "self_attn.o_proj.weight": write(old["self_attn.o_proj.weight"][:, rows] * of_heads * loud),
            "mlp.gate_proj.weight": read(old["mlp.gate_proj.weight"][self.neurons]),
            "mlp.up_proj.weight": read(old["mlp.up_proj.weight"][self.neurons]),
            "mlp.down_proj.weight": write(old["mlp.down_proj.weight"][:, self.neurons] * of_neurons * loud),
            "input_layernorm.weight": self.norm(old["input_layernorm.weight"]),
            "post_attention_layernorm.weight": self.norm(old["post_attention_layernorm.weight"]),
        }

    def _rest(self) -> int:
        return self.large.hidden_size - self.copies * self.small.hidden_size

    def _normal(self, shape: tuple[int, ...] | torch.Size, std: float) -> Tensor:
        return torch.randn(shape, generator=self.random) * std


def grown(weights: Weights, small: Shape, large: Shape, seed: int = 1) -> Weights:
    """Returns the weights of the larger shape, float32. Raises ValueError if it cannot grow from the smaller one."""
    growth = _Growth(small, large, seed)
    weights = {name: weight.float() for name, weight in weights.items()}
    found = {"model.embed_tokens.weight": growth.writing(weights["model.embed_tokens.weight"].T).T}
    before = -1
    for number in range(large.num_hidden_layers):
        original = number * small.num_hidden_layers // large.num_hidden_layers
        layer = growth.layer(weights, f"model.layers.{original}.", silent=original == before)
        found |= {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
        before = original
    # The logits are products with the embedding, whose copies add up.
    last = growth.norm(weights["model.norm.weight"])
    last[: growth.copies * small.hidden_size] /= growth.copies
    found["model.norm.weight"] = last
    return {name: weight.contiguous() for name, weight in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--model", type=Path, default=DEMO, help="directory of a model with the shape of the demo model"
    )
    parser.add_argument(
        "--shape", choices=[name for name in SHAPES if name not in ("demo", "near")], default="qwen2-0.5b"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    weights, small = near_part(load_model(options.model))
    large = replace(SHAPES[options.shape], vocab_size=small.vocab_size)
    write_checkpoint(grown(weights, small, large, options.seed), options.out, *trained(), options.shape)


if __name__ == "__main__":
    main()
