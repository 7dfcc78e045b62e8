"""Makes a decoder's weights from a checkpoint, one parameter after the other.

A parameter's tensors are joined, converted and packed before the next parameter is read, so that loading needs little
more memory than the model itself. Raises a `ServiceError` that names the tensors if the checkpoint does not fit its
config. Called by the torch worker and the Triton worker at start-up.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.engine.models.decoder import DecoderWeights, LayerWeights
from services.engine.models.description import DecoderDescription, Experts
from services.engine.models.layout import Parameter, ignored_names
from services.engine.models.linear import Linear, can_pack
from services.engine.models.mlp import ExpertParts, Mlp, SharedExpert
from services.engine.models.norm import Norm
from services.engine.models.operations import TORCH_OPERATIONS, Operations
from services.engine.worker.checkpoint import Checkpoint


def load_weights(
    model_dir: Path,
    description: DecoderDescription,
    layout: tuple[Parameter, ...],
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations = TORCH_OPERATIONS,
) -> DecoderWeights:
    """Returns the decoder's weights on the device, in the forms that the operations use."""
    with Checkpoint(model_dir) as checkpoint:
        checkpoint.check(layout, ignored_names(description))
        loader = _Loader(checkpoint, description, layout, dtype, device, operations)
        embedding = loader.tensor("embedding")
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(_layer(loader, description, index) for index in range(description.num_layers)),
            final_norm=loader.norm("final_norm"),
            head=_head(embedding, loader, description),
            positions=loader.owned("positions") if loader.has("positions") else None,
        )


class _Loader:
    """Reads parameters by name."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        description: DecoderDescription,
        layout: tuple[Parameter, ...],
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
    ) -> None:
        self._checkpoint, self._description, self.operations = checkpoint, description, operations
        self._parameters = {parameter.name: parameter for parameter in layout}
        self._dtype, self._device = dtype, device

    def has(self, name: str) -> bool:
        return name in self._parameters

    def tensor(self, name: str) -> Tensor:
        return self._checkpoint.read(self._parameters[name], self._dtype, self._device)

    def owned(self, name: str) -> Tensor:
        """Returns a tensor, copied if it would be the file's mapped pages.

        Every step reads the tensor, and the system could evict mapped pages.
        """
        return self.tensor(name).clone() if self.is_mapped(name) else self.tensor(name)

    def linear(self, name: str) -> Linear:
        packs = can_pack(self._dtype, self._device)
        weight = (self.tensor if packs else self.owned)(f"{name}.weight")
        return self.operations.linear(weight, self._bias(name))

    def norm(self, name: str) -> Norm:
        d = self._description
        return self.operations.norm(d.norm, self.owned(f"{name}.weight"), self._bias(name), d.norm_eps)

    def optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if self.has(f"{name}.weight") else None

    def is_mapped(self, name: str) -> bool:
        return self._checkpoint.is_mapped(self._parameters[name], self._dtype, self._device)

    def _bias(self, name: str) -> Tensor | None:
        return self.owned(f"{name}.bias") if self.has(f"{name}.bias") else None


def _layer(loader: _Loader, description: DecoderDescription, index: int) -> LayerWeights:
    name = f"layers.{index}"
    return LayerWeights(
        input_norm=loader.norm(f"{name}.input_norm"),
        qkv=loader.linear(f"{name}.qkv"),
        o=loader.linear(f"{name}.o"),
        mlp_norm=loader.optional_norm(f"{name}.mlp_norm"),
        mlp=_mlp(loader, description, index),
        qk_norm=_qk_norm(loader, description, name) if description.qk_norm else None,
        after_attention_norm=loader.optional_norm(f"{name}.after_attention_norm"),
        after_mlp_norm=loader.optional_norm(f"{name}.after_mlp_norm"),
    )


def _qk_norm(loader: _Loader, description: DecoderDescription, name: str) -> Tensor:
    heads = ((f"{name}.q_norm", description.num_heads), (f"{name}.k_norm", description.num_kv_heads))
    norms = torch.cat([loader.tensor(norm).expand(count, -1) for norm, count in heads])
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
        inner = loader.linear(f"{name}.shared.up"), loader.linear(f"{name}.shared.down")
        mlp = loader.operations.mlp(*inner, activation, gated=True)
        shared = SharedExpert(mlp, loader.linear(f"{name}.shared.gate"))
    up, down = (loader.owned(f"{name}.experts.{part}.weight") for part in ("up", "down"))
    count = experts.num_experts
    up, down = up.unflatten(0, (count, -1)), down.unflatten(0, (count, -1))
    router = loader.linear(f"{name}.router")
    return loader.operations.expert_mlp(ExpertParts(experts, router, up, down, activation, shared))


def _head(embedding: Tensor, loader: _Loader, description: DecoderDescription) -> Linear:
    """Returns the output projection.

    Packing a tied head makes a second copy of the embedding matrix, so a tied head is packed only if the embedding is
    the file's mapped pages and takes no memory of its own.
    """
    if description.tied_embeddings:
        make = loader.operations.linear if loader.is_mapped("embedding") else loader.operations.unpacked_linear
        return make(embedding)
    if description.normalised_head:
        return loader.operations.linear(F.normalize(loader.tensor("head.weight")))
    return loader.linear("head")
