"""Engine settings that cannot be are refused by name, with what is allowed."""

import pytest

from shared.config import EngineSettings, SettingsError
from shared.engine_rules import check_engine, check_token_budget


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"max_num_seqs": 0}, "--max-num-seqs: 0 is less than 1", marks=pytest.mark.spec("S-SRV-050")),
        pytest.param(
            {"max_num_batched_tokens": 100, "max_num_seqs": 101},
            "--max-num-batched-tokens: 100 is less than --max-num-seqs 101.*Raise the first or lower the second",
            marks=pytest.mark.spec("S-SRV-051"),
        ),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens: 0 is less than 1"),
        ({"max_model_len": 0}, "--max-model-len: 0 is less than 1"),
        ({"threads": -1}, "--threads: -1 is less than 0"),
        ({"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization: 0 is not a share above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.01}, "--gpu-memory-utilization: 1.01 is not a share"),
        ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization: nan is not a share"),
        ({"block_size": 24}, "--block-size: 24 is not a power of two"),
        ({"block_size": 0}, "--block-size: 0 is not a power of two"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override: 0 is less than 1"),
        ({"kv_cache_memory_gb": 0.0}, "--kv-cache-memory-gb: 0 is not above 0"),
        ({"kv_cache_ratio": 1.5}, "--kv-cache-ratio: 1.5 is not a share between 0 and 1"),
        ({"kv_cache_ratio": -0.1}, "--kv-cache-ratio"),
        ({"swap_space": -1.0}, "--swap-space: -1 is not 0 GiB or more"),
        ({"scheduler_delay_factor": -1.0}, "--scheduler-delay-factor: -1 is not 0 or more"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_its_value_and_what_is_allowed(changes, said):
    with pytest.raises(SettingsError, match=said):
        check_engine(EngineSettings(**changes))


@pytest.mark.spec("S-SRV-040", "S-SRV-106")
@pytest.mark.parametrize("share", [1e-9, 0.5, 1.0])
def test_every_share_of_the_memory_up_to_all_of_it_is_allowed(share):
    check_engine(EngineSettings(gpu_memory_utilization=share))


@pytest.mark.spec("S-SRV-041")
@pytest.mark.parametrize("size", [1, 2, 16, 64, 256])
def test_block_sizes_are_powers_of_two(size):
    check_engine(EngineSettings(block_size=size))
    with pytest.raises(SettingsError, match="--block-size"):
        check_engine(EngineSettings(block_size=-size))


def test_the_defaults_pass():
    check_engine(EngineSettings())


@pytest.mark.spec("S-SRV-051", "S-SRV-100")
def test_a_budget_below_the_context_needs_chunked_prefill():
    check_token_budget(64, 64, chunked=False)
    check_token_budget(1, 64, chunked=True)
    with pytest.raises(SettingsError, match="--max-num-batched-tokens: 63 is less than the context of 64 tokens"):
        check_token_budget(63, 64, chunked=False)
