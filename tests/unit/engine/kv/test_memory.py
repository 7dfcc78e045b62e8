"""Blocks in the common form: every backend's cache gives and takes the same bytes."""

import numpy as np
import pytest
import torch

from antiphon.services.engine.backends.cpu.kv_memory import PanelMemory
from antiphon.services.engine.kv.layout import KvMemory, place_bytes
from antiphon.services.engine.kv.pieces import NativeCopy, checksum
from antiphon.services.engine.models.families import llama
from antiphon.services.engine.worker.capacity.kv_cache import KvCache
from antiphon.services.engine.worker.capacity.kv_memory import CacheMemory, blocks_of, packed_blocks
from tests.models import small_config
from tests.native.libraries import library

LAYERS, BLOCKS, SIZE, HEADS, DIM = 2, 5, 64, 2, 24
DESCRIPTION = llama.describe(small_config("llama", num_hidden_layers=LAYERS, num_key_value_heads=HEADS, head_dim=DIM))


@pytest.fixture(params=["numpy", "library"])
def native(request: pytest.FixtureRequest) -> NativeCopy | None:
    return library().copy_block if request.param == "library" else None


def cache(dtype: torch.dtype, dim: int, size: int) -> KvCache:
    """Zeros."""
    parts = [torch.zeros((BLOCKS, size, HEADS, dim), dtype=dtype) for _ in range(2 * LAYERS)]
    return KvCache(tuple(parts[0::2]), tuple(parts[1::2]))


def same_memory(
    kind: str, dtype: torch.dtype, size: int, model: torch.dtype, native: NativeCopy | None = None
) -> KvMemory:
    """A memory whose host blocks are the blocks of its cache, so that what is written can be read."""
    if kind == "packed":
        words = torch.zeros((BLOCKS, 2 * LAYERS, size * HEADS * DIM), dtype=dtype)
        parts = [words[:, part].view(BLOCKS, size, HEADS, DIM) for part in range(2 * LAYERS)]
        both = KvCache(tuple(parts[0::2]), tuple(parts[1::2]))
        return CacheMemory(both, packed_blocks(words.view(torch.int16), native), native)
    if kind == "panels":
        both = cache(dtype, 32, size)
        return PanelMemory(both, both, DESCRIPTION, model, native)
    both = cache(dtype, DIM, size)
    return CacheMemory(both, blocks_of(both, native), native)


@pytest.mark.parametrize("kind", ["packed", "panels", "plain"])
@pytest.mark.parametrize(
    ("dtype", "model"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 16, 64, 128])
def test_what_is_written_is_read(
    kind: str, dtype: torch.dtype, model: torch.dtype, size: int, native: NativeCopy | None
) -> None:
    memory = same_memory(kind, dtype, size, model, native)
    layout = memory.layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_bytes) == (LAYERS, HEADS, DIM * dtype.itemsize)
    draw = np.random.default_rng(1)
    for count in {1, size, max(1, size // 2 + 1)}:
        data = draw.integers(0, 256, layout.shape(count), dtype=np.uint8)
        assert data.nbytes == layout.num_bytes(count)
        assert memory.write(3, data) == checksum(data)
        found = np.zeros(layout.shape(count), dtype=np.uint8)
        assert memory.read(3, found) == checksum(data)
        assert np.array_equal(found, data)
        other = np.ones(layout.shape(size), dtype=np.uint8)
        memory.read(2, other)
        assert not other.any(), "another block was written to"


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_the_form_is_keys_then_values_of_each_layer(kind: str) -> None:
    memory = same_memory(kind, torch.float32, 16, torch.float32)
    numbers = np.arange(memory.layout.num_bytes(16) // 4, dtype=np.float32).reshape(LAYERS, 2, 16, HEADS, DIM)
    memory.write(1, numbers.view(np.uint8))
    caches = memory._cache  # type: ignore[attr-defined] # pyright: ignore[reportPrivateUsage]
    for layer in range(LAYERS):
        for which in range(2):
            assert torch.equal(caches[2 * layer + which][1], torch.from_numpy(numbers[layer, which]))


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
def test_engines_with_the_same_panels_exchange_them_as_they_are(
    size: int, model: torch.dtype, native: NativeCopy | None
) -> None:
    ours, theirs = (same_memory("panels", model, size, model, native) for _ in range(2))
    assert ours.own is not None
    assert theirs.own is not None
    assert ours.own.name == theirs.own.name
    data = np.random.default_rng(1).integers(0, 256, ours.layout.shape(size), dtype=np.uint8)
    ours.write(2, data)
    passed = np.zeros(ours.own.cache.num_bytes, dtype=np.uint8)
    assert ours.own.cache.read(2, passed) == theirs.own.host.write(4, passed) == checksum(passed)
    found = np.zeros_like(data)
    theirs.read(4, found)
    assert np.array_equal(found, data)
    assert place_bytes(ours) == passed.size > data.size


def test_panels_of_models_with_other_types_have_another_form() -> None:
    """With a cache of 8 bits their layouts are equal, and the order of the numbers is not."""
    dtype = torch.float8_e4m3fn
    one, other = (same_memory("panels", dtype, 16, model) for model in (torch.float32, torch.bfloat16))
    assert one.layout == other.layout
    assert one.own is not None
    assert other.own is not None
    assert one.own.name != other.own.name
