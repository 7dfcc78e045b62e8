"""Several residual streams, of which a layer computes with the first, and a product beside attention (`Streams`).

    StreamEnds     makes the streams of the embeddings before the first layer, and one stream of them behind the last
    StreamMix      predicts what a layer reads and corrects all streams by what it gives
    StreamedLayer  a layer between both
    SideProduct    the low-rank product beside attention

In plain torch operations on any device; what is computed of few numbers is float32. Created by the weight loader,
called by the decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.models.layers.attention import StepInputs
from antiphon.services.engine.models.layers.ending import InputGate
from antiphon.services.engine.models.layers.linear import Linear
from antiphon.services.engine.models.layers.norm import Norm

_LEAST_SQUARE = 1e-5
"""Least mean square of a stream that is made as long as another one."""


def _mean_square(x: Tensor) -> Tensor:
    return x.to(torch.float32).square().mean(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """For each stream but the first, the matrix [hidden, hidden] that makes it, and the one behind the last layer."""

    ins: tuple[Linear, ...]
    outs: tuple[Linear, ...]

    def split(self, hidden: Tensor) -> Tensor:
        """Embeddings [n, hidden] → streams [n, streams, hidden]."""
        length = _mean_square(hidden).sqrt()
        return torch.stack((hidden, *(_as_long(make(hidden), length) for make in self.ins)), dim=1)

    def join(self, streams: Tensor) -> Tensor:
        """Streams [n, streams, hidden] → hidden [n, hidden]."""
        first, *others = streams.unbind(1)
        length = _mean_square(first).sqrt()
        made = (_as_long(make(one.contiguous()), length) for make, one in zip(self.outs, others, strict=True))
        return torch.stack((first, *made)).mean(0)


def _as_long(x: Tensor, length: Tensor) -> Tensor:
    return (x * (length / _mean_square(x).clamp(min=_LEAST_SQUARE).sqrt())).to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMix:
    """How a layer's input is made of the streams, and the streams of its output.

    `router` [streams, hidden] with the factors of the norm before it, `predict` [streams², streams] and `correct`
    [streams, streams] float32; `scale` [hidden]: the factors on what the gate of the layer's inputs reads.
    """

    layer: int
    router: Tensor
    eps: float
    predict: Tensor
    correct: Tensor
    scale: Tensor
    gate: InputGate

    def predicted(self, streams: Tensor) -> Tensor:
        """Streams [n, streams, hidden] → the same; a layer computes with the first one."""
        count = len(self.correct)
        shares = F.linear(self._routed(streams[:, 0]), self.predict).unflatten(1, (count, count))
        wide = streams.to(torch.float32)
        return (wide + shares @ wide).to(streams.dtype)

    def corrected(self, predicted: Tensor, hidden: Tensor, inputs: Tensor) -> Tensor:
        """What `predicted` gave, the layer's output [n, hidden] and the inputs of all layers → streams."""
        shares = 1.0 + F.linear(self._routed(hidden), self.correct)
        news = (hidden - predicted[:, 0]).to(torch.float32)
        streams = (predicted + shares[:, :, None] * news[:, None]).to(hidden.dtype)
        streams[:, 1:] += self.gate.let_in(streams[:, 0] * self.scale, inputs[:, self.layer])[:, None]
        return streams

    def _routed(self, x: Tensor) -> Tensor:
        return F.linear(rms_norm(x.to(torch.float32), None, self.eps), self.router).tanh()


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A layer that reads and writes streams [n, streams, hidden] in place of hidden states."""

    layer: Callable[[Tensor, Any, StepInputs], Tensor]
    mix: StreamMix

    def __call__(self, streams: Tensor, prepared: Any, step: StepInputs) -> Tensor:
        """Returns the streams after the layer. `prepared`: see `Attention.prepare`."""
        assert step.layer_inputs is not None
        predicted = self.mix.predicted(streams)
        given = self.layer(predicted[:, 0].contiguous(), prepared, step)
        return self.mix.corrected(predicted, given, step.layer_inputs)


@dataclass(frozen=True, slots=True)
class SideProduct:
    """`first` [rank, hidden] and `last` [hidden, rank], with the norm of what they give."""

    first: Linear
    last: Linear
    norm: Norm

    def added_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Hidden states behind attention and what attention read, [n, hidden] each → hidden [n, hidden]."""
        return (hidden + self.norm.add_to(x, self.last(self.first(x)))) * 2.0**-0.5
