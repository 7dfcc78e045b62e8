"""LoRA products in torch operations, added to the matrix products of a model.

`AdaptedLinear` wraps a linear layer of any form, quantized ones included. `AdapterStep`, which all layers of a model
share, has the adapter of each row of the current step; a step without adapters costs one comparison in each layer. Rows
with the same adapter are computed together; the rows of a step may have any mixture of adapters.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.adapters.delta import AdapterWeights, Block, Delta, Place, virtual_rows
from antiphon.services.engine.models.decoder import DecoderWeights, LayerWeights
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.layers.mlp import GatedMlp, PlainMlp
from antiphon.services.engine.parallel.linear import Summed

Slots = list[Mapping[Place, Delta]]
"""The adapter in each slot."""


class AdapterStep:
    """The adapter slots of a worker, and the rows of the current step that use each of them."""

    def __init__(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slots: Slots = [{} for _ in range(num_slots)]
        self._dtype, self._device = dtype, device
        self._groups: list[tuple[Mapping[Place, Delta], Tensor]] = []

    def prepare(self, weights: AdapterWeights) -> Mapping[Place, Delta] | Tensor:
        """Returns the adapter's deltas, or its virtual tokens, in the model's data type and on its device."""
        if weights.virtual is not None:
            return virtual_rows(weights.virtual, self._dtype, self._device)
        return {place: self._moved(delta) for place, delta in weights.deltas.items()}

    def fill(self, slot: int, deltas: Mapping[Place, Delta]) -> None:
        """Puts an adapter into a slot. No step in flight may use the former adapter of the slot."""
        self._slots[slot] = deltas

    def begin(self, token_slots: NDArray[np.int64] | None) -> None:
        """Sets the slot of each token of the next step (-1: no adapter); None: no token has an adapter."""
        self._groups = []
        for slot in np.unique(token_slots).tolist() if token_slots is not None else ():
            if slot >= 0:
                rows = torch.from_numpy(np.flatnonzero(token_slots == slot)).to(self._device)
                self._groups.append((self._slots[slot], rows))

    def add(self, place: Place, y: Tensor, x: Tensor) -> Tensor:
        """Adds the products of the step's adapters to y [n, out], for x [n, in]. Returns y, which it changes."""
        for deltas, rows in self._groups:
            delta = deltas.get(place)
            if delta is None:
                continue
            inner = x.index_select(0, rows) @ delta.a.t()
            for block in delta.blocks:
                added = inner[:, block.rank : block.rank_end] @ _part(delta.b, block).t()
                y[:, block.row : block.row_end].index_add_(0, rows, added)
        return y

    def _moved(self, delta: Delta) -> Delta:
        a, b = (each.to(dtype=self._dtype, device=self._device).contiguous() for each in (delta.a, delta.b))
        return replace(delta, a=a, b=b)


class AdaptedLinear:
    """A `Linear` with the adapters of the step."""

    def __init__(self, linear: Linear, place: Place, step: AdapterStep) -> None:
        self._linear, self._place, self._step = linear, place, step

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._step.add(self._place, self._linear(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._step.add(self._place, self._linear.add_to(residual, x), x)


def adapted(weights: DecoderWeights, step: AdapterStep) -> DecoderWeights:
    """Returns the weights with adapters in all layers. Changes the MLPs of the given weights."""
    return replace(weights, layers=tuple(_layer(layer, index, step) for index, layer in enumerate(weights.layers)))


def _layer(layer: LayerWeights, index: int, step: AdapterStep) -> LayerWeights:
    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        mlp.gate_up = _linear(mlp.gate_up, (index, "up"), step)
    elif isinstance(mlp, PlainMlp):
        mlp.up = _linear(mlp.up, (index, "up"), step)
    if isinstance(mlp, GatedMlp | PlainMlp):
        mlp.down = _linear(mlp.down, (index, "down"), step)
    qkv, o = _linear(layer.qkv, (index, "qkv"), step), _linear(layer.o, (index, "o"), step)
    return replace(layer, qkv=qkv, o=o)


def _linear(linear: Linear, place: Place, step: AdapterStep) -> Linear:
    """Returns the layer with adapters. If the layer's results are summed over ranks, so are the LoRA products."""
    if isinstance(linear, Summed):
        return linear.around(lambda part: AdaptedLinear(part, place, step))
    return AdaptedLinear(linear, place, step)


def _part(b: Tensor, block: Block) -> Tensor:
    return b[block.row : block.row_end, block.rank : block.rank_end]
