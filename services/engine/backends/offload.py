"""`--cpu-offload-gb`: layers whose weights are in the host's memory and are copied to the GPU ahead of their turn.

    layer     0   1   2   3   4   5   6   7          of 8 layers, 4 in the host's memory
              .   h   .   h   .   h   .   h
    place         0       1       0       1          two places on the device, which the layers take in turn

While a layer computes, the weights of the next one are copied into the other place, on a stream of their own; after the
last layer those of the first for the next step. The tensors of a layer are views of its place, so the layer computes as
if they had always been there. Small tensors, such as norms, stay on the device. The device has as much more room as the
setting says, and the host's memory as many weights and those of two more layers.

A step waits for its copies where they take longer than the layers between: 1 GiB takes about 20 ms over PCIe 5. On a
CPU all weights are in the host's memory anyway. Used by the Triton worker; tests have the places in the host's memory.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from antiphon.services.engine.models.decoder import Block, DecoderWeights
from antiphon.services.engine.models.layers.attention import StepInputs
from antiphon.services.engine.worker.extras import check_offload
from antiphon.services.engine.worker.loading.tensors import tensors_of
from antiphon.shared.config import EngineSettings

logger = logging.getLogger(__name__)

PLACES = 2
_SMALL_BYTES = 2**16
_ALIGNED = 256
"""Bytes to which each tensor is aligned, as the device's allocator does."""


class Copies(Protocol):
    """Copies weights to the places and keeps copies and layers from overtaking each other."""

    def begin(self, place: int, to: Tensor, source: Tensor) -> None:
        """Begins a copy, which waits for the operations so far: they may read what is in the place."""
        ...

    def wait(self, place: int) -> None:
        """Has the next operations wait for the last copy to a place."""
        ...


class DeviceCopies:
    """`Copies` on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copied = [torch.cuda.Event() for _ in range(PLACES)]

    def begin(self, place: int, to: Tensor, source: Tensor) -> None:
        """See `Copies`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            self._copied[place].record()

    def wait(self, place: int) -> None:
        """See `Copies`."""
        torch.cuda.current_stream().wait_event(self._copied[place])


@dataclass(frozen=True, slots=True)
class _Moved:
    """A layer in the host's memory: its bytes, and its tensors with their places in them."""

    source: Tensor
    tensors: tuple[tuple[Tensor, int], ...]


class Offload:
    """The layers in the host's memory, and the places on the device.

    `nbytes`: by how much the weights on the device become smaller, at most by all but three of the layers: the first
    one stays, with which forms of products are compared (`autotune`).
    """

    def __init__(self, nbytes: int, num_layers: int, device: torch.device, copies: Copies) -> None:
        self._nbytes, self._num_layers, self._device, self._copies = nbytes, num_layers, device, copies
        self._largest = 0
        """Bytes of the largest layer so far."""
        self._moved: list[_Moved] = []
        self._places: list[Tensor] = []
        self._turn: dict[int, int] = {}
        """Number of each layer among those in the host's memory."""

    @property
    def saved_bytes(self) -> int:
        """By how much the weights on the device are smaller."""
        return sum(each.source.nbytes for each in self._moved) - sum(place.nbytes for place in self._places)

    def take(self, layer: int, weights: object) -> None:
        """Moves the weights of a layer to the host's memory, if it is one of those. Called for each layer in order."""
        if layer >= self._num_layers:
            return
        tensors = self._large(weights)
        size = sum(map(_room, tensors))
        self._largest = max(self._largest, size)
        moved, wanted = sum(each.source.nbytes for each in self._moved), self._nbytes + PLACES * self._largest
        # Spread over the layers, so that others compute while weights are copied.
        if size and moved * (self._num_layers - 1) < wanted * layer:
            self._move(layer, tensors, size)

    def finish(self, weights: DecoderWeights) -> DecoderWeights:
        """Begins the copies for the first step, when all layers are loaded. Returns the weights with what brings them.

        Their `nbytes` are those on the device.
        """
        for turn in range(min(PLACES, len(self._moved))):
            self._begin(turn)
        logger.info(
            "--cpu-offload-gb: %d of %d layers are in the host's memory, %.1f GiB; a step copies them",
            len(self._moved),
            self._num_layers,
            sum(each.source.nbytes for each in self._moved) / 2**30,
        )
        return replace(weights, around=self.around, nbytes=weights.nbytes - self.saved_bytes)

    def around(self, layer: int, block: Block) -> Block:
        """Returns the layer's function with the waits and copies that belong to it."""
        turn = self._turn.get(layer)
        return block if turn is None else OffloadedLayer(self, turn, block)

    def arrive(self, turn: int) -> None:
        """Has the layer of a turn wait for its weights."""
        self._copies.wait(turn % PLACES)

    def leave(self, turn: int) -> None:
        """Begins the copy of the next layer that has the place of this one, when this one has computed."""
        following = turn + PLACES
        self._begin(following if following < len(self._moved) else turn % PLACES)

    def _begin(self, turn: int) -> None:
        source = self._moved[turn].source
        self._copies.begin(turn % PLACES, self._places[turn % PLACES][: source.nbytes], source)

    def _large(self, weights: object) -> list[Tensor]:
        found = {tensor.data_ptr(): tensor for _, tensor in tensors_of(weights) if tensor.nbytes >= _SMALL_BYTES}
        return [tensor for tensor in found.values() if tensor.device == self._device and tensor.is_contiguous()]

    def _move(self, layer: int, tensors: list[Tensor], size: int) -> None:
        source = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        starts, start = list[int](), 0
        for tensor in tensors:
            source[start : start + tensor.nbytes].copy_(_bytes(tensor))
            starts.append(start)
            start += _room(tensor)
        turn = len(self._moved)
        self._turn[layer] = turn
        self._moved.append(_Moved(source, tuple(zip(tensors, starts, strict=True))))
        if turn < PLACES:
            self._places.append(torch.zeros(size, dtype=torch.uint8, device=self._device))
        elif self._places[turn % PLACES].nbytes < size:
            self._places[turn % PLACES] = torch.zeros(size, dtype=torch.uint8, device=self._device)
            for each in self._moved[turn % PLACES : turn : PLACES]:
                self._bind(each, turn % PLACES)
        self._bind(self._moved[turn], turn % PLACES)

    def _bind(self, moved: _Moved, place: int) -> None:
        for tensor, start in moved.tensors:
            part = self._places[place][start : start + tensor.nbytes]
            tensor.data = part.view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class OffloadedLayer:
    """A layer whose weights are in the host's memory."""

    offload: Offload
    turn: int
    layer: Block

    def __call__(self, hidden: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        """As the layer."""
        self.offload.arrive(self.turn)
        hidden = self.layer(hidden, prepared, step)
        self.offload.leave(self.turn)
        return hidden


def make_offload(settings: EngineSettings, num_layers: int, device: torch.device) -> Offload | None:
    """Returns what moves weights to the host's memory, as the settings ask; None if they do not, and on a CPU."""
    if device.type == "cpu":
        check_offload(settings, device)
        return None
    nbytes = int(settings.cache.cpu_offload_gb * 2**30)
    return Offload(nbytes, num_layers, device, DeviceCopies(device)) if nbytes else None


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8)
