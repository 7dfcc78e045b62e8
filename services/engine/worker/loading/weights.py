"""Creates a decoder's weights from a checkpoint, one parameter after the other.

A parameter's tensors are joined, converted and packed before the next parameter is read, so that loading needs little
more memory than the model itself. Raises a `ServiceError` that names the tensors if the checkpoint does not fit its
config. Called by the torch worker and the Triton worker at start-up.
"""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.models.decoder import DecoderWeights, LayerWeights
from antiphon.services.engine.models.description import DecoderDescription, Experts
from antiphon.services.engine.models.layers.latent_attention import LatentWeights
from antiphon.services.engine.models.layers.linear import Linear, can_pack
from antiphon.services.engine.models.layers.mlp import ExactRouter, ExpertMatrices, ExpertParts, Mlp, SharedExpert
from antiphon.services.engine.models.layers.norm import Norm
from antiphon.services.engine.models.layout import Parameter
from antiphon.services.engine.models.operations import TORCH_OPERATIONS, Operations
from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.parallel.linear import Summed
from antiphon.services.engine.parallel.shard import is_summed, local_description
from antiphon.services.engine.quantization.choice import PLAIN_WEIGHTS, WeightForm
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading.parameters import ParameterReader, within_layer


def load_weights(
    model_dir: Path,
    description: DecoderDescription,
    layout: tuple[Parameter, ...],
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations = TORCH_OPERATIONS,
    form: WeightForm = PLAIN_WEIGHTS,
    ranks: Communicator = ALONE_RANK,
) -> DecoderWeights:
    """Returns the decoder's weights on the device, in the forms that the operations use.

    `description` and `layout` are those of the whole model. The result is the part given by `ranks.shard`.
    """
    with ParameterReader(model_dir, description, layout, dtype, device, form, ranks.shard) as reader:
        description = local_description(description, ranks.shard)
        loader = _Loader(reader, description, dtype, device, operations, ranks)
        embedding = reader.tensor("embedding")
        weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(_layer(loader, description, index) for index in range(description.num_layers)),
            final_norm=loader.norm("final_norm"),
            head=_head(embedding, loader, description),
            positions=reader.owned("positions") if reader.has("positions") else None,
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
        self.reader, self._description, self.operations, self._ranks = reader, description, operations, ranks
        self._packs = can_pack(dtype, device)

    def linear(self, name: str) -> Linear:
        """Returns a linear layer. If it is split over ranks by columns, it sums its results over the ranks."""
        if not is_summed(within_layer(name), self.reader.shard):
            return self.part(name, self.reader.bias(name))
        return Summed(self.part(name), self._ranks.all_sum, self.reader.bias(name))

    def part(self, name: str, bias: Tensor | None = None) -> Linear:
        """Returns a linear layer of the rank's part of a matrix."""
        weight = self.reader.matrix(name)
        if isinstance(weight, Tensor) and not self._packs and self.reader.is_mapped(f"{name}.weight"):
            weight = weight.clone()
        return self.operations.linear(weight, bias)

    def mixture(self, parts: ExpertParts) -> Mlp:
        """Returns a mixture of experts, including the shared expert. If it is split over ranks, it sums its results."""
        mlp = self.operations.expert_mlp(parts)
        return mlp if self.reader.shard.tp_size == 1 else Summed(mlp, self._ranks.all_sum)

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
    name = f"layers.{index}"
    return LayerWeights(
        input_norm=loader.optional_norm(f"{name}.input_norm"),
        qkv=loader.linear(f"{name}.qkv"),
        o=loader.linear(f"{name}.o"),
        mlp_norm=loader.optional_norm(f"{name}.mlp_norm"),
        mlp=_mlp(loader, description, index),
        qk_norm=_qk_norm(loader, description, name) if description.qk_norm else None,
        after_attention_norm=loader.optional_norm(f"{name}.after_attention_norm"),
        after_mlp_norm=loader.optional_norm(f"{name}.after_mlp_norm"),
        sinks=loader.sinks(f"{name}.sinks") if description.attention_sinks else None,
        latent=_latent(loader, description, name) if description.latent is not None else None,
    )


def _latent(loader: _Loader, description: DecoderDescription, name: str) -> LatentWeights:
    reader = loader.reader
    return LatentWeights(
        norm=reader.owned(f"{name}.latent_norm"),
        up=reader.plain_matrix(f"{name}.latent_up").unflatten(0, (description.num_heads, -1)),
        query_norm=reader.owned(f"{name}.q_latent_norm") if reader.has(f"{name}.q_latent_norm") else None,
        query_up=loader.linear(f"{name}.q_up") if reader.has(f"{name}.q_up.weight") else None,
    )


def _qk_norm(loader: _Loader, description: DecoderDescription, name: str) -> Tensor:
    heads = ((f"{name}.q_norm", description.num_heads), (f"{name}.k_norm", description.num_kv_heads))
    rows = [loader.reader.tensor(norm).view(-1, description.head_dim).expand(count, -1) for norm, count in heads]
    norms = torch.cat(rows)
    return norms + 1.0 if description.norm == "rms_plus_one" else norms


def _mlp(loader: _Loader, description: DecoderDescription, index: int) -> Mlp:
    name, activation = f"layers.{index}", description.activation
    if description.experts is not None and description.has_experts(index):
        return _expert_mlp(loader, description, description.experts, name)
    up, down = loader.linear(f"{name}.up"), loader.linear(f"{name}.down")
    return loader.operations.mlp(up, down, activation, description.gated_mlp)


def _expert_mlp(loader: _Loader, description: DecoderDescription, experts: Experts, name: str) -> Mlp:
    activation, shared = description.activation, None
    if experts.shared_intermediate_size:
        # The results of the shared expert are summed over ranks together with those of the other experts.
        inner = loader.part(f"{name}.shared.up"), loader.part(f"{name}.shared.down")
        mlp = loader.operations.mlp(*inner, activation, gated=True)
        shared = SharedExpert(mlp, loader.linear(f"{name}.shared.gate") if experts.shared_gate else None)
    up, down = (loader.experts(f"{name}.experts.{part}", experts.num_experts) for part in ("up", "down"))
    up_bias, down_bias = (loader.expert_bias(f"{name}.experts.{part}", experts.num_experts) for part in ("up", "down"))
    router: Linear | ExactRouter
    correction = None
    if experts.correction:
        correction = loader.reader.exact(f"{name}.router.correction").flatten()
    if experts.correction or experts.exact_router:
        router = ExactRouter(loader.operations.linear(loader.reader.exact(f"{name}.router.weight")))
    else:
        router = loader.linear(f"{name}.router")
    parts = ExpertParts(
        experts=experts,
        router=router,
        gate_up=up,
        down=down,
        activation=activation,
        shared=shared,
        correction=correction,
        up_bias=up_bias,
        down_bias=down_bias,
    )
    return loader.mixture(parts)


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
