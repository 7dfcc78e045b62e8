"""One layer's forward pass over whole sequences, in float32, with statistics of its matrices' inputs.

The pass is the engine's own decoder with a single layer, so every family computes the same as in serving. What a layer
reads besides the hidden states goes along with them in a `Stream`. Called by `run`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from antiphon.services.engine.backends.torch.worker import scaled_slopes
from antiphon.services.engine.kernels.paged_attention import AttentionShape, plan_attention
from antiphon.services.engine.kernels.recurrent.moves import StateMoves
from antiphon.services.engine.models.decoder import Decoder, DecoderWeights, LayerWeights
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layers.attention import StepInputs
from antiphon.services.engine.models.layers.linear import DenseLinear, Linear
from antiphon.services.engine.models.layers.mlp import (
    ExactRouter,
    ExpertMlp,
    ExpertParts,
    GatedMlp,
    Mlp,
    PlainMlp,
)
from antiphon.services.engine.models.layers.norm import RmsNorm
from antiphon.services.engine.models.operations import Operations
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.quantizer.plan import Plan, Site
from antiphon.services.engine.worker.capacity.states import allocate_states
from antiphon.services.engine.worker.loading.checkpoint import Checkpoint
from antiphon.services.engine.worker.loading.parameters import ParameterReader
from antiphon.services.engine.worker.loading.weights import load_layer

_BLOCK_SIZE = 16
_TOKENS_A_STEP = 2048
See = Callable[[Tensor], None]
Caches = tuple[Tensor, Tensor]
"""Keys and values of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Batches of sequences on their way through the layers."""

    ids: Sequence[Tensor]
    """[sequences, length] each."""
    hidden: Sequence[Tensor]
    """[sequences, length, hidden] float32 each."""
    inputs: Callable[[int, Tensor], Tensor] | None = None
    """Index of a layer and ids [n] → the inputs [n, layers, size] of layers, of which only this layer's count; None:
    the model's layers have none."""
    lent: Mapping[int, Sequence[Caches]] = field(default_factory=dict)
    """For each earlier layer whose keys and values later ones read: those of each step, in order."""

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the ids and hidden states of sequences that are computed at once, of all batches in order."""
        for ids, hidden in zip(self.ids, self.hidden, strict=True):
            rows = max(1, _TOKENS_A_STEP // ids.shape[1])
            yield from zip(ids.split(rows), hidden.split(rows), strict=True)

    def after(self, results: Sequence[Tensor], layer: int, lent: Sequence[Caches]) -> "Stream":
        """Returns the stream behind a layer, from the hidden states of each step."""
        left, hidden = iter(results), []
        for ids in self.ids:
            parts = -(-len(ids) // max(1, _TOKENS_A_STEP // ids.shape[1]))
            hidden.append(torch.cat([next(left) for _ in range(parts)]))
        return replace(self, hidden=hidden, lent={**self.lent, layer: lent} if lent else self.lent)


class _WatchedLinear(Linear):
    """A linear layer that passes its input to the callbacks `seers`."""

    def __init__(self, weight: "Tensor | QuantizedWeight", bias: Tensor | None) -> None:
        self.seers: list[See] = []
        self._quantized = weight if isinstance(weight, QuantizedWeight) and weight.kind == "int8_dynamic" else None
        self._inner = DenseLinear(weight.dequantized() if isinstance(weight, QuantizedWeight) else weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        for see in self.seers:
            see(x)
        return self._inner(x if self._quantized is None else self._quantized.round_rows(x))


class _WatchedOperations(Operations):
    """Plain operations whose linear layers can be watched."""

    def linear(self, weight: "Tensor | QuantizedWeight", bias: Tensor | None = None) -> Linear:
        """See `Operations`."""
        return _WatchedLinear(weight, bias)

    def expert_mlp(self, parts: ExpertParts) -> ExpertMlp:
        """See `Operations`."""
        return ExpertMlp(parts, _WatchedLinear)


_OPERATIONS = _WatchedOperations()


@dataclass(slots=True)
class Statistics:
    """Statistics of a site (the input of one or several matrices) over all tokens, for its `in` channels."""

    largest: Tensor
    """[in]: the largest absolute value."""
    total: Tensor
    """[in]: the sum of absolute values."""
    products: Tensor
    """[in, in]: P = xᵀ x, the sum over tokens. tr(D P Dᵀ) / `count` measures the output error for an error D."""
    count: int = 0

    @classmethod
    def empty(cls, width: int) -> "Statistics":
        """Returns the statistics of no tokens."""
        return cls(torch.zeros(width), torch.zeros(width), torch.zeros(width, width))

    def add(self, x: Tensor) -> None:
        """Adds rows [n, in]."""
        sizes = x.abs()
        self.largest = torch.maximum(self.largest, sizes.amax(dim=0))
        self.total += sizes.sum(dim=0)
        self.products.addmm_(x.t(), x)
        self.count += len(x)


class Layer:
    """A layer that can be run. `tensors` are those of a checkpoint by name, quantized ones if `method` is given."""

    def __init__(self, plan: Plan, index: int, tensors: Mapping[str, Tensor], method: PreparedMethod | None) -> None:
        """Raises ServiceError if the tensors do not fit the model."""
        checkpoint, parameters = Checkpoint.in_memory(tensors, method), plan.layer(index)
        checkpoint.check(parameters, frozenset())
        reader = ParameterReader.over(checkpoint, plan.description, parameters, torch.float32)
        self._plan, self._index, d = plan, index, plan.description
        self._weights = load_layer(reader, d, index, torch.float32, _OPERATIONS)
        experts = replace(d.experts, layers=frozenset({0})) if d.experts and d.has_experts(index) else None
        recurrent = replace(d.recurrent, layers=frozenset({0})) if d.recurrent and d.is_recurrent(index) else None
        sources = enumerate(d.kv_sources)
        self._borrows = d.kv_sources[index] if d.borrows_kv(index) else None
        self._lends = any(source == index for layer, source in sources if layer != index)
        self._description = replace(
            d.of_layer(index),
            num_layers=1,
            sliding_windows=(d.sliding_windows[index],),
            unrotated_layers=frozenset({0} if index in d.unrotated_layers else ()),
            experts=experts,
            recurrent=recurrent,
            kv_sources=(),
            kv_slabs=(),
        )
        unused = torch.zeros(1, d.hidden_size)
        norm = RmsNorm(unused[0], d.norm_eps)
        weights = DecoderWeights(embedding=unused, layers=(self._weights,), final_norm=norm, head=DenseLinear(unused))
        self._decoder = Decoder(self._description, weights, _OPERATIONS)

    def __call__(self, stream: Stream) -> Stream:
        """Returns the stream behind the layer."""
        lent, results = list[Caches](), list[Tensor]()
        borrowed = iter(() if self._borrows is None else stream.lent[self._borrows])
        for ids, hidden in stream.steps():
            step = _step_inputs(self._description, *ids.shape, caches=next(borrowed, None))
            if stream.inputs is not None:
                step = replace(step, layer_inputs=stream.inputs(self._index, ids.flatten()))
            positions = torch.arange(ids.shape[1]).repeat(len(ids))
            results.append(self._decoder.layers(hidden.flatten(0, 1), positions, step).view_as(hidden))
            if self._lends:
                lent.append((step.key_caches[0], step.value_caches[0]))
        return stream.after(results, self._index, lent)

    def watched(self, stream: Stream) -> tuple[Stream, dict[Site, Statistics]]:
        """Runs the layer, and also returns the statistics of its sites."""
        found: dict[Site, Statistics] = {}
        linears = {site: _linears(self._weights, site) for site in self._plan.watched(self._index)}

        def seeing(site: Site) -> See:
            def see(x: Tensor) -> None:
                if site not in found:
                    found[site] = Statistics.empty(x.shape[1])
                found[site].add(x)

            return see

        for site, watched in linears.items():
            for linear in watched:
                linear.seers.append(seeing(site))
        try:
            return self(stream), found
        finally:
            for linear in (linear for watched in linears.values() for linear in watched):
                linear.seers.clear()


def _linears(layer: LayerWeights, site: Site) -> list[_WatchedLinear]:
    """Returns linear layers that together read all inputs of a site."""
    name = site.matrices[0]
    mixers = (layer.qkv, layer.o) if layer.beside is None else layer.beside
    mixing: dict[str, Linear] = {"qkv": layer.qkv, "o": layer.o, "mix_in": mixers[0], "mix_out": mixers[1]}
    if name in mixing:
        found = [mixing[name]]
    elif name == "q_up":
        assert layer.latent is not None
        assert layer.latent.query_up is not None
        found = [layer.latent.query_up]
    elif layer.experts_beside is not None and name.startswith("experts."):
        experts = layer.experts_beside.experts
        assert isinstance(experts, ExpertMlp)
        found = _linears_of_experts(experts, name, site.expert, own_input=True)
    elif isinstance(layer.mlp, ExpertMlp):
        found = _linears_of_experts(layer.mlp, name, site.expert)
    else:
        found = [_up_or_down(layer.mlp, name)]
    assert all(isinstance(linear, _WatchedLinear) for linear in found)
    return cast(list[_WatchedLinear], found)


def _linears_of_experts(mlp: ExpertMlp, name: str, expert: int | None, *, own_input: bool = False) -> list[Linear]:
    """`own_input`: whether experts read something else than their router."""
    if expert is not None:
        return [(mlp.gate_up if name == "experts.up" else mlp.down)[expert]]
    if name == "experts.up" and (own_input or mlp.parts.latent is not None):
        return list(mlp.gate_up)
    if name == "experts.up":
        # The input of all experts together is that of the router, which reads every token.
        router = mlp.parts.router
        return [router.product if isinstance(router, ExactRouter) else router]
    assert mlp.parts.shared is not None
    return [_up_or_down(mlp.parts.shared.mlp, name.removeprefix("shared."))]


def _up_or_down(mlp: Mlp, name: str) -> Linear:
    assert isinstance(mlp, GatedMlp | PlainMlp)
    if name == "down":
        return mlp.down
    return mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up


def _step_inputs(d: DecoderDescription, count: int, length: int, caches: Caches | None) -> StepInputs:
    """Returns the inputs of a step with `count` prompts of `length` tokens for one layer.

    A layer with a recurrent state has a slot for each prompt. `caches`: the keys and values of the same step that
    another layer has computed; None: the cache is empty.
    """
    blocks = -(-length // _BLOCK_SIZE)
    tables = np.arange(count * blocks, dtype=np.int64).reshape(1, count, blocks)
    positions = np.arange(length)
    slots = tables[..., positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    bytes_per_slot, device = d.kv_size * torch.float32.itemsize, torch.device("cpu")
    shape = AttentionShape(
        block_size=_BLOCK_SIZE,
        bytes_per_slot=bytes_per_slot,
        dtype=torch.float32,
        device=device,
        alibi_slopes=scaled_slopes(d, device),
        chunked_windows=d.chunked_windows,
    )
    starts = np.arange(count + 1, dtype=np.int64) * length
    lengths = np.full(count, length, dtype=np.int64)
    window = d.sliding_windows[0]
    shape_of_cache = (count * blocks, _BLOCK_SIZE, d.num_kv_heads, d.head_dim)
    keys, values = caches or (torch.empty(shape_of_cache), torch.empty(shape_of_cache))
    every = np.arange(count + 1, dtype=np.int64)
    moves = StateMoves(
        query_start_loc=starts, sources=np.full(count, -1), starts=every, ends=starts[1:], slots=every[:-1]
    )
    return StepInputs(
        slot_mapping=torch.from_numpy(slots.reshape(1, -1)),
        attention={window: plan_attention(starts, lengths, tables, window, shape)},
        key_caches=(keys,),
        value_caches=(values,),
        states=moves,
        state_caches=allocate_states(d, count, device),
    )
