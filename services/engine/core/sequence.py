"""A sequence as the core sees it from `add` to its end: tokens, counters, blocks, row, status.

Not a wire type and not a plan: only the core's own files touch it. Its token ranges, as half-open intervals:

    [0, num_computed_tokens)                     KV is in the blocks and the step that wrote it has been applied
    [num_computed_tokens, num_scheduled_tokens)  computed by plans in flight
    [num_scheduled_tokens, num_tokens)           known, still to schedule
    [num_tokens, num_tokens + num_pending_tokens)  sampled by plans in flight: known to the worker, not yet here; with
                                                   a draft in flight as many as it may give at most
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from services.engine.core.lookahead import Lookahead
from services.engine.core.request import SequenceSpec
from services.engine.core.stopping import StopRules
from shared.sampling import SamplingParams


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again, without row and blocks, or with blocks of the host."""
    FINISHED = "finished"


_LEGAL = {
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.FINISHED),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one sequence. `tokens` (prompt, then output) only ever grows."""

    sequence_id: str
    params: SamplingParams
    rules: StopRules
    tokens: "array[int]"
    num_prompt_tokens: int
    num_carried_tokens: int
    """Output tokens that were generated elsewhere."""
    age: tuple[int, int, int]
    """Priority, arrival, order of `add`: smaller runs first and is preempted last."""
    cache_salt: bytes
    family: str
    block_hashes: list[bytes]
    """Hashes of the leading full blocks, as many as were needed so far."""
    status: Status = Status.WAITING
    row: int = -1
    block_table: list[int] = field(default_factory=list[int])
    host_blocks: list[int] = field(default_factory=list[int])
    """While preempted and swapped out: copies of the blocks of the first `num_host_tokens`."""
    num_host_tokens: int = 0
    relatives: list["Sequence"] = field(default_factory=list["Sequence"])
    """Live sequences that may begin alike, itself among them; one list for all of them."""
    num_published_blocks: int = 0
    """Leading blocks that the prefix cache has been told of."""
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_pending_tokens: int = 0
    num_drafted_tokens: int = 0
    """Guessed tokens in flight: nothing more is planned until it is known how many were right."""
    num_in_flight: int = 0
    """Plans that hold this sequence and were not applied yet."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first scheduling took from the prefix cache."""
    first_scheduled_step: int = 0
    cumulative_logprob: float = 0.0
    lookahead: Lookahead | None = None
    """Guesses its next tokens; None: nobody does."""

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those that were carried in included."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens that the next plan could compute; 0 when those in flight reach the sequence's greatest length."""
        if self.num_drafted_tokens:
            return 0
        ahead = len(self.tokens) + self.num_pending_tokens
        if self.num_pending_tokens and ahead >= self.num_prompt_tokens + self.rules.max_tokens:
            return 0
        return ahead - self.num_scheduled_tokens

    def move_to(self, status: Status) -> None:
        """Changes the status; an illegal transition is a broken invariant."""
        assert (self.status, status) in _LEGAL, f"{self.sequence_id}: {self.status} -> {status}"
        self.status = status

    def start_at(self, num_tokens: int) -> None:
        """Sets the counters of a sequence whose first `num_tokens` are in its blocks, and that no plan holds."""
        assert self.num_in_flight == 0, self.sequence_id
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens
        self.num_pending_tokens = 0


def from_spec(spec: SequenceSpec, rules: StopRules, number: int, block_size: int) -> Sequence:
    """A new sequence; `number` counts the sequences added and breaks ties of arrival."""
    tokens = array("I", spec.prompt_token_ids)
    tokens.extend(spec.output_token_ids)
    return Sequence(
        sequence_id=spec.sequence_id,
        params=spec.params,
        rules=rules,
        tokens=tokens,
        num_prompt_tokens=len(spec.prompt_token_ids),
        num_carried_tokens=len(spec.output_token_ids),
        age=(spec.priority, spec.arrival, number),
        cache_salt=spec.cache_salt,
        family=spec.family,
        block_hashes=list(spec.block_hashes[: len(tokens) // block_size]),
    )
