"""Experts with quantized matrices: the products of the weights that they stand for, read in their stored form."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.experts import mixed_experts
from antiphon.services.engine.backends.triton.kernels.grouped import PackedExperts, pack_experts
from antiphon.services.engine.backends.triton.operations import TritonOperations
from antiphon.services.engine.models.description import Experts
from antiphon.services.engine.models.layers.linear import DenseLinear
from antiphon.services.engine.models.layers.mlp import ExpertMlp, ExpertParts
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.services.engine.worker.loading.tensors import tensors_of
from tests.unit.engine.backends.triton.close import assert_close, assert_same_bits
from tests.unit.engine.backends.triton.test_quantized import KINDS, draw

EXPERTS, HIDDEN, INNER = 5, 96, 72
PACKED = [kind for kind in KINDS if kind != "int8_dynamic"]


def packed(kind: str, out: int, columns: int, dtype: torch.dtype) -> tuple[PackedExperts, Tensor]:
    """The matrices of all experts, and those that they stand for in float32."""
    weights = [KINDS[kind](draw(out, columns, seed=seed) / columns**0.5) for seed in range(EXPERTS)]
    found = pack_experts(weights, dtype)
    assert found is not None
    assert found.shape == (EXPERTS, out, columns)
    return found, torch.stack([weight.dequantized() for weight in weights])


def routed(tokens: int, per_token: int) -> tuple[Tensor, Tensor]:
    """Weights and experts of each token; one expert has none."""
    ranks = draw(tokens, EXPERTS - 1, seed=7)
    return ranks.topk(per_token).values.softmax(-1), ranks.topk(per_token).indices


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("tokens", [3, 70])
def test_packed_experts_compute_what_plain_ones_do(kind: str, tokens: int) -> None:
    (up, plain_up), (down, plain_down) = (
        packed(kind, *shape, torch.float32) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    x, residual = draw(tokens, HIDDEN, seed=1), draw(tokens, HIDDEN, seed=2)
    shares, chosen = routed(tokens, 2)
    biases = draw(EXPERTS, 2 * INNER, seed=3), draw(EXPERTS, HIDDEN, seed=4)
    ours, theirs = (
        mixed_experts(x, shares, chosen, *matrices, "swigluoai", residual, biases)
        for matrices in ((up, down), (plain_up, plain_down))
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["int4, groups of 32", "fp8, blocks of 64"])
@pytest.mark.parametrize("weighted", [False, True])
def test_experts_without_gates_and_with_weighted_inputs(kind: str, weighted: bool) -> None:
    (up, plain_up), (down, plain_down) = (
        packed(kind, *shape, torch.float32) for shape in ((INNER, HIDDEN), (HIDDEN, INNER))
    )
    x, (shares, chosen) = draw(9, HIDDEN, seed=1), routed(9, 3)
    ours, theirs = (
        mixed_experts(x, shares, chosen, *matrices, "relu2", None, (None, None), weighted, gated=False)
        for matrices in ((up, down), (plain_up, plain_down))
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_the_bits_are_near_those_of_dequantized_matrices(dtype: torch.dtype) -> None:
    (up, plain_up), (down, plain_down) = (
        packed("int4, groups of 32", *shape, dtype) for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    x, (shares, chosen) = draw(20, HIDDEN, seed=1, dtype=dtype), routed(20, 2)
    ours = mixed_experts(x, shares.to(dtype), chosen, up, down, "silu")
    exact = mixed_experts(x.float(), shares.to(dtype).float(), chosen, plain_up, plain_down, "silu")
    assert_close(ours, exact.to(dtype), factor=4)


def test_a_token_gets_the_same_bits_whatever_else_its_expert_has() -> None:
    up, down = (packed("int8", *shape, torch.float32)[0] for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    x, (shares, chosen) = draw(6, HIDDEN, seed=1), routed(6, 2)
    every = mixed_experts(x, shares, chosen, up, down, "silu")
    alone = mixed_experts(x[4:5].contiguous(), shares[4:5].contiguous(), chosen[4:5].contiguous(), up, down, "silu")
    assert_same_bits(every[4:5], alone)


def test_matrices_that_the_kernel_cannot_read_are_left_to_the_caller() -> None:
    def made(kind: str, seed: int = 0) -> QuantizedWeight:
        return KINDS[kind](draw(32, 64, seed=seed))

    ordered = replace(made("int4, groups of 32"), order=torch.arange(64, dtype=torch.int32))
    assert pack_experts([made("int8_dynamic")] * 2, torch.float32) is None
    assert pack_experts([ordered] * 2, torch.float32) is None
    assert pack_experts([made("int8"), made("fp8")], torch.float32) is None
    assert pack_experts([made("int8"), made("int8, groups of 16")], torch.float32) is None
    nf4 = made("nf4, groups of 64")
    other = replace(nf4, levels=torch.arange(16, dtype=torch.float32))
    assert pack_experts([nf4, other], torch.float32) is None
    equal = replace(nf4, levels=None if nf4.levels is None else nf4.levels.clone())
    assert pack_experts([nf4, equal], torch.float32) is not None


def test_quantized_matrices_are_in_memory_once() -> None:
    ups, downs = (
        tuple(KINDS["int8"](draw(*sizes, seed=seed) / 10) for seed in range(EXPERTS))
        for sizes in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    parts = ExpertParts(
        experts=Experts(
            num_experts=EXPERTS, num_per_token=2, normalise=True, intermediate_size=INNER, layers=frozenset({0})
        ),
        router=DenseLinear(draw(EXPERTS, HIDDEN), None),
        gate_up=ups,
        down=downs,
        activation="silu",
        shared=None,
    )
    mlp = TritonOperations(64, torch.float32).expert_mlp(parts)
    held = {tensor.data_ptr(): tensor.nbytes for _, tensor in tensors_of(mlp)}
    router = 4 * EXPERTS * HIDDEN
    # Columns are padded to a whole piece of 128, and an output has a scale. The first expert stays for its properties.
    assert sum(held.values()) - router == (EXPERTS + 1) * (2 * INNER + HIDDEN) * (128 + 4)
    x = draw(7, HIDDEN, seed=5)
    assert_close(mlp(x), ExpertMlp(parts)(x))
