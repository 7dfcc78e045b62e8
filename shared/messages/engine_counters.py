"""The load and the counters of an engine, from its core to `GET /metrics`. See the package and CONTRIBUTING.md.

The engine's core counts in an `EngineCounters` itself, heartbeats carry a copy, and gateways export each field that has
a `Metric`.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from antiphon.shared.messages.base import Part
from antiphon.shared.messages.engine import KV_MISSES


@dataclass(frozen=True, slots=True)
class Metric:
    """How `GET /metrics` shows a field: the name (without `_total`) and the help text.

    `label` names the label of a field that is a tuple; its values are `values`, or else the positions.
    """

    name: str
    text: str
    label: str = ""
    values: tuple[str, ...] = ()


class EngineLoad(Part, frozen=True, array_like=True, kw_only=True):
    """What an engine has to do at present. Consistent only if taken between two steps."""

    num_free_blocks: int = 0
    num_running: Annotated[int, Metric("vllm:num_requests_running", "Sequences in the running batch")] = 0
    num_waiting: Annotated[int, Metric("vllm:num_requests_waiting", "Sequences waiting for a place")] = 0
    num_idle_running: Annotated[
        int, Metric("antiphon:engine_idle_running", "Sequences of the idle lane in the batch")
    ] = 0
    """Part of `num_running`. Likewise `num_idle_waiting` and `num_idle_waiting_tokens` are parts."""
    num_idle_waiting: Annotated[int, Metric("antiphon:engine_idle_waiting", "Sequences of the idle lane waiting")] = 0
    num_waiting_tokens: Annotated[int, Metric("antiphon:engine_waiting_tokens", "Prompt tokens waiting")] = 0
    num_idle_waiting_tokens: int = 0


class EngineCounters(msgspec.Struct, array_like=True, kw_only=True):
    """Counters since the start of the engine. They do not influence scheduling.

    A part that is not frozen: the core counts in one instance, which other threads may copy at any time.
    """

    prefix_cache_queries: Annotated[
        int, Metric("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache")
    ] = 0
    """Known tokens of sequences when they first joined, with prefix caching enabled."""
    prefix_cache_hits: Annotated[int, Metric("vllm:prefix_cache_hits", "Tokens found in the prefix cache")] = 0
    """Part of `prefix_cache_queries`: tokens that were not computed, because their KV came from the prefix cache or a
    sibling.
    """
    preemptions: Annotated[int, Metric("vllm:num_preemptions", "Sequences put back into the queue")] = 0
    idle_preemptions: Annotated[
        int, Metric("antiphon:engine_idle_preemptions", "Sequences of the idle lane that gave way")
    ] = 0
    """Part of the preemptions."""
    drafts: Annotated[int, Metric("vllm:spec_decode_num_drafts", "Drafts computed")] = 0
    """Number of times that draft tokens were planned for a sequence."""
    drafted_tokens: Annotated[int, Metric("vllm:spec_decode_num_draft_tokens", "Tokens guessed")] = 0
    accepted_tokens: Annotated[int, Metric("vllm:spec_decode_num_accepted_tokens", "Guesses that were right")] = 0
    cached_tokens: Annotated[
        int, Metric("antiphon:engine_cached_tokens", "Prompt tokens that were not computed again")
    ] = 0
    """Sum of `Sequence.num_cached_tokens`: prompt tokens reused instead of computed when sequences first joined."""
    swapped_out_blocks: Annotated[int, Metric("antiphon:engine_swapped_out_blocks", "KV blocks to host memory")] = 0
    swapped_in_blocks: Annotated[int, Metric("antiphon:engine_swapped_in_blocks", "KV blocks from host memory")] = 0
    step: Annotated[int, Metric("antiphon:engine_steps", "Steps run")] = 0
    """Number of planned steps; also the number of the last plan that is not empty."""
    prompt_tokens: Annotated[int, Metric("antiphon:engine_prompt_tokens", "Prompt tokens computed")] = 0
    """Prompt tokens of sequences that reached their first output token, cached ones included."""
    kv_saved_tokens: Annotated[
        int, Metric("antiphon:engine_kv_saved_tokens", "Tokens whose KV was computed for others")
    ] = 0
    """Tokens whose KV was sent to other engines."""
    kv_loaded_tokens: Annotated[int, Metric("antiphon:engine_kv_loaded_tokens", "Tokens whose KV came from others")] = 0
    kv_loads: Annotated[int, Metric("antiphon:engine_kv_loads", "Transfers of KV that were waited for")] = 0
    """Ended KV transfers from other engines for which at least one sequence still waited at the end."""
    kv_failed_loads: Annotated[int, Metric("antiphon:engine_kv_failed_loads", "Transfers that brought too little")] = 0
    """Transfers that delivered only a part of the requested KV, or were not started for lack of host memory."""
    generation_tokens: Annotated[int, Metric("antiphon:engine_generation_tokens", "Tokens generated")] = 0
    accepted_by_position: Annotated[
        tuple[int, ...],
        Metric("vllm:spec_decode_num_accepted_tokens_per_pos", "Right guesses by position", "position"),
    ] = ()
    """How many draft tokens were accepted at each position of a draft."""
    swap_refusals: Annotated[int, Metric("antiphon:engine_swap_refusals", "Preempted without room in host memory")] = 0
    """Preempted sequences that are computed again because the host had no blocks for them (`--swap-space`)."""
    kv_tier_tokens: Annotated[int, Metric("antiphon:engine_kv_tier_tokens", "Tokens whose KV came from the disk")] = 0
    kv_stored_tokens: Annotated[
        int, Metric("antiphon:engine_kv_stored_tokens", "Tokens whose KV was passed on to be written to the disk")
    ] = 0
    kv_copied_tokens: Annotated[
        int, Metric("antiphon:engine_kv_copied_tokens", "Tokens of blocks that were copied to another engine's disk")
    ] = 0
    computed_because: Annotated[
        tuple[int, ...],
        Metric("antiphon:engine_prompt_tokens_computed", "Prompt tokens computed, by reason", "reason", KV_MISSES),
    ] = ()
    """Tokens that were not found or read when sequences first ran, in the order of `KV_MISSES`."""
