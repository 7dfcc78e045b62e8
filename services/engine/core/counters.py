"""The core's counters since the engine's start, for heartbeats and metrics. They do not influence scheduling."""

from dataclasses import dataclass, field

from shared.messages import FinishReason


@dataclass(slots=True)
class Tally:
    """The live counters: plain ints that the core increments and that other threads may read at any time."""

    step: int = 0
    """Number of planned steps; also the number of the last plan that is not empty."""
    prompt_tokens: int = 0
    """Prompt tokens of sequences that reached their first output token, cached ones included."""
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Known tokens of sequences when they first joined, with prefix caching enabled."""
    prefix_cache_hits: int = 0
    """Part of `prefix_cache_queries`: tokens that were not computed, because their KV came from the prefix cache or a
    sibling.
    """
    cached_tokens: int = 0
    """Sum of `Sequence.num_cached_tokens`: prompt tokens reused instead of computed when sequences first joined."""
    preemptions: int = 0
    idle_preemptions: int = 0
    """Part of the preemptions: those of idle sequences."""
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    drafted_tokens: int = 0
    """Number of draft tokens."""
    accepted_tokens: int = 0
    """Number of accepted draft tokens."""
    drafts: int = 0
    """Number of times that draft tokens were planned for a sequence."""
    accepted_by_position: list[int] = field(default_factory=list[int])
    """How many draft tokens were accepted at each position of a draft."""
    kv_loads: int = 0
    """Number of KV transfers from other engines whose end a sequence waited for."""
    kv_failed_loads: int = 0
    """Number of transfers that delivered only a part of the requested KV, or for which there was no room."""
    kv_loaded_tokens: int = 0
    kv_saved_tokens: int = 0
    """Tokens whose KV was sent to other engines."""
    finished: dict[FinishReason, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})


@dataclass(frozen=True, slots=True)
class Counters:
    """A snapshot of the counters (`Tally`) and of the current load.

    It is consistent only if taken between two steps.
    """

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
    kv_loads: int
    kv_failed_loads: int
    kv_loaded_tokens: int
    kv_saved_tokens: int
    finished: tuple[tuple[FinishReason, int], ...]
    drafts: int = 0
    accepted_by_position: tuple[int, ...] = ()
    num_idle_running: int = 0
    """The idle sequences among `num_running`; likewise `num_idle_waiting` for the waiting ones."""
    num_idle_waiting: int = 0
    num_idle_waiting_tokens: int = 0
    idle_preemptions: int = 0
