"""Norms, activations, rotation and cache writes, block moves: against the reference, odd sizes and types."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import activated
from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import make_table, rotate_and_store
from antiphon.services.engine.backends.triton.kernels.blocks import copy_blocks, gather_blocks, scatter_blocks
from antiphon.services.engine.backends.triton.kernels.norm import normed
from antiphon.services.engine.backends.triton.kernels.step_inputs import known_ids, scatter_words
from antiphon.services.engine.kernels.activation import ACTIVATIONS, xielu, xielu_numbers
from antiphon.services.engine.kernels.activation import gated as reference_gated
from antiphon.services.engine.kernels.paged_attention import write_kv
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.kernels.rotary import make_rotation, rotate
from tests.unit.engine.backends.triton.close import assert_close

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [False, True])
def test_an_rms_norm_is_the_references(dtype: torch.dtype, added: bool) -> None:
    x, residual, weight = draw(3, 100, dtype=dtype), draw(3, 100, seed=1, dtype=dtype), draw(100, seed=2, dtype=dtype)
    expected = rms_norm(x.float(), weight.float(), 1e-5) + (residual.float() if added else 0.0)
    assert_close(normed(x, weight, None, 1e-5, residual if added else None), expected.to(dtype))


def test_a_norm_by_one_plus_weight_has_its_factor_in_float32() -> None:
    x, factor = draw(2, 48, dtype=torch.bfloat16), 1.0 + draw(48, seed=1)
    assert_close(normed(x, factor, None, 1e-6), rms_norm(x.float(), factor, 1e-6).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_norm_is_the_references_for_rows_of_a_wider_matrix(dtype: torch.dtype) -> None:
    x, weight, bias = draw(4, 150, dtype=dtype)[:, :97], draw(97, seed=1), draw(97, seed=2)
    expected = F.layer_norm(x.float(), (97,), weight, bias, 1e-5).to(dtype)
    assert_close(normed(x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_alone_and_gated_are_the_references(kind: str, dtype: torch.dtype) -> None:
    x = 3 * draw(3, 2 * 1030, dtype=dtype)
    assert_close(activated(x, kind, gated=True), reference_gated(ACTIVATIONS[kind], x.float()).to(dtype))
    assert_close(activated(x, kind, gated=False), ACTIVATIONS[kind](x.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_with_numbers_is_the_reference_also_near_zero(dtype: torch.dtype) -> None:
    numbers = xielu_numbers(torch.tensor([0.2, -0.8, 0.5, -1e-6]))
    x = torch.cat((3 * draw(3, 1030, dtype=dtype), 1e-3 * draw(3, 40, seed=1, dtype=dtype), torch.zeros(3, 1)), dim=1)
    x = x.to(dtype).contiguous()
    assert_close(activated(x, "xielu", gated=False, numbers=numbers), xielu(numbers, x.float()).to(dtype))


class Projected:
    """The product of a step with its slots: one token is padding."""

    HEADS, KV_HEADS, BLOCK_SIZE = 5, 2, 4

    def __init__(
        self, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None, shared_by: int = 1
    ) -> None:
        """`shared_by`: number of layers of this width in a tensor of the cache; this one is the last."""
        self.qkv = draw(4, (self.HEADS + 2 * self.KV_HEADS) * head_dim, dtype=dtype)
        self.positions = torch.tensor([0, 7, 300, 2], dtype=torch.int32)
        self.slots = torch.tensor([9, 0, 14, -1], dtype=torch.int32)
        shape = (5, self.BLOCK_SIZE, shared_by, self.KV_HEADS, head_dim)
        self.wholes = [torch.zeros(shape, dtype=cache_dtype or dtype) for _ in range(2)]
        self.caches = [whole[:, :, -1] for whole in self.wholes]
        self.frequencies = 1.0 / 100.0 ** (torch.arange(0, 16, 2) / 16)

    def expected(
        self, interleaved: bool | None, norm: Tensor | None, *, values_normed: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Queries and caches by the reference."""
        heads = self.qkv.view(4, -1, self.caches[0].shape[-1]).float()
        turning, values = heads.split((self.HEADS + self.KV_HEADS, self.KV_HEADS), dim=1)
        if norm is not None:
            turning = rms_norm(turning, None, 1e-6) * norm.float()
        if values_normed:
            values = rms_norm(values, None, 1e-6)
        if interleaved is not None:
            cos_type = make_rotation(self.positions, self.frequencies, 1.5, self.qkv.dtype, interleaved)
            rotation = make_rotation(self.positions, self.frequencies, 1.5, torch.float32, interleaved)
            rotation.cos.copy_(cos_type.cos)
            rotation.sin.copy_(cos_type.sin)
            turning = rotate(turning, rotation)
        queries, keys = turning.to(self.qkv.dtype).split((self.HEADS, self.KV_HEADS), dim=1)
        caches = [cache.clone() for cache in self.caches]
        write_kv(keys[:3], values.to(self.qkv.dtype)[:3], caches[0], caches[1], self.slots[:3].long())
        return queries, caches


@pytest.mark.parametrize(
    ("head_dim", "interleaved", "normed_heads", "dtype"),
    [
        (16, False, False, torch.float32),
        (24, True, True, torch.float32),
        (20, False, True, torch.float32),
        (12, None, False, torch.float32),
        (16, False, True, torch.float16),
        (24, True, False, torch.bfloat16),
    ],
)
def test_queries_turn_in_place_and_keys_and_values_go_to_their_slots(
    head_dim: int, interleaved: bool | None, normed_heads: bool, dtype: torch.dtype
) -> None:
    step = Projected(head_dim, dtype)
    norm = 1.0 + draw(7, head_dim, seed=3, dtype=dtype) if normed_heads else None
    queries, caches = step.expected(interleaved, norm)
    table = None if interleaved is None else make_table(step.frequencies, 1.5, 301, dtype)
    keys, values = step.caches
    rotate_and_store(
        step.qkv, step.positions, step.slots, keys, values, step.HEADS, table, bool(interleaved), norm, 1e-6
    )
    ours = step.qkv.view(4, -1, head_dim)[:, : step.HEADS]
    assert_close(ours[:3].contiguous(), queries[:3].contiguous())
    for mine, theirs in zip(step.caches, caches, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_frequency_turns_by_the_position_on_its_axis(interleaved: bool) -> None:
    step = Projected(20, torch.float32)
    axes, spatial = torch.tensor([0, 0, 1, 2, 1, 2, 2, 0]), torch.tensor([[0, 7, 300, 2], [5, 7, 3, 2], [9, 7, 44, 2]])
    step.positions = spatial.t().index_select(1, axes)
    queries, caches = step.expected(interleaved, None)
    table, (keys, values) = make_table(step.frequencies, 1.5, 301, torch.float32), step.caches
    # The rows of a step's positions lie further apart than it has tokens.
    positions = torch.full((3, 8), 99_999, dtype=torch.int32)[:, :4].copy_(spatial)
    rotate_and_store(
        step.qkv, positions, step.slots, keys, values, step.HEADS, table, interleaved, axes=axes.to(torch.int32)
    )
    assert_close(step.qkv.view(4, -1, 20)[:3, : step.HEADS].contiguous(), queries[:3].contiguous())
    for mine, theirs in zip(step.caches, caches, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize(("head_dim", "interleaved"), [(16, False), (20, False), (24, True), (12, None)])
def test_values_are_normed_and_go_to_the_part_of_a_tensor_that_is_the_layers(
    head_dim: int, interleaved: bool | None
) -> None:
    step = Projected(head_dim, torch.float32, shared_by=3)
    norm = 1.0 + draw(7, head_dim, seed=3, dtype=torch.float32)
    queries, caches = step.expected(interleaved, norm, values_normed=True)
    table = None if interleaved is None else make_table(step.frequencies, 1.5, 301, torch.float32)
    keys, values = step.caches
    rotate_and_store(
        step.qkv, step.positions, step.slots, keys, values, step.HEADS, table, bool(interleaved), norm, 1e-6,
        values_normed=True,
    )  # fmt: skip
    assert_close(step.qkv.view(4, -1, head_dim)[:3, : step.HEADS].contiguous(), queries[:3].contiguous())
    for mine, theirs in zip(step.caches, caches, strict=True):
        assert_close(mine.contiguous(), theirs)
    assert not any(whole[:, :, :-1].any() for whole in step.wholes)


def test_queries_without_keys_turn_in_place_and_nothing_is_stored() -> None:
    step = Projected(16, torch.float32)
    norm = 1.0 + draw(7, 16, seed=3, dtype=torch.float32)
    expected, _ = step.expected(False, norm)
    alone = step.qkv.view(4, -1, 16)[:, : step.HEADS].flatten(1).contiguous()
    table, (keys, values) = make_table(step.frequencies, 1.5, 301, torch.float32), step.caches
    rotate_and_store(
        alone, step.positions, step.slots, keys, values, step.HEADS, table, False, norm[: step.HEADS], 1e-6,
        values_normed=True,
    )  # fmt: skip
    assert_close(alone.view(4, -1, 16), expected)
    assert not keys.any()
    assert not values.any()


@pytest.mark.spec("S-SRV-036")
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_8_bit_cache_gets_clamped_values_in_its_type(cache_dtype: torch.dtype) -> None:
    step = Projected(16, torch.float16, cache_dtype)
    # Numbers that the type has: what is between them the interpreter rounds wrongly, a device is tested by itself.
    step.qkv = (8 * step.qkv).to(cache_dtype).to(torch.float16)
    step.qkv[0] *= 4096.0
    _, caches = step.expected(None, None)
    keys, values = step.caches
    rotate_and_store(step.qkv, step.positions, step.slots, keys, values, step.HEADS, None)
    for mine, theirs in zip(step.caches, caches, strict=True):
        assert torch.equal(mine.float(), theirs.float())
        assert mine.float().abs().max() == torch.finfo(cache_dtype).max


def test_blocks_are_copied_gathered_and_scattered_in_all_parts() -> None:
    cache = torch.arange(4 * 6 * 1500, dtype=torch.int64).view(4, 6, 1500)
    before = cache.clone()
    sources, targets = torch.tensor([5, 1], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    copy_blocks(cache, sources, targets)
    expected = before.clone()
    expected[:, [0, 4]] = before[:, [5, 1]]
    assert torch.equal(cache, expected)
    packed = torch.zeros(3, 4, 1500, dtype=torch.int64)
    gather_blocks(cache, torch.tensor([3, 0], dtype=torch.int32), packed)
    assert torch.equal(packed[0], cache[:, 3])
    assert torch.equal(packed[1], cache[:, 0])
    assert not packed[2].any()
    empty = torch.zeros_like(cache)
    scatter_blocks(packed, torch.tensor([2, 5], dtype=torch.int32), empty)
    assert torch.equal(empty[:, 2], cache[:, 3])
    assert np.flatnonzero(empty.flatten(2).any(dim=2).any(dim=0).numpy()).tolist() == [2, 5]


@pytest.mark.parametrize("count", [1, 7, 1000, 1025])
def test_tokens_that_the_host_does_not_know_come_from_their_rows(count: int) -> None:
    draws = torch.Generator().manual_seed(count)
    last = torch.randint(0, 2**31 - 1, (9,), generator=draws)
    ids = torch.randint(0, 1000, (count,), generator=draws, dtype=torch.int32)
    sources = torch.randint(-1, 9, (count,), generator=draws, dtype=torch.int32)
    expected = torch.where(sources < 0, ids, last[sources.clamp(min=0).long()].to(torch.int32))
    known_ids(ids, sources, last)
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("count", [1, 7, 1000, 1025])
def test_words_go_to_their_places_and_nowhere_else(count: int) -> None:
    draws = torch.Generator().manual_seed(count)
    table = torch.full((40, 50), -1, dtype=torch.int32)
    places = torch.randperm(table.numel(), generator=draws)[:count].to(torch.int32)
    words = torch.randint(0, 1000, (count,), generator=draws, dtype=torch.int32)
    expected = table.clone()
    expected.view(-1)[places.long()] = words
    scatter_words(table, places, words)
    assert torch.equal(table, expected)
