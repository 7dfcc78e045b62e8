"""The parts of a model outside of its layers: embedding, last norm, output head. Called by `run`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.models.decoder import Decoder, DecoderWeights
from antiphon.services.engine.models.layers.linear import DenseLinear
from antiphon.services.engine.models.layers.norm import make_norm
from antiphon.services.engine.models.operations import TORCH_OPERATIONS
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
        self._description = replace(d, num_layers=0, sliding_windows=(), experts=None, recurrent=None)
        weights = DecoderWeights(
            embedding=embedding,
            layers=(),
            final_norm=norm,
            head=DenseLinear(embedding),
            positions=found.get("positions"),
        )
        self._norm, self._decoder = norm, Decoder(self._description, weights, TORCH_OPERATIONS)

    def embed(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Token ids [sequences, length] → hidden states [sequences, length, hidden] float32."""
        return [self._embed(ids) for ids in batches]

    def perplexity(self, batches: Sequence[Tensor], hidden: Sequence[Tensor]) -> float:
        """Returns the perplexity of the ids from the hidden states after the last layer."""
        total, count = 0.0, 0
        for ids, states in zip(batches, hidden, strict=True):
            for tokens, rows in zip(ids, states, strict=True):
                logs = F.log_softmax(self._logits(self._norm(rows[:-1])), dim=-1)
                total -= float(logs.gather(1, tokens[1:, None]).sum(dtype=torch.float64))
                count += len(tokens) - 1
        return math.exp(total / count)

    def _embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).repeat(ids.shape[0])
        return self._decoder.embed(ids.flatten(), positions).float().view(*ids.shape, -1)

    def _logits(self, hidden: Tensor) -> Tensor:
        parts = (part.float() for part in self._head.split(_ROWS))
        normalised = self._description.normalised_head
        logits = torch.cat([F.linear(hidden, F.normalize(part) if normalised else part) for part in parts], dim=-1)
        logits = logits * self._description.logits_scale
        cap = self._description.logits_softcap
        return logits if cap is None else (logits / cap).tanh() * cap
