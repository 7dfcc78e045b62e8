"""Decisions as data: what the scheduler asks of a worker for one step, and what the worker answers.

A worker keeps a state table with one row for each running sequence (`--max-num-seqs` rows). A plan is a difference:
sequences that join get a row with everything about them; for the others only new blocks are named. The worker appends a
sampled token to its own row, so that the next step's input is already there. Token ranges of a scheduled sequence:

    [0, start)                  computed: KV is in the blocks, or will be once the keys and values of this step are
                                written, which is before any are read, in each layer
    [start, start + num_tokens) computed by this step
    `samples`                   true when the range ends at the last known token, so that the next one is sampled
    `draft_token_ids`           guesses of what follows the last known token: the end of the range, computed like known
                                ones. The worker samples after the last known token and after each guess, and gives the
                                sampled tokens up to the first that differs from its guess: at least one
"""

from dataclasses import dataclass, field

import msgspec

from shared.sampling import SamplingParams

DEFAULT_BATCHED_TOKENS = 2048
"""Most tokens of a step where the flag is not given."""
CPU_PROMPT_TOKENS = 1024
"""The same on a CPU, beside a token of every running sequence: more make steps longer, which everybody waits for, and
hardly faster. A worker that is as fast with fewer says so (`EngineFacts.step_prompt_tokens`)."""


def default_batched_tokens(on_cpu: bool, max_num_seqs: int) -> int:
    """Most tokens of a step where the flag is not given."""
    return CPU_PROMPT_TOKENS + max_num_seqs if on_cpu else DEFAULT_BATCHED_TOKENS


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that joins (or comes back after preemption) and the row it takes.

    `token_ids` are prompt and output so far; the first `num_prompt_tokens` are the prompt. `block_ids` is the whole
    block table so far. Everything in it stays valid until the row is freed.
    """

    row: int
    sequence_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    params: SamplingParams


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. `new_block_ids` extend the row's block table before the step runs.

    For a sequence that joins in this plan they are empty: `NewSequence.block_ids` has all of them.
    """

    row: int
    start: int
    num_tokens: int
    samples: bool
    new_block_ids: tuple[int, ...] = ()
    draft_token_ids: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Order of effects: rows freed, blocks copied, rows filled, blocks added, computed, tokens sampled.

    All copies out to the host come first, then those in from the host, then those from block to block. No block is the
    target of two copies of a plan, so that each of the three groups may be one operation.
    """

    step: int
    freed_rows: tuple[int, ...] = ()
    new: tuple[NewSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    """(block, host block)"""
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host block, block)"""
    copies: tuple[tuple[int, int], ...] = ()
    """(block, block): for a sequence that goes on where another has filled a block only in part."""
    num_tokens: int = 0
    """Sum of the scheduled tokens: at most the token budget, but for one long prompt alone without chunked prefill."""

    @property
    def empty(self) -> bool:
        """True when there is nothing to compute."""
        return not self.scheduled


class SampledLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Of one sampled token: its own log probability and the best candidates, best first (raw distribution)."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """What a step gave: for each scheduled sequence with `samples`, in plan order, one tuple of new tokens.

    A tuple, because several are accepted where guesses were right. `logprobs` holds the chosen tokens' log
    probabilities, parallel to `token_ids`; it is always there, candidates only for sequences that asked.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[SampledLogprobs, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What start-up learnt of model and machine: flows into the core by value, never by editing a config."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset[int])
    num_host_blocks: int = 0
    """Blocks in the host's memory for preempted sequences."""
    step_tokens: int = DEFAULT_BATCHED_TOKENS
    """Most tokens of a step where the flag is not given."""
    step_prompt_tokens: int | None = None
    """Of these, most beside what the running sequences decode; None: as many as there is room for."""
    computes_on_host: bool = True
    """Whether this process's threads compute a step; False: they wait for a device that does."""
    configuration: str = ""
    """Hash of what can change tokens beside the weights: types, backend, hardware, software."""


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """The scheduler's bounds, from flags."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_ratio: float | None = None
    """Share of the blocks up to which sequences are let in beside running ones; None: all of them."""
    scheduler_delay_factor: float = 0.0
    """See `delay`."""
    num_speculative_tokens: int = 0
    """Most tokens that are guessed for a sequence in a step; see `lookahead`."""
    max_batch_size: int | None = None
    """Most new sequences that join together after gathering; None: they do not gather. See `batching`."""
    batch_wait_timeout: float = 0.1
    """Longest time to gather, in seconds."""
    step_prompt_tokens: int | None = None
    """Most tokens of a step beside one and its guesses for each running sequence; None: what room there is."""

    def step_tokens(self, num_running: int, num_guessers: int) -> int:
        """Most tokens of a step with so many running sequences, of which so many may guess."""
        if self.step_prompt_tokens is None:
            return self.max_num_batched_tokens
        guesses = min(num_guessers, num_running) * self.num_speculative_tokens
        return min(self.max_num_batched_tokens, num_running + guesses + self.step_prompt_tokens)
