"""One layer's forward pass over whole sequences, in float32, with statistics of its matrices' inputs.

The pass is the engine's own decoder with a single layer, so every family computes the same as in serving. Called by
`run`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    PlainMlp,
    RoutedMlp,
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


class _WatchedLinear(Linear):
    """A linear layer that passes its input to the callback `see`, if set."""

    def __init__(self, weight: "Tensor | QuantizedWeight", bias: Tensor | None) -> None:
        self.see: See | None = None
        self._quantized = weight if isinstance(weight, QuantizedWeight) and weight.kind == "int8_dynamic" else None
        self._inner = DenseLinear(weight.dequantized() if isinstance(weight, QuantizedWeight) else weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if self.see is not None:
            self.see(x)
        return self._inner(x if self._quantized is None else self._quantized.round_rows(x))


class _WatchedOperations(Operations):
    """Plain operations whose linear layers can be watched."""

    def linear(self, weight: "Tensor | QuantizedWeight", bias: Tensor | None = None) -> Linear:
        """See `Operations`."""
        return _WatchedLinear(weight, bias)

    def expert_mlp(self, parts: ExpertParts) -> RoutedMlp:
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
        has_experts = d.experts is not None and d.has_experts(index)
        experts = replace(d.experts, layers=frozenset({0})) if d.experts is not None and has_experts else None
        window = d.sliding_windows[index]
        recurrent = replace(d.recurrent, layers=frozenset({0})) if d.recurrent and d.is_recurrent(index) else None
        self._description = replace(
            d,
            num_layers=1,
            sliding_windows=(window,),
            unrotated_layers=frozenset({0} if index in d.unrotated_layers else ()),
            experts=experts,
            recurrent=recurrent,
        )
        unused = torch.zeros(1, d.hidden_size)
        norm = RmsNorm(unused[0], d.norm_eps)
        weights = DecoderWeights(embedding=unused, layers=(self._weights,), final_norm=norm, head=DenseLinear(unused))
        self._decoder = Decoder(self._description, weights, _OPERATIONS)

    def __call__(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Batches of hidden states [sequences, length, hidden] before the layer → the same after it."""
        return [self._run(batch) for batch in batches]

    def watched(self, batches: Sequence[Tensor]) -> tuple[list[Tensor], dict[Site, Statistics]]:
        """Runs the layer, and also returns the statistics of its sites."""
        found: dict[Site, Statistics] = {}
        linears = {site: _linear(self._weights, site) for site in self._plan.watched(self._index)}

        def seeing(site: Site) -> See:
            def see(x: Tensor) -> None:
                if site not in found:
                    found[site] = Statistics.empty(x.shape[1])
                found[site].add(x)

            return see

        for site, linear in linears.items():
            linear.see = seeing(site)
        try:
            return self(batches), found
        finally:
            for linear in linears.values():
                linear.see = None

    def _run(self, hidden: Tensor) -> Tensor:
        rows = max(1, _TOKENS_A_STEP // hidden.shape[1])
        return torch.cat([self._step(part) for part in hidden.split(rows)])

    def _step(self, hidden: Tensor) -> Tensor:
        count, length, _ = hidden.shape
        step = _step_inputs(self._description, count, length)
        positions = torch.arange(length).repeat(count)
        return self._decoder.layers(hidden.flatten(0, 1), positions, step).view_as(hidden)


def _linear(layer: LayerWeights, site: Site) -> _WatchedLinear:
    """Returns a linear layer whose input is that of a site."""
    name = site.matrices[0]
    if name in ("qkv", "mix_in"):
        linear = layer.qkv
    elif name in ("o", "mix_out"):
        linear = layer.o
    elif isinstance(layer.mlp, ExpertMlp):
        linear = _linear_of_experts(layer.mlp, name, site.expert)
    else:
        assert isinstance(layer.mlp, GatedMlp | PlainMlp)
        linear = _up_or_down(layer.mlp, name)
    assert isinstance(linear, _WatchedLinear)
    return linear


def _linear_of_experts(mlp: ExpertMlp, name: str, expert: int | None) -> Linear:
    if expert is not None:
        return (mlp.gate_up if name == "experts.up" else mlp.down)[expert]
    if name == "experts.up":
        # The input of all experts together is that of the router, which reads every token.
        router = mlp.parts.router
        return router.product if isinstance(router, ExactRouter) else router
    assert mlp.parts.shared is not None
    assert isinstance(mlp.parts.shared.mlp, GatedMlp)
    return _up_or_down(mlp.parts.shared.mlp, name.removeprefix("shared."))


def _up_or_down(mlp: GatedMlp | PlainMlp, name: str) -> Linear:
    if name == "down":
        return mlp.down
    return mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up


def _step_inputs(d: DecoderDescription, count: int, length: int) -> StepInputs:
    """Returns the inputs of a step with `count` prompts of `length` tokens and an empty cache for one layer.

    A layer with a recurrent state has a slot for each prompt in place of the cache.
    """
    blocks = -(-length // _BLOCK_SIZE)
    tables = np.arange(count * blocks, dtype=np.int64).reshape(count, blocks)
    positions = np.arange(length)
    slots = tables[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
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
    cache = (count * blocks, _BLOCK_SIZE, d.num_kv_heads, d.head_dim)
    caches = tuple((torch.empty(cache), torch.empty(cache)) for _ in d.attention_layers)
    every = np.arange(count + 1, dtype=np.int64)
    moves = StateMoves(
        query_start_loc=starts, sources=np.full(count, -1), starts=every, ends=starts[1:], slots=every[:-1]
    )
    return StepInputs(
        slot_mapping=torch.from_numpy(slots.reshape(-1)),
        attention={window: plan_attention(starts, lengths, tables, window, shape)},
        key_caches=tuple(keys for keys, _ in caches),
        value_caches=tuple(values for _, values in caches),
        states=moves,
        state_caches=allocate_states(d, count, device),
    )
