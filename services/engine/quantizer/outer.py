"""The parts of a model outside of its layers: embedding, inputs of layers, last norm, output head. Called by `run`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.models.decoder import Decoder, DecoderWeights
from antiphon.services.engine.models.layers.ending import LayerInputWeights
from antiphon.services.engine.models.layers.linear import DenseLinear
from antiphon.services.engine.models.layers.norm import make_norm
from antiphon.services.engine.models.operations import TORCH_OPERATIONS
from antiphon.services.engine.quantizer.layer import Stream
from antiphon.services.engine.quantizer.plan import Plan

_ROWS = 8192
"""Rows of the output head that are converted to float32 at a time."""


class OuterParts:
    """Computes hidden states before the first layer and log likelihoods after the last."""

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: those of the unquantized checkpoint, by their names there, in any floating-point type."""
        d = plan.description
        found = {parameter.name: tensors[parameter.sources[0].name] for parameter in plan.outer()}
        bias = found.get("final_norm.bias")
        norm = make_norm(d.norm, found["final_norm.weight"].float(), None if bias is None else bias.float(), d.norm_eps)
        embedding = found["embedding"]
        self._head = found.get("head.weight", embedding)
        self._num_layers, self._found = d.num_layers, found
        self._description = replace(
            d, num_layers=0, sliding_windows=(), layer_heads=(), kv_sources=(), experts=None, recurrent=None
        )
        weights = DecoderWeights(
            embedding=embedding,
            layers=(),
            final_norm=norm,
            head=DenseLinear(embedding),
            positions=found.get("positions"),
        )
        self._norm, self._decoder = norm, Decoder(self._description, weights, TORCH_OPERATIONS)

    def embed(self, batches: Sequence[Tensor]) -> Stream:
        """Token ids [sequences, length] → the stream of their hidden states before the first layer."""
        inputs = None if self._description.layer_inputs is None else self._inputs
        hidden = [self._embed(ids.flatten(), ids.shape[1]).view(*ids.shape, -1) for ids in batches]
        return Stream(ids=batches, hidden=hidden, inputs=inputs)

    def perplexity(self, stream: Stream) -> float:
        """Returns the perplexity of a stream's ids from its hidden states after the last layer."""
        total, count = 0.0, 0
        for ids, states in zip(stream.ids, stream.hidden, strict=True):
            for tokens, rows in zip(ids, states, strict=True):
                logs = F.log_softmax(self._logits(self._norm(rows[:-1])), dim=-1)
                total -= float(logs.gather(1, tokens[1:, None]).sum(dtype=torch.float64))
                count += len(tokens) - 1
        return math.exp(total / count)

    def _embed(self, ids: Tensor, length: int) -> Tensor:
        """Ids [n] of sequences with `length` tokens → [n, hidden] float32."""
        return self._decoder.embed(ids, torch.arange(length).repeat(len(ids) // length)).float()

    def _inputs(self, layer: int, ids: Tensor) -> Tensor:
        """See `Stream.inputs`: only the ids' rows of a layer's part of the table are converted, which is large."""
        d = self._description
        assert d.layer_inputs is not None
        size = d.layer_inputs.size
        own, table = slice(layer * size, (layer + 1) * size), self._found["layer_inputs.table"]
        weights = LayerInputWeights(
            table=table[ids.where(ids < len(table), 0), own].float(),
            projection=DenseLinear(self._found["layer_inputs.in.weight"][own].float()),
            norm=make_norm(d.norm, self._found["layer_inputs.norm.weight"].float(), None, d.norm_eps),
            size=size,
            hidden_size=d.hidden_size,
        )
        return weights(torch.arange(len(ids)), self._embed(ids, len(ids))).expand(-1, self._num_layers, -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        parts = (part.float() for part in self._head.split(_ROWS))
        normalised = self._description.normalised_head
        logits = torch.cat([F.linear(hidden, F.normalize(part) if normalised else part) for part in parts], dim=-1)
        logits = logits * self._description.logits_scale
        cap = self._description.logits_softcap
        return logits if cap is None else (logits / cap).tanh() * cap
