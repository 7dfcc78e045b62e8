"""LoRA adapters in the form that the C++ library reads in place; see `source/lora.h`.

Created when an adapter is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.services.engine.adapters.delta import TARGETS, AdapterWeights, Block, Delta, Place, virtual_rows
from antiphon.services.engine.backends.cpu.native import Lora, NativeModel
from antiphon.services.engine.models.description import DecoderDescription

PANEL, LANES, TERMS_MULTIPLE = 32, 16, 32
"""Columns of a panel, columns of its half, and the multiple to which rows are padded; as in the C++ source."""
NOTHING = Lora(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class NativeDelta:
    """One matrix's delta: `a` [rank, terms], `b` [ranks of all halves of panels, 16], `ranges` [panels, 2, 3] int32."""

    a: Tensor
    b: Tensor
    ranges: Tensor

    def native(self) -> Lora:
        """Returns the delta in the library's form. This object owns the memory."""
        return Lora(self.a.shape[0], self.a.data_ptr(), self.b.data_ptr(), self.ranges.data_ptr())


class NativeAdapters:
    """The adapter slots of a model in the library."""

    def __init__(self, model: NativeModel, description: DecoderDescription, dtype: torch.dtype, num_slots: int) -> None:
        self._model, self._description, self._dtype = model, description, dtype
        self._slots: list[Mapping[Place, NativeDelta]] = [{} for _ in range(num_slots)]
        """The adapters in the slots, whose memory the library reads."""

    def prepare(self, weights: AdapterWeights) -> Mapping[Place, NativeDelta] | Tensor:
        """Returns the adapter's deltas in the library's form, or its virtual tokens, in the model's type."""
        if weights.virtual is not None:
            return virtual_rows(weights.virtual, self._dtype, torch.device("cpu"))
        gated = self._description.gated_mlp
        return {
            place: _native(delta, self._dtype, gated=gated and place[1] == "up")
            for place, delta in weights.deltas.items()
        }

    def fill(self, slot: int, deltas: Mapping[Place, NativeDelta]) -> None:
        """Puts an adapter into a slot. No step in flight may have tokens with this slot."""
        for layer in range(self._description.num_layers):
            for name in TARGETS:
                delta = deltas.get((layer, name))
                if delta is not None or (layer, name) in self._slots[slot]:
                    self._model.set_lora(slot, layer, name, NOTHING if delta is None else delta.native())
        self._slots[slot] = deltas


def _native(delta: Delta, dtype: torch.dtype, *, gated: bool) -> NativeDelta:
    rank, inner = delta.a.shape
    a = torch.zeros(rank, -(-inner // TERMS_MULTIPLE) * TERMS_MULTIPLE, dtype=dtype)
    a[:, :inner] = delta.a
    columns = _columns(delta.b.shape[0], gated=gated)
    ranges = _ranges(columns, delta.blocks)
    return NativeDelta(a, _used(delta.b.to(dtype), columns, ranges), ranges)


def _used(b: Tensor, columns: Tensor, ranges: Tensor) -> Tensor:
    """Returns the ranks of `b` [out, rank] that halves of panels use, half by half: [ranks of all halves, 16]."""
    rank = b.shape[1]
    padded = torch.cat((b, b.new_zeros(1, rank)))  # Column -1, padding, is the row of zeros.
    halves = padded[columns].view(-1, LANES, rank).transpose(1, 2)
    first, end, _ = ranges.view(-1, 3, 1).unbind(1)
    ranks = torch.arange(rank)
    return halves[(ranks >= first) & (ranks < end)]


def _columns(out: int, *, gated: bool) -> Tensor:
    """Returns the row of the matrix in each column of its panels, -1 for padding; see `Packed::source`."""
    if not gated:
        columns = torch.full((-(-out // PANEL) * PANEL,), -1)
        columns[:out] = torch.arange(out)
        return columns
    half = out // 2
    gates = torch.full((-(-half // PANEL) * PANEL,), -1)
    gates[:half] = torch.arange(half)
    partners = torch.where(gates >= 0, gates + half, gates)
    return torch.stack((gates.view(-1, LANES), partners.view(-1, LANES)), dim=1).flatten()


def _ranges(columns: Tensor, blocks: tuple[Block, ...]) -> Tensor:
    """Returns for each half of a panel the range of ranks that its columns use: first, and last + 1."""
    halves = columns.view(-1, LANES)
    first = torch.full((len(halves),), torch.iinfo(torch.int32).max)
    end = torch.zeros(len(halves), dtype=torch.int64)
    for block in blocks:
        uses = ((halves >= block.row) & (halves < block.row_end)).any(dim=1)
        first[uses] = first[uses].clamp(max=block.rank)
        end[uses] = end[uses].clamp(min=block.rank_end)
    first = torch.minimum(first, end)
    place = (end - first).cumsum(0) - (end - first)
    return torch.stack((first, end, place), dim=1).view(-1, 2, 3).to(torch.int32).contiguous()
