"""Adapters of a model with Triton kernels: the slots of LoRA adapters on the device, and the layers that use them.

A loaded LoRA adapter is kept in host memory, in the layout of a slot; filling a slot copies it to the device. The
vectors of a prompt adapter are on the device as long as it is loaded. Called by the GPU worker.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from antiphon.services.engine.adapters.delta import (
    AdapterWeights,
    Delta,
    LoadedAdapter,
    Place,
    padded_rank,
    part_widths,
    slots_bytes,
    target_sizes,
    virtual_rows,
)
from antiphon.services.engine.backends.triton.kernels.lora import LoraMatrix, LoraStep, LoraTiles
from antiphon.services.engine.backends.triton.operations import AdaptedLinear, TritonMlp
from antiphon.services.engine.core.plan import StepPlan
from antiphon.services.engine.models.decoder import DecoderWeights, LayerWeights
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.parallel.linear import Summed
from antiphon.services.engine.parallel.shard import Shard
from antiphon.services.engine.worker.extras import make_library, serves_adapters
from antiphon.shared.config import EngineSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostDelta:
    """One matrix's delta in the layout of a slot (`triton/lora`), in host memory: `a` and `b` of the model's type."""

    a: Tensor
    b: Tensor


class ServedAdapters:
    """The adapters that an engine serves, of both kinds or none."""

    def __init__(
        self,
        settings: EngineSettings,
        config: Mapping[str, Any],
        description: DecoderDescription,
        like: Tensor,
        shard: Shard,
    ) -> None:
        """`description`: this rank's part of the model; `like`: a tensor of the model's type on its device."""
        self.num_slots = settings.adapters.num_lora_slots
        self._like = like
        self._slots: DeviceAdapters | None = None
        if settings.adapters.enable_lora:
            rank = settings.adapters.max_lora_rank
            self._slots = DeviceAdapters(description, self.num_slots, rank, like)
            size = slots_bytes(description, self.num_slots, rank, like.dtype.itemsize)
            logger.info("adapters: %d slots of rank %d take %.0f MiB on the device", self.num_slots, rank, size / 2**20)
        self.library = make_library(settings, config, self._prepared, shard) if serves_adapters(settings) else None

    def adapted(self, weights: DecoderWeights) -> DecoderWeights:
        """Returns the weights with LoRA adapters in all layers, if the engine serves any."""
        return weights if self._slots is None else self._slots.adapted(weights)

    def fill_slots(self, plan: StepPlan) -> None:
        """Copies a plan's LoRA adapters into their slots."""
        for slot, version in plan.adapters:
            assert self._slots is not None
            self._slots.fill(slot, cast(Mapping[Place, HostDelta], self._found(version).prepared))

    def begin(self, tiles: LoraTiles | None) -> None:
        """Sets the tokens of the next step that have LoRA adapters; None: no token has one."""
        if self._slots is not None:
            self._slots.step.tiles = tiles

    def vectors(self, version: str) -> Tensor:
        """Returns the vectors of a prompt adapter on the device, [virtual tokens, hidden]."""
        return cast(Tensor, self._found(version).prepared)

    def _found(self, version: str) -> LoadedAdapter:
        found = None if self.library is None else self.library.find(version)
        # The new sequence of the plan still references the adapter.
        assert found is not None, f"the adapter {version} is not loaded"
        return found

    def _prepared(self, weights: AdapterWeights) -> Mapping[Place, HostDelta] | Tensor:
        if weights.virtual is not None:
            return virtual_rows(weights.virtual, self._like.dtype, self._like.device)
        assert self._slots is not None, "the library takes no LoRA adapters"
        return self._slots.prepare(weights)


class DeviceAdapters:
    """The adapter slots of a model on its device. `step` says which rows of the current step use which slot."""

    def __init__(self, d: DecoderDescription, num_slots: int, rank: int, like: Tensor) -> None:
        """`d`: this rank's part of the model; `rank`: the largest rank of an adapter.

        `like`: a tensor of the model's type on its device.
        """
        self.step = LoraStep()
        self._widths = part_widths(d)
        self._rank, self._dtype, self._pins = padded_rank(rank), like.dtype, like.device.type == "cuda"
        self._matrices = {
            place: LoraMatrix(num_slots, self._widths[place[1]], columns, rank, like)
            for place, (_, columns) in target_sizes(d).items()
        }

    def prepare(self, weights: AdapterWeights) -> Mapping[Place, HostDelta]:
        """Returns the adapter's deltas in the layout of a slot."""
        return {place: self._laid_out(delta, self._widths[place[1]]) for place, delta in weights.deltas.items()}

    def fill(self, slot: int, deltas: Mapping[Place, HostDelta]) -> None:
        """Copies an adapter into a slot, in stream order: steps launched before still use the former adapter."""
        for place, matrix in self._matrices.items():
            delta = deltas.get(place)
            for kept, given in ((matrix.a, delta and delta.a), (matrix.b, delta and delta.b)):
                if given is None:
                    kept[slot].zero_()
                else:
                    kept[slot].copy_(given, non_blocking=True)

    def adapted(self, weights: DecoderWeights) -> DecoderWeights:
        """Returns the weights with the adapters in all layers."""
        layers = tuple(self._layer(layer, index) for index, layer in enumerate(weights.layers))
        return replace(weights, layers=layers)

    def _layer(self, layer: LayerWeights, index: int) -> LayerWeights:
        mlp = layer.mlp
        if isinstance(mlp, TritonMlp):
            mlp = replace(mlp, up=self._linear(mlp.up, (index, "up")), down=self._linear(mlp.down, (index, "down")))
        layer = replace(layer, mlp=mlp)
        if (index, "qkv") not in self._matrices:
            # A layer with a recurrent state in place of attention.
            return layer
        return replace(layer, qkv=self._linear(layer.qkv, (index, "qkv")), o=self._linear(layer.o, (index, "o")))

    def _linear(self, linear: Linear, place: Place) -> Linear:
        """Returns the layer with adapters. If the layer's results are summed over ranks, so are the LoRA products."""
        if isinstance(linear, Summed):
            return linear.around(lambda part: self._linear(part, place))
        return AdaptedLinear(linear, self._matrices[place], self.step)

    def _laid_out(self, delta: Delta, widths: tuple[int, ...]) -> HostDelta:
        """Returns a delta with the ranks of each part at that part's positions, padded with zeros."""
        a = torch.zeros((len(widths) * self._rank, delta.a.shape[1]), dtype=self._dtype)
        b = torch.zeros((sum(widths), self._rank), dtype=self._dtype)
        start = 0
        for part, width in enumerate(widths):
            # A module has one part of the matrix, or, if it is fused in the checkpoint, several of them.
            for block in delta.blocks:
                if block.row <= start and start + width <= block.row_end:
                    count, ranks = block.rank_end - block.rank, slice(block.rank, block.rank_end)
                    a[part * self._rank : part * self._rank + count] = delta.a[ranks].to(self._dtype)
                    b[start : start + width, :count] = delta.b[start : start + width, ranks].to(self._dtype)
            start += width
        return HostDelta(a.pin_memory(), b.pin_memory()) if self._pins else HostDelta(a, b)
