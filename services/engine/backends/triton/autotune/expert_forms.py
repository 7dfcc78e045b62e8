"""The forms of a mixture of experts (`kernels.experts`), and what they are measured with."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.experts import library_experts, mixed_experts
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts
from antiphon.services.engine.kernels import experts as plain
from antiphon.services.engine.kernels.activation import ACTIVATIONS, gated_by
from antiphon.services.engine.models.description import ActivationKind


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows [n, hidden] with what a router has chosen for each: weights and experts [n, k]."""

    rows: Tensor
    shares: Tensor
    chosen: Tensor

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.rows)

    @property
    def shape(self) -> torch.Size:
        """[n, hidden]."""
        return self.rows.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the rows."""
        return self.rows.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The matrices of a layer's experts, and how they are used. See `mixed_experts`."""

    gate_up: Tensor | PackedExperts
    down: Tensor | PackedExperts
    biases: tuple[Tensor | None, Tensor | None]
    activation: ActivationKind
    gated: bool
    weighted_inputs: bool
    per_token: int
    """Number of experts for a token."""
    one_tile: bool

    @property
    def fits_library(self) -> bool:
        """Whether PyTorch's grouped product can multiply with these matrices."""
        return isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor) and not self.has_biases

    @property
    def has_biases(self) -> bool:
        """Whether experts have biases."""
        return any(bias is not None for bias in self.biases)

    @property
    def stored(self) -> str:
        """How the matrices are stored: "plain", or the kinds of quantized weights."""
        kinds = {"plain" if isinstance(each, Tensor) else each.like.kind for each in (self.gate_up, self.down)}
        return " and ".join(sorted(kinds))


def tile_experts(x: RoutedRows, weight: ExpertWeights, _: Tensor | None, residual: Tensor | None) -> Tensor:
    """Returns the mixture by own kernels. The product as a whole has no bias."""
    return mixed_experts(
        x.rows, x.shares, x.chosen, weight.gate_up, weight.down, weight.activation, residual, weight.biases,
        weighted_inputs=weight.weighted_inputs, gated=weight.gated, one_tile=weight.one_tile,
    )  # fmt: skip


def grouped_experts(x: RoutedRows, weight: ExpertWeights, _: Tensor | None, residual: Tensor | None) -> Tensor:
    """Returns the mixture by PyTorch's grouped product."""
    assert isinstance(weight.gate_up, Tensor)
    assert isinstance(weight.down, Tensor)
    return library_experts(
        x.rows, x.shares, x.chosen, weight.gate_up, weight.down, weight.activation, residual,
        weighted_inputs=weight.weighted_inputs, gated=weight.gated,
    )  # fmt: skip


def routed_like(weight: ExpertWeights, num_rows: int, like: Tensor) -> RoutedRows:
    """Returns random rows, of the type and on the device of `like`, for which experts are chosen equally often."""
    experts, hidden, _ = weight.down.shape
    generator = torch.Generator(like.device).manual_seed(hidden)
    draw = partial(torch.randn, generator=generator, device=like.device, dtype=torch.float32)
    best = draw((num_rows, experts)).topk(weight.per_token)
    shares = best.values.softmax(-1).to(like.dtype)
    return RoutedRows(draw((num_rows, hidden)).to(like.dtype), shares, best.indices)


def reference_experts(x: RoutedRows, weight: ExpertWeights) -> Tensor:
    """Returns the mixture in float32. Only one expert's matrices are in float32 at a time."""

    def products(matrices: Tensor | PackedExperts) -> list[plain.Product]:
        assert isinstance(matrices, Tensor)
        return [lambda rows, matrix=matrix: F.linear(rows, matrix.float()) for matrix in matrices]

    activation = gated_by(weight.activation) if weight.gated else ACTIVATIONS[weight.activation]
    return plain.mixed_experts(
        x.rows.float(), x.shares.float(), x.chosen, products(weight.gate_up), products(weight.down), activation,
        weight.weighted_inputs,
    )  # fmt: skip
