"""What the engine's settings must satisfy before anything is loaded; what depends on the model comes later.

Pure. Called by the engine when it starts and by the launcher before it starts anything.
"""

from shared.config import EngineSettings, SettingsError


def check_engine(settings: EngineSettings) -> None:
    """Raises `SettingsError` naming the first flag that cannot be, what it is and what is allowed."""
    _check_bounds(settings)
    _check_memory(settings)


def check_token_budget(max_num_batched_tokens: int, max_model_len: int, *, chunked: bool) -> None:
    """Without chunked prefill every prompt must fit into one step. Raises `SettingsError`."""
    if not chunked and max_num_batched_tokens < max_model_len:
        raise SettingsError(
            f"--max-num-batched-tokens: {max_num_batched_tokens} is less than the context of {max_model_len} tokens, "
            "so that a long prompt would not fit into a step. Raise it, lower --max-model-len, or leave "
            "--enable-chunked-prefill on, which splits prompts over steps."
        )


def _check_bounds(settings: EngineSettings) -> None:
    _at_least(1, "max-num-seqs", settings.max_num_seqs)
    _at_least(1, "max-num-batched-tokens", settings.max_num_batched_tokens)
    _at_least(1, "max-model-len", settings.max_model_len)
    _at_least(0, "threads", settings.threads)
    delay = settings.scheduler_delay_factor
    if not 0.0 <= delay < float("inf"):
        raise SettingsError(f"--scheduler-delay-factor: {delay:g} is not 0 or more")
    budget = settings.max_num_batched_tokens
    if budget is not None and budget < settings.max_num_seqs:
        raise SettingsError(
            f"--max-num-batched-tokens: {budget} is less than --max-num-seqs {settings.max_num_seqs}: each running "
            "sequence computes at least one token a step. Raise the first or lower the second."
        )


def _check_memory(settings: EngineSettings) -> None:
    share = settings.gpu_memory_utilization
    if not 0.0 < share <= 1.0:
        raise SettingsError(f"--gpu-memory-utilization: {share:g} is not a share above 0 and at most 1, such as 0.9")
    size = settings.block_size
    if size < 1 or size & (size - 1):
        raise SettingsError(f"--block-size: {size} is not a power of two, such as 16")
    _at_least(1, "num-gpu-blocks-override", settings.num_gpu_blocks_override)
    ratio = settings.kv_cache_ratio
    if ratio is not None and not 0.0 <= ratio <= 1.0:
        raise SettingsError(f"--kv-cache-ratio: {ratio:g} is not a share between 0 and 1, such as 0.75")
    if settings.swap_space is not None and not 0.0 <= settings.swap_space < float("inf"):
        raise SettingsError(f"--swap-space: {settings.swap_space:g} is not 0 GiB or more")
    if not settings.kv_cache_memory_gb > 0.0:
        raise SettingsError(f"--kv-cache-memory-gb: {settings.kv_cache_memory_gb:g} is not above 0 GiB")


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise SettingsError(f"--{name}: {value} is less than {least}")
