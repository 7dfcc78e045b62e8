"""Creates a decoder's weights from a checkpoint, one parameter after the other.

A parameter's tensors are joined, converted and packed before the next parameter is read, so that loading needs little
more memory than the model itself. Raises a `ServiceError` that names the tensors if the checkpoint does not fit its
config. Called by the torch worker and the Triton worker at start-up.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.activation import xielu_numbers
from antiphon.services.engine.models.decoder import DecoderWeights, DraftWeights, LayerWeights
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layers.ending import ExpertsBeside, InputGate, LayerEnding, LayerInputWeights
from antiphon.services.engine.models.layers.latent_attention import LatentWeights
from antiphon.services.engine.models.layers.linear import Linear, can_pack
from antiphon.services.engine.models.layers.mlp import (
    ExactRouter,
    ExpertMatrices,
    ExpertParts,
    Mlp,
    NoMlp,
    SharedExpert,
    SparseMlp,
)
from antiphon.services.engine.models.layers.norm import Norm
from antiphon.services.engine.models.layers.recurrent import (
    ChannelDeltaWeights,
    ChannelSpaceWeights,
    ConvolutionWeights,
    DeltaWeights,
    RecurrentWeights,
    StateSpaceWeights,
    scaled_kernel,
)
from antiphon.services.engine.models.layers.streams import SideProduct, StreamEnds, StreamMix
from antiphon.services.engine.models.layout import Parameter
from antiphon.services.engine.models.operations import TORCH_OPERATIONS, Operations
from antiphon.services.engine.models.recurrent_kinds import (
    ChannelDelta,
    ChannelSpace,
    GatedDelta,
    Recurrent,
    StateSpace,
)
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.parallel.linear import Summed
from antiphon.services.engine.parallel.shard import is_summed, local_description
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading.parameters import ParameterReader, stream_router, within_layer


def load_weights(
    model_dir: Path,
    description: DecoderDescription,
    layout: tuple[Parameter, ...],
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations = TORCH_OPERATIONS,
    form: WeightForm = PLAIN_WEIGHTS,
    ranks: Communicator = ALONE_RANK,
    loaded: Callable[[int, LayerWeights], None] = lambda index, layer: None,
) -> DecoderWeights:
    """Returns the decoder's weights on the device, in the forms that the operations use.

    `description` and `layout` are those of the whole model. The result is the part given by `ranks.shard`. `loaded` is
    called with each layer when it is on the device.
    """
    with ParameterReader(model_dir, description, layout, dtype, device, form, ranks.shard) as reader:
        description = local_description(description, ranks.shard)
        loader = _Loader(reader, description, dtype, device, operations, ranks)
        embedding = reader.tensor("embedding")
        weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(_loaded(loader, description, index, loaded) for index in range(description.num_layers)),
            final_norm=loader.norm("final_norm"),
            head=_head(embedding, loader, description),
            positions=reader.owned("positions") if reader.has("positions") else None,
            layer_inputs=_layer_inputs(loader, description),
            streams=_stream_ends(loader, description),
        )
        return replace(weights, nbytes=reader.read_bytes)


def load_layer(
    reader: ParameterReader,
    description: DecoderDescription,
    index: int,
    dtype: torch.dtype,
    operations: Operations = TORCH_OPERATIONS,
) -> LayerWeights:
    """Returns the weights of one layer on the CPU. The reader must have at least the layer's parameters."""
    return _layer(_Loader(reader, description, dtype, torch.device("cpu"), operations, ALONE_RANK), description, index)


def _loaded(
    loader: "_Loader", description: DecoderDescription, index: int, loaded: Callable[[int, LayerWeights], None]
) -> LayerWeights:
    layer = _layer(loader, description, index)
    loaded(index, layer)
    return layer


class _Loader:
    """Creates the parts of a decoder from its parameters."""

    def __init__(
        self,
        reader: ParameterReader,
        description: DecoderDescription,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        ranks: Communicator,
    ) -> None:
        self.reader, self._description, self.operations, self.ranks = reader, description, operations, ranks
        self._packs = can_pack(dtype, device)
        self.ones = partial(torch.ones, dtype=dtype, device=device)

    def linear(self, name: str) -> Linear:
        """Returns a linear layer. If it is split over ranks by columns, it sums its results over the ranks."""
        if not is_summed(within_layer(name), self.reader.shard):
            return self.part(name, self.reader.bias(name))
        return Summed(self.part(name), self.ranks.all_sum, self.reader.bias(name))

    def part(self, name: str, bias: Tensor | None = None) -> Linear:
        """Returns a linear layer of the rank's part of a matrix."""
        weight = self.reader.matrix(name)
        if isinstance(weight, Tensor) and not self._packs and self.reader.is_mapped(f"{name}.weight"):
            weight = weight.clone()
        return self.operations.linear(weight, bias)

    def mixture(self, parts: ExpertParts) -> Mlp:
        """Returns a mixture of experts, including the shared expert. If it is split over ranks, it sums its results."""
        mlp = self.operations.expert_mlp(parts)
        return mlp if self.reader.shard.tp_size == 1 else Summed(mlp, self.ranks.all_sum)

    def experts(self, name: str, count: int) -> ExpertMatrices:
        """Returns the matrices of a layer's experts."""
        weight = self.reader.matrix(name)
        if not isinstance(weight, Tensor):
            return weight.chunk(count)
        if self.reader.is_mapped(f"{name}.weight"):
            weight = weight.clone()
        return weight.unflatten(0, (count, -1))

    def expert_bias(self, name: str, count: int) -> Tensor | None:
        """Returns the biases [experts, out] of a matrix of experts; None if it has none.

        If the matrix's results are summed over ranks, only the first rank has the biases.
        """
        bias = self.reader.bias(name)
        if bias is None:
            return None
        if is_summed(within_layer(name), self.reader.shard) and self.reader.shard.tp_rank:
            bias = torch.zeros_like(bias)
        return bias.unflatten(0, (count, -1)).contiguous()

    def sinks(self, name: str) -> Tensor:
        """Returns the sinks [heads] of a rank's heads, float32."""
        shard = self.reader.shard
        return self.reader.exact(name).chunk(shard.tp_size)[shard.tp_rank].clone()

    def norm(self, name: str) -> Norm:
        d = self._description
        weight, bias = self.reader.owned(f"{name}.weight"), self.reader.bias(name)
        if d.norm == "layer" and bias is None:
            bias = torch.zeros_like(weight)
        return self.operations.norm(d.norm, weight, bias, d.norm_eps)

    def optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if self.reader.has(f"{name}.weight") else None


def _layer(loader: _Loader, description: DecoderDescription, index: int) -> LayerWeights:
    description, name, recurrent = description.of_layer(index), f"layers.{index}", description.is_recurrent(index)
    attends, mixers = description.attends(index), (f"{name}.mix_in", f"{name}.mix_out")
    return LayerWeights(
        input_norm=loader.optional_norm(f"{name}.input_norm"),
        qkv=loader.linear(f"{name}.qkv" if attends else mixers[0]),
        o=loader.linear(f"{name}.o" if attends else mixers[1]),
        mlp_norm=loader.optional_norm(f"{name}.mlp_norm"),
        mlp=_mlp(loader, description, index),
        qk_norm=_qk_norm(loader, description, name, index) if description.has_qk_norm(index) and attends else None,
        after_attention_norm=loader.optional_norm(f"{name}.after_attention_norm"),
        after_mlp_norm=loader.optional_norm(f"{name}.after_mlp_norm"),
        sinks=loader.sinks(f"{name}.sinks") if description.attention_sinks else None,
        latent=_latent(loader, description, name) if description.latent is not None and attends else None,
        gate=_gate(loader, f"{name}.attention_gate" if attends else f"{name}.mix_gate"),
        recurrent=_recurrent(loader, description.recurrent, name) if recurrent else None,
        beside=(loader.linear(mixers[0]), loader.linear(mixers[1])) if recurrent and attends else None,
        experts_beside=_beside(loader, description, name) if description.has_both(index) else None,
        ending=_ending(loader, description, index),
        streams=_streams(loader, description, index),
        side=_side(loader, name) if description.streams is not None else None,
        draft=_draft(loader, name) if index >= description.num_model_layers else None,
    )


def _draft(loader: _Loader, name: str) -> DraftWeights:
    norms = (loader.norm(f"{name}.draft_{norm}") for norm in ("embedding_norm", "hidden_norm", "norm"))
    return DraftWeights(loader.linear(f"{name}.draft_input"), *norms)


def _gate(loader: _Loader, name: str) -> Linear | None:
    return loader.linear(name) if loader.reader.has(f"{name}.weight") else None


def _recurrent(loader: _Loader, shape: Recurrent | None, name: str) -> RecurrentWeights:
    reader, shard = loader.reader, loader.reader.shard

    def own(values: Tensor, parts: Sequence[int]) -> Tensor:
        """Of each of the parts, which have so many rows on each rank, the rows of this rank."""
        every = values.split([rows * shard.tp_size for rows in parts])
        return torch.cat([part.chunk(shard.tp_size)[shard.tp_rank] for part in every])

    if isinstance(shape, GatedDelta):
        kernel = own(reader.owned(f"{name}.conv").flatten(1), shape.in_widths[:3])
        vectors = (own(reader.exact(f"{name}.{vector}"), [shape.num_value_heads]) for vector in ("decay", "decay_bias"))
        decay, decay_bias = vectors
        return DeltaWeights(kernel, reader.owned(f"{name}.mix_norm"), -decay.exp(), decay_bias)
    if isinstance(shape, ChannelDelta):
        return ChannelDeltaWeights(
            kernel=reader.owned(f"{name}.conv").flatten(1),
            norm=reader.owned(f"{name}.mix_norm"),
            decays=loader.linear(f"{name}.mix_decay"),
            gates=loader.linear(f"{name}.mix_out_gate"),
            decay=-reader.exact(f"{name}.decay").flatten().exp(),
            decay_bias=reader.exact(f"{name}.decay_bias").view(shape.num_heads, -1),
        )
    assert shape is not None
    channels = shape.in_widths[1:4] if isinstance(shape, StateSpace) else [shape.channels]
    bias = own(reader.owned(f"{name}.conv.bias"), channels) if reader.has(f"{name}.conv.bias") else None
    if isinstance(shape, StateSpace):
        heads = [shape.num_heads]
        kernel = own(reader.owned(f"{name}.conv").flatten(1), channels)
        norm = kernel.new_ones(shape.width)
        if shape.norm != "none":
            norm = own(reader.owned(f"{name}.mix_norm"), [shape.width])
        return StateSpaceWeights(
            kernel=scaled_kernel(shape, kernel),
            bias=bias,
            norm=norm.to(torch.float32) * shape.out_scale,
            decay=-own(reader.exact(f"{name}.decay"), heads).exp(),
            decay_bias=own(reader.exact(f"{name}.decay_bias"), heads),
            skip=own(reader.exact(f"{name}.skip"), heads),
        )
    if isinstance(shape, ChannelSpace):
        return ChannelSpaceWeights(
            kernel=own(reader.owned(f"{name}.conv").flatten(1), channels),
            bias=bias,
            select=loader.linear(f"{name}.mix_select"),
            step=loader.linear(f"{name}.mix_step"),
            norm=reader.owned(f"{name}.select_norm") if reader.has(f"{name}.select_norm") else None,
            decay=-own(reader.exact(f"{name}.decay"), channels).exp(),
            decay_bias=own(reader.exact(f"{name}.decay_bias"), channels),
            skip=own(reader.exact(f"{name}.skip"), channels),
        )
    return ConvolutionWeights(own(reader.owned(f"{name}.conv").flatten(1), [shape.channels]), bias)


def _latent(loader: _Loader, description: DecoderDescription, name: str) -> LatentWeights:
    reader = loader.reader
    return LatentWeights(
        norm=reader.owned(f"{name}.latent_norm"),
        up=reader.plain_matrix(f"{name}.latent_up").unflatten(0, (description.num_heads, -1)),
        query_norm=reader.owned(f"{name}.q_latent_norm") if reader.has(f"{name}.q_latent_norm") else None,
        query_up=loader.linear(f"{name}.q_up") if reader.has(f"{name}.q_up.weight") else None,
    )


def _qk_norm(loader: _Loader, description: DecoderDescription, name: str, index: int) -> Tensor:
    return loader.reader.folded_norms(index, _plain_qk_norm(loader, description, name))


def _plain_qk_norm(loader: _Loader, description: DecoderDescription, name: str) -> Tensor:
    if not description.qk_norm_weights:
        return loader.ones(description.num_heads + description.num_kv_heads, description.head_dim)
    heads = ((f"{name}.q_norm", description.num_heads), (f"{name}.k_norm", description.num_kv_heads))
    own = heads[:1] if description.queries_only else heads
    rows = [loader.reader.tensor(norm).view(-1, description.head_dim).expand(count, -1) for norm, count in own]
    norms = torch.cat(rows)
    return norms + 1.0 if description.norm == "rms_plus_one" else norms


def _mlp(loader: _Loader, description: DecoderDescription, index: int) -> Mlp:
    name, activation = f"layers.{index}", description.activation
    if description.experts is not None and description.has_experts(index) and not description.has_both(index):
        return loader.mixture(_expert_parts(loader, description, description.experts, name))
    if not description.has_mlp(index):
        return NoMlp()
    up, down = loader.linear(f"{name}.up"), loader.linear(f"{name}.down")
    if description.gate_cuts and (cut := description.gate_cuts[index]) is not None:
        return SparseMlp(up, down, activation, cut, loader.reader.shard.tp_size, loader.ranks.all_sum)
    numbers = xielu_numbers(loader.reader.exact(f"{name}.xielu")) if activation == "xielu" else None
    return loader.operations.mlp(up, down, activation, description.gated_mlp, numbers, description.mlp_scales)


def _layer_inputs(loader: _Loader, description: DecoderDescription) -> LayerInputWeights | None:
    if description.layer_inputs is None:
        return None
    return LayerInputWeights(
        table=loader.reader.tensor("layer_inputs.table"),
        projection=loader.linear("layer_inputs.in"),
        norm=loader.norm("layer_inputs.norm"),
        size=description.layer_inputs.size,
        hidden_size=description.hidden_size,
    )


def _ending(loader: _Loader, description: DecoderDescription, index: int) -> LayerEnding | None:
    if description.streams is not None:
        return None
    name = f"layers.{index}"
    gate = None if description.layer_inputs is None else _input_gate(loader, description, name)
    scale = loader.reader.owned(f"{name}.scale") if description.layer_scales else None
    return None if gate is None and scale is None else LayerEnding(index, gate, scale)


def _input_gate(loader: _Loader, description: DecoderDescription, name: str) -> InputGate:
    return InputGate(
        gate=loader.linear(f"{name}.input_gate"),
        out=loader.linear(f"{name}.input_out"),
        norm=loader.norm(f"{name}.input_after"),
        activation=description.activation,
    )


def _stream_ends(loader: _Loader, description: DecoderDescription) -> StreamEnds | None:
    if description.streams is None:
        return None
    numbers = range(description.streams.count - 1)
    ins, outs = (tuple(loader.linear(f"streams.{which}.{number}") for number in numbers) for which in ("in", "out"))
    return StreamEnds(ins, outs)


def _streams(loader: _Loader, description: DecoderDescription, index: int) -> StreamMix | None:
    if description.streams is None:
        return None
    name = f"layers.{index}"
    return StreamMix(
        layer=index,
        router=stream_router(loader.reader, name),
        eps=description.norm_eps,
        predict=loader.reader.exact(f"{name}.streams.predict"),
        correct=loader.reader.exact(f"{name}.streams.correct"),
        scale=loader.reader.owned(f"{name}.streams.scale"),
        gate=_input_gate(loader, description, name),
    )


def _side(loader: _Loader, name: str) -> SideProduct:
    return SideProduct(
        loader.linear(f"{name}.side.in"), loader.linear(f"{name}.side.out"), loader.norm(f"{name}.side.after")
    )


def _beside(loader: _Loader, description: DecoderDescription, name: str) -> ExpertsBeside:
    assert description.experts is not None
    parts = _expert_parts(loader, description, description.experts, name)
    scale = loader.reader.owned(f"{name}.router.scale") * description.hidden_size**-0.5
    return ExpertsBeside(
        norm=loader.norm(f"{name}.experts.norm"),
        router_norm=loader.operations.norm(description.norm, scale, None, description.norm_eps),
        experts=loader.operations.expert_mlp(replace(parts, scales=loader.reader.exact(f"{name}.experts.scale"))),
        all_sum=loader.ranks.all_sum,
        after_experts=loader.norm(f"{name}.experts.after"),
        after_mlp=loader.norm(f"{name}.mlp.after"),
    )


def _expert_parts(loader: _Loader, description: DecoderDescription, experts: Experts, name: str) -> ExpertParts:
    activation, shared = description.activation, None
    if experts.shared_intermediate_size:
        # The results of the shared expert are summed over ranks together with those of the other experts.
        inner = loader.part(f"{name}.shared.up"), loader.part(f"{name}.shared.down")
        mlp = loader.operations.mlp(*inner, activation, description.gated_mlp)
        shared = SharedExpert(mlp, loader.linear(f"{name}.shared.gate") if experts.shared_gate else None)
    up, down = (loader.experts(f"{name}.experts.{part}", experts.num_experts) for part in ("up", "down"))
    up_bias, down_bias = (loader.expert_bias(f"{name}.experts.{part}", experts.num_experts) for part in ("up", "down"))
    latent = (loader.part(f"{name}.experts.in"), loader.part(f"{name}.experts.out")) if experts.latent_size else None
    router: Linear | ExactRouter
    correction = None
    if experts.correction:
        correction = loader.reader.exact(f"{name}.router.correction").flatten()
    if experts.correction or experts.exact_router:
        router = ExactRouter(loader.operations.linear(loader.reader.exact(f"{name}.router.weight")))
    else:
        router = loader.linear(f"{name}.router")
    return ExpertParts(
        experts=experts,
        router=router,
        gate_up=up,
        down=down,
        activation=activation,
        shared=shared,
        correction=correction,
        up_bias=up_bias,
        down_bias=down_bias,
        gated=description.gated_mlp,
        latent=latent,
    )


def _head(embedding: Tensor, loader: _Loader, description: DecoderDescription) -> Linear:
    """Returns the output projection.

    Packing a tied head makes a second copy of the embedding matrix, so a tied head is packed only if the embedding is
    the file's mapped pages and takes no memory of its own.
    """
    if description.tied_embeddings:
        head = loader.reader.tied_head(embedding)
        if isinstance(head, QuantizedWeight):
            return loader.operations.linear(head)
        make = loader.operations.linear if loader.reader.is_mapped("embedding") else loader.operations.unpacked_linear
        return make(embedding)
    if description.normalised_head:
        return loader.operations.linear(F.normalize(loader.reader.tensor("head.weight")))
    return loader.linear("head")
