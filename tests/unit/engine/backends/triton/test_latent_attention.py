"""The kernels of latent attention against the reference: attention over rows, and what makes and stores rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.triton.kernels.attention import attention_work
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import (
    DeviceWork,
    Geometry,
    plan_work,
)
from antiphon.services.engine.backends.triton.kernels.attention.latent_attention import (
    RowShape,
    attend_few_latents,
    attend_many_latents,
)
from antiphon.services.engine.backends.triton.kernels.attention.latent_rows import store_latents
from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import make_table
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.kernels.rotary import make_rotation, rotate
from antiphon.services.engine.kernels.splits import SHORT_SPLITS, SPLIT_TOKENS
from antiphon.services.engine.kernels.storage import as_stored
from antiphon.services.engine.models.description import LatentAttention
from tests.unit.engine.backends.triton.close import assert_close
from tests.unit.engine.backends.triton.test_attention import DECODES, Case, Heads, put

ROPE = 8


def absorbed_only(rank: int) -> LatentAttention:
    """Keys and values so wide that it is never cheaper to compute them."""
    return LatentAttention(rank=rank, rope_dim=ROPE, nope_dim=rank, value_dim=rank)


class LatentCase(Case):
    """Rows of latents, which are key and value of all heads. The heads' width is that of a row."""

    def __init__(self, lengths: list[tuple[int, int]], heads: Heads) -> None:
        super().__init__(lengths, heads)
        self.rank = heads.head_dim - ROPE
        self.queries, self.caches = self.queries.contiguous(), [self.caches[0]] * 2

    def work_heads(self) -> attention_work.Heads:
        return replace(super().work_heads(), latent=absorbed_only(self.rank))

    def attend(self, work: DeviceWork, attended: torch.Tensor, geometry: Geometry) -> None:
        row = RowShape(self.rank, ROPE, geometry.scale)
        latents = attended[..., : self.rank].contiguous()
        absorbed, turned = (part.contiguous() for part in self.queries.split((self.rank, ROPE), dim=2))
        if work.few is not None:
            attend_few_latents(absorbed, turned, self.caches[0], latents, work, row)
        if work.many is not None:
            attend_many_latents(absorbed, turned, self.caches[0], latents, work, row)
        attended[..., : self.rank] = latents

    def check(self, factor: float = 1.0) -> None:
        assert_close(self.ours()[..., : self.rank], self.expected()[..., : self.rank], factor)


def latents(group: int, rank: int, dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None) -> Heads:
    return Heads(kv_heads=1, group=group, head_dim=rank + ROPE, dtype=dtype, cache_dtype=cache)


VARIANTS = [
    latents(16, 32),
    latents(3, 24),
    latents(40, 16, torch.float16),
    latents(5, 16, torch.bfloat16, torch.float8_e4m3fn),
    latents(2, 64, cache=torch.float8_e5m2),
]
"""Heads in one block of a program and in several, ranks that are padded, types."""


@pytest.mark.parametrize("heads", VARIANTS, ids=str)
def test_decoding_sequences_attend_to_what_the_reference_does(heads: Heads) -> None:
    LatentCase(DECODES, heads).check()


@pytest.mark.parametrize("heads", VARIANTS, ids=str)
def test_chunks_beside_decoding_sequences_attend_to_what_the_reference_does(heads: Heads) -> None:
    case = LatentCase([(5, 40), (30, 1), (3, 3), (0, 17)], heads)
    assert plan_work(case.sequences, torch.zeros(1), None, case.work_heads(), put).many is not None
    case.check()


def test_a_chunk_of_several_tiles_of_queries_and_keys_attends_to_what_the_reference_does() -> None:
    LatentCase([(100, 70), (0, 64), (63, 65)], latents(4, 16)).check()


def test_a_sequence_with_long_splits_attends_to_what_the_reference_does() -> None:
    LatentCase([(SHORT_SPLITS * SPLIT_TOKENS + 9, 1)], replace(latents(3, 16), block_size=64)).check()


def test_guesses_of_any_number_of_heads_are_checked_by_the_kernel_for_few_queries() -> None:
    """With so many heads splits are twice as long; the first sequence has two."""
    case = LatentCase([(2 * SPLIT_TOKENS - 1, 2), (0, 1)], latents(64, 16))
    assert plan_work(case.sequences, torch.zeros(1), None, case.work_heads(), put).many is None
    case.check()


def test_a_sequence_gets_the_same_bits_whatever_is_beside_it_and_padding_stores_nothing() -> None:
    together = LatentCase([(SPLIT_TOKENS + 9, 1), (400, 1), (20, 1)], latents(3, 16))
    room = attention_work.Room(few=5, items=40, queries=1, many=0, tiles=0)
    crowded = together.ours(room, padding=2)[..., :16]
    assert (crowded[3:] == 7.0).all()
    together.sequences = together.sequences.take(np.array([0]))
    assert torch.equal(together.ours()[0, :, :16], crowded[0])


def test_splits_are_longer_where_partial_results_are_wider() -> None:
    usual = attention_work.Heads(group=128, head_dim=576, itemsize=2, stored_itemsize=2)
    assert [replace(usual, group=heads, latent=absorbed_only(512)).split_tokens for heads in (16, 32, 64, 128)] == [
        SPLIT_TOKENS,
        SPLIT_TOKENS,
        2 * SPLIT_TOKENS,
        4 * SPLIT_TOKENS,
    ]
    assert usual.split_tokens == SPLIT_TOKENS


@pytest.mark.parametrize(
    ("heads", "rotary", "interleaved", "dtype"),
    [
        (3, 8, True, torch.float32),
        (9, 8, False, torch.float32),
        (2, 4, True, torch.float16),
        (2, 4, False, torch.bfloat16),
        (9, 0, False, torch.float32),
        (2, 0, False, torch.bfloat16),
    ],
)
def test_rows_are_normed_rotated_and_stored_and_queries_rotated_as_the_reference_does(
    heads: int, rotary: int, interleaved: bool, dtype: torch.dtype
) -> None:
    rank, nope, count, eps = 12, 6, 5, 1e-6
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    # Queries lie in the same rows as the latents, as where they are made of the hidden states.
    projected, norm = draw(count, heads * (nope + ROPE) + rank + ROPE), draw(rank)
    queries = projected[:, : heads * (nope + ROPE)].unflatten(1, (heads, nope + ROPE))
    positions, slots = torch.tensor([0, 3, 40, 7, 1]), torch.tensor([9, 0, 17, -1, 4])
    frequencies = 1.0 / (100.0 ** (torch.arange(0, rotary, 2) / max(rotary, 1)))
    cache, turned = torch.zeros(2, 16, 1, rank + ROPE, dtype=dtype), torch.full((count, heads, ROPE), 7.0).to(dtype)
    store_latents(
        projected, queries, turned, positions.to(torch.int32), slots.to(torch.int32), cache,
        make_table(frequencies, 1.2, 64, dtype) if rotary else None, interleaved, norm, eps,
    )  # fmt: skip
    rotation = make_rotation(positions, frequencies, 1.2, dtype, interleaved)
    assert_close(turned, rotate(queries[..., nope:], rotation), 2.0)
    latent, key = projected[:, -rank - ROPE :].split((rank, ROPE), dim=1)
    rows = torch.cat((rms_norm(latent, norm, eps), rotate(key.unsqueeze(1), rotation).squeeze(1)), dim=1)
    expected = torch.zeros(32, rank + ROPE, dtype=dtype)
    expected[slots[slots >= 0]] = rows[slots >= 0]
    assert_close(cache.flatten(0, 2), expected, 2.0)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_8_bit_cache_gets_clamped_rows_in_its_type(cache_dtype: torch.dtype) -> None:
    """With numbers that the type has: what is between them the interpreter rounds wrongly."""
    rank, norm = 16, torch.tensor([1.0, -2.0, 3.5, 0.25] * 4, dtype=torch.float16)
    norm[5] = 60_000.0
    projected = torch.ones(1, rank + ROPE, dtype=torch.float16)
    projected[0, -ROPE:] = torch.tensor([1.0, -1.0, 2.0, 4.0, -60_000.0, 0.5, 6.0, 7.0])
    cache, queries = as_stored(torch.zeros(1, 4, 1, rank + ROPE), cache_dtype), torch.zeros(1, 1, ROPE).half()
    word = torch.zeros(1, dtype=torch.int32)
    table = make_table(torch.ones(ROPE // 2), 1.0, 4, torch.float16)
    turned = queries.new_zeros(1, 1, ROPE)
    store_latents(projected, queries, turned, word, word + 2, cache, table, True, norm, 0.0)
    expected = as_stored(torch.cat((norm, projected[0, -ROPE:])), cache_dtype)
    assert torch.equal(cache[0, 2, 0].float(), expected.float())
    assert expected.float().abs().max() == torch.finfo(cache_dtype).max
