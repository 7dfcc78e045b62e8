from dataclasses import replace
from typing import Any

import pytest
import torch

from antiphon.services.engine.models.description import DecoderDescription, RopeParameters
from antiphon.services.engine.models.kv_groups import freeing_windows
from antiphon.services.engine.worker.capacity.kv_cache import Budget, allocate_kv_cache, bytes_per_block, plan_kv_cache
from antiphon.services.engine.worker.capacity.paging import paging_of
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError

DESCRIPTION = DecoderDescription(
    family="llama",
    vocab_size=50,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_positions=256,
    rope=RopeParameters(rotary_dim=8),
    dtype="float32",
    sliding_windows=(None,) * 3,
)
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 4


def plan(budget_blocks: int, **overrides: Any) -> tuple[int, int]:
    settings = EngineSettings(**{"max_num_seqs": 4, "block_size": 16, **overrides})
    budget = Budget(budget_blocks * BLOCK_BYTES, 100 * BLOCK_BYTES)
    given = plan_kv_cache(settings, DESCRIPTION, torch.float32, budget, 10_000)
    return given.num_blocks, given.max_model_len


def test_a_block_is_keys_and_values_in_every_layer() -> None:
    assert bytes_per_block(DESCRIPTION, 16, torch.float32) == BLOCK_BYTES
    assert bytes_per_block(DESCRIPTION, 16, torch.bfloat16) == BLOCK_BYTES // 2


def test_there_are_never_more_blocks_than_the_rows_can_use() -> None:
    assert plan(10_000) == (4 * 16, 256)
    assert plan(10_000, max_model_len=100) == (4 * 7, 100)
    assert plan(40) == (40, 256)


def test_the_models_own_context_is_shortened_to_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(10) == (10, 160)
    assert plan(40, num_gpu_blocks_override=5) == (5, 80)
    assert "from 256 to 160 tokens" in caplog.text


@pytest.mark.parametrize("overrides", [{"max_model_len": 200}, {"max_model_len": 200, "num_gpu_blocks_override": 12}])
def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_a_way_out(overrides: dict[str, Any]) -> None:
    with pytest.raises(ServiceError, match=r"room for \d+ tokens.*--quantization=ifq.*--kv-cache-memory-gb"):
        plan(10, **overrides)


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ServiceError, match="room for 0 tokens"):
        plan(0)


@pytest.mark.spec("S-SRV-032")
@pytest.mark.parametrize("length", [257, 0, -5])
def test_a_context_beyond_the_models_own_is_refused(length: int) -> None:
    with pytest.raises(ServiceError, match="this model allows 1 to 256 tokens"):
        plan(100, max_model_len=length)


def test_more_blocks_than_there_is_memory_for_are_refused() -> None:
    assert plan(10, num_gpu_blocks_override=100) == (100, 256)
    with pytest.raises(ServiceError, match="num-gpu-blocks-override: 101 blocks"):
        plan(10, num_gpu_blocks_override=101)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_are_zeroed_and_apart(dtype: torch.dtype) -> None:
    cache = allocate_kv_cache(DESCRIPTION, 5, 16, dtype, torch.device("cpu"))
    tensors = cache.key_caches + cache.value_caches
    assert [(tuple(t.shape), t.dtype, t.any().item()) for t in tensors] == [((5, 16, 2, 8), dtype, False)] * 6
    tensors[0].fill_(1)
    assert not any(t.any() for t in tensors[1:])


def windowed(num_layers: int, each: int, window: int, kv_heads: int, head_dim: int) -> DecoderDescription:
    """Every `each`-th layer sees all tokens."""
    return replace(
        DESCRIPTION,
        num_layers=num_layers,
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=131_072,
        sliding_windows=tuple(None if layer % each == each - 1 else window for layer in range(num_layers)),
    )


@pytest.mark.parametrize(
    ("description", "context", "most"),
    [
        (windowed(62, 6, 1024, 16, 128), 32_768, 0.20),  # Gemma 3 27B
        (windowed(62, 6, 1024, 16, 128), 131_072, 0.18),
        (windowed(62, 6, 1024, 16, 128), 512, 1.13),  # the last group has layers to spare
        (windowed(36, 2, 128, 8, 64), 32_768, 0.51),  # gpt-oss 120B
        (windowed(64, 4, 4096, 8, 128), 32_768, 0.36),  # OLMo 3 32B
    ],
)
def test_long_contexts_take_a_fraction_if_blocks_behind_windows_are_freed(
    description: DecoderDescription, context: int, most: float
) -> None:
    settings = EngineSettings(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=context)
    freeing = freeing_windows(description)
    whole, groups = (paging_of(settings, one).most_blocks(context, 1) for one in (description, freeing))
    bytes_whole, bytes_groups = (bytes_per_block(one, 64, torch.bfloat16) for one in (description, freeing))
    assert groups * bytes_groups <= most * whole * bytes_whole
    assert groups * bytes_groups > (most - 0.03) * whole * bytes_whole
    # With the memory for one sequence at a time, the longest context is planned.
    room = paging_of(settings, freeing).most_blocks(context, 2048) * bytes_groups
    planned = plan_kv_cache(settings, freeing, torch.bfloat16, Budget(room, room), context)
    assert planned.max_model_len == context
    with pytest.raises(ServiceError, match="less than the context"):
        plan_kv_cache(settings, freeing, torch.bfloat16, Budget(room - bytes_groups, room), context)
