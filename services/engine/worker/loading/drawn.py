"""Random weights in place of a checkpoint's (`--load-format dummy`): for measurements, which need only their shapes.

A tensor is drawn on the device when it is read, so that no files are needed and nothing is copied. It has the same
numbers whenever it is drawn on the same kind of device, and those of a bfloat16 file. They are scaled so that the
numbers in the model neither grow nor vanish from layer to layer, so that errors show in the logits.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from antiphon.services.engine.models.layout import Parameter

_OF_VECTORS = 0.1
"""Standard deviation of norms around 1, and of biases and other vectors around 0."""


class DrawnTensors(Mapping[str, Tensor]):
    """The tensors of a layout by their names, bfloat16 on the device; each is drawn again whenever it is asked for."""

    def __init__(self, layout: Iterable[Parameter], device: torch.device) -> None:
        self._device = device
        self._sources = {
            source.name: (source.shape, parameter.transposed) for parameter in layout for source in parameter.sources
        }

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __getitem__(self, name: str) -> Tensor:
        shape, transposed = self._sources[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, device=self._device)
        if len(shape) < 2:
            return noise.mul_(_OF_VECTORS).add_(float("norm" in name)).to(torch.bfloat16)
        # The number of inputs that a row sums up.
        return noise.mul_(shape[-2 if transposed else -1] ** -0.5).to(torch.bfloat16)
