"""What the core counts from the engine's start, for heartbeats and metrics. Nothing here decides anything."""

from dataclasses import dataclass, field

from shared.messages import FinishReason


@dataclass(slots=True)
class Tally:
    """The running counts: plain ints that the core adds to, so that another thread may read them at any time."""

    step: int = 0
    """Steps planned."""
    prompt_tokens: int = 0
    """Prompt tokens of sequences that reached their first output token, cached ones included."""
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Tokens of sequences looked up when they first ran."""
    prefix_cache_hits: int = 0
    """Those of them found in the cache."""
    cached_tokens: int = 0
    """Prompt tokens that a first scheduling took from others instead of computing them."""
    preemptions: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    drafted_tokens: int = 0
    """Tokens guessed."""
    accepted_tokens: int = 0
    """Those of them that were right."""
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


@dataclass(frozen=True, slots=True)
class Counters:
    """A reading of the tally and of the present load. Between two steps all of it belongs together."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_blocks: int
    step: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    cached_tokens: int
    preemptions: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    drafted_tokens: int
    accepted_tokens: int
    finished: tuple[tuple[FinishReason, int], ...]
