"""The core's state of a sequence from `add` to its end: tokens, counters, blocks, row, status.

Used only inside the core. The token ranges of a sequence, as half-open intervals:

    [0, num_computed_tokens)                       KV is in the blocks, and the step that wrote it has been applied
    [num_computed_tokens, num_scheduled_tokens)    computed by plans in flight
    [num_scheduled_tokens, num_tokens)             known, not scheduled yet
    [num_tokens, num_tokens + num_pending_tokens)  sampled by plans in flight, not known to the core yet; with draft
                                                   tokens in flight, the largest possible number
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum

from antiphon.services.engine.core.adapter_slots import NO_SLOT
from antiphon.services.engine.core.drafts.drafter import Drafter
from antiphon.services.engine.core.plan import PlacedImage
from antiphon.services.engine.core.request import Adapter, SequenceSpec
from antiphon.services.engine.core.stopping import StopRules
from antiphon.shared.messages import KvMiss, KvOrigin, PromptLogprobs
from antiphon.shared.parameters.pooling import PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams

IDLE_AGE = 2**65
"""Added to the first number of an idle sequence's age. It exceeds the range of all priorities."""


class Status(Enum):
    """The status of a sequence. Only the transitions in `_LEGAL` are allowed."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting for KV"
    """Not queued yet: another engine sends the KV of its prompt (`kv_transfer`)."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again after having run: without row and KV blocks, possibly with host blocks (swapped out)."""
    FINISHED = "finished"


_LEGAL = {
    (Status.WAITING, Status.WAITING_FOR_KV),
    (Status.WAITING_FOR_KV, Status.WAITING),
    (Status.WAITING_FOR_KV, Status.FINISHED),
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.FINISHED),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Mutable state of one sequence. `tokens` (prompt, then output) never shrinks; `row` is -1 without a row.

    The tokens of a beam are an exception: they change with the hypothesis that the beam runs.
    """

    sequence_id: str
    params: SamplingParams
    rules: StopRules
    tokens: "array[int]"
    num_prompt_tokens: int
    num_carried_tokens: int
    """Number of output tokens that came with the spec (`SequenceSpec.output_token_ids`)."""
    age: tuple[int, int, int]
    """Priority, arrival, order of `add`. The sequence with the smaller tuple runs first and is preempted last.

    If the sequence has a client, the priority is the client's, because clients choose the priorities of their own
    sequences.
    """
    cache_salt: bytes
    sequence_group: str
    block_hashes: list[bytes]
    """Hashes of the leading full blocks, as many as have been needed so far."""
    priority: int = 0
    """Order among the waiting sequences of the same client."""
    client: str = ""
    client_weight: float = 1.0
    client_priority: int = 0
    num_charged_tokens: int = 0
    """Output tokens with which the client was charged when the sequence began to run (`waiting`)."""
    status: Status = Status.WAITING
    row: int = -1
    block_table: list[int] = field(default_factory=list[int])
    window_blocks: list[int] = field(default_factory=list[int])
    """The columns (`kv.windows`) beside the block table, from index `window_first` of the table to its end."""
    window_first: int = 0
    host_blocks: list[int] = field(default_factory=list[int])
    """While the sequence is swapped out: the host blocks with the KV of its first `num_host_tokens` tokens.

    Before a sequence first runs: the blocks that another engine has sent."""
    num_host_tokens: int = 0
    num_host_skipped: int = 0
    """Number of leading blocks that are not on the host, because the prefix cache had them. If the prefix cache no
    longer has them when the sequence joins, the host blocks cannot be used.
    """
    host_windows: list[int] = field(default_factory=list[int])
    """The host blocks with its columns from index `host_window_first` on."""
    host_window_first: int = 0
    kv_transfer_id: str = ""
    """Name of the transfer by which the KV of the prompt is sent to another engine; empty if it is not sent."""
    num_saved_blocks: int = 0
    """Number of leading blocks that have been passed to that transfer."""
    loads_stored: bool = False
    """Whether its host blocks came from the tier below the KV cache: these count as cached."""
    num_stored_blocks: int = 0
    """Number of leading blocks that are stored below the KV cache (`kv.tier`), or have been passed on for that."""
    kv_keep_s: float = 0.0
    """See `SequenceSpec.kv_keep_s`."""
    siblings: list["Sequence"] = field(default_factory=list["Sequence"])
    """Sequences that may have a prefix in common with this one.

    Members of a sequence group share one list of all live members, this sequence included. A fork's list has only
    its source.
    """
    num_published_blocks: int = 0
    """Number of leading blocks that have been published to the prefix cache or were shared by other sequences."""
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_pending_tokens: int = 0
    num_drafted_tokens: int = 0
    """Number of draft tokens in flight. While it is not 0, nothing more of this sequence is scheduled."""
    num_predicted_tokens: int = 0
    """Number of draft tokens that a plan in flight asks the draft layer for. While it is not 0, nothing more of this
    sequence is scheduled, as the next step is to have these drafts."""
    waits_for_tokens: bool = False
    """Whether nothing more of this sequence is scheduled while a plan in flight samples its next token
    (`EngineFacts.num_stages`), or its output is expected (`SequenceSpec.expected_token_ids`)."""
    num_in_flight: int = 0
    """Number of plans in flight that contain this sequence."""
    again: int = 0
    """Set if the last known token has been computed and is to be computed again (`StepResult.token_ids`): the number of
    the last step before that was known."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache or a sibling when the sequence first joined. Tokens that
    another engine has computed for this sequence do not count.
    """
    kv_miss: KvMiss | None = None
    """Why KV that is known to be elsewhere was not, or not all, read; None: it is not known to be anywhere."""
    kv_origin: KvOrigin | None = None
    """Set when the sequence first joins."""
    first_scheduled_step: int = 0
    cumulative_logprob: float = 0.0
    drafter: Drafter | None = None
    """Drafts the sequence's next tokens; None without speculative decoding."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    """Log probabilities of the prompt that the worker has reported and that have not been passed on yet."""
    has_prompt_logprobs: bool = True
    """False until the log probabilities that the sequence asked for are complete. They need the logits of all prompt
    tokens."""
    beams: list["Sequence"] = field(default_factory=list["Sequence"])
    """All beams of this sequence's beam search, itself included (one shared list); empty without beam search. They are
    preempted together. Their tokens are rewritten by `beam_group.rearrange`."""
    state: int = -1
    """Slot of the recurrent state after the scheduled tokens (`kv.states`); -1: none, before the first token."""
    state_trail: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(number of tokens, slot) of the states to which the results of steps in flight may take the sequence back."""
    state_share: tuple[int, tuple[tuple[int, int], ...]] = (-1, ())
    """The slots of the step that is being planned: `ScheduledSequence.state` and `states`."""
    snapshots_at: tuple[int, ...] = ()
    """Numbers of tokens after which a snapshot of the state is kept, besides the regular ones."""
    num_rows: int = 1
    """Number of rows that must be free when the sequence joins: its own and those of its further beams."""
    copied_block: int | None = None
    """Block of another beam, to be copied into this beam's next block when the beam is scheduled."""
    copied_window: tuple[int, ...] = ()
    """The column beside that block, to be copied too."""
    pooling: PoolingParams | None = None
    """Set for a pooling sequence, with its `kind` set."""
    adapter: Adapter | None = None
    """See `SequenceSpec.adapter`."""
    adapter_slot: int = NO_SLOT
    """The worker's slot of the adapter while the sequence has a row."""
    prompt_adapter: Adapter | None = None
    """See `SequenceSpec.prompt_adapter`. `tokens` then begins with its virtual tokens, whose ids start at the
    vocabulary's size.
    """
    canary: bool = False
    """See `SequenceSpec.canary`."""
    idle_until_s: float = 0.0
    """See `SequenceSpec.idle_until_s`. Becomes 0 when the time is over (`lanes.idle`)."""
    prompt_slot: int = NO_SLOT
    """Slot that marks the use of the prompt adapter while the sequence has a row."""
    images: tuple[PlacedImage, ...] = ()
    """See `SequenceSpec.images`. In `tokens` an image's tokens are placeholders, which are all equal."""
    whole_images: bool = False
    """Whether a step must have all tokens of an image that are not computed yet (`EngineFacts.mutual_images`)."""

    @property
    def idle(self) -> bool:
        """Whether the sequence is in the idle lane, so that ordinary sequences may preempt it."""
        return self.idle_until_s > 0

    @property
    def adapter_version(self) -> str:
        """The version of the sequence's adapter; empty without one."""
        return "" if self.adapter is None else self.adapter.version

    @property
    def prompt_adapter_version(self) -> str:
        """The version of the sequence's prompt adapter; empty without one."""
        return "" if self.prompt_adapter is None else self.prompt_adapter.version

    @property
    def num_virtual_tokens(self) -> int:
        """Number of virtual tokens at the beginning of the prompt."""
        return 0 if self.prompt_adapter is None else self.prompt_adapter.num_virtual_tokens

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Number of known output tokens, including those that came with the spec."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """Number of tokens that the next plan can compute.

        0 while draft tokens are in flight or are being predicted, or if the tokens in flight reach the sequence's
        maximum length. Also 0 while a beam's next token is in flight, because that token may continue another beam;
        and, for a sequence that `waits_for_tokens`, while its next token is in flight.
        """
        if (
            self.num_drafted_tokens
            or self.num_predicted_tokens
            or (self.num_pending_tokens and (self.waits_for_tokens or self.beams))
        ):
            return 0
        ahead = len(self.tokens) + self.num_pending_tokens
        if self.num_pending_tokens and ahead >= self.num_prompt_tokens + self.rules.max_tokens:
            return 0
        return ahead - self.num_scheduled_tokens

    @property
    def reuses_kv(self) -> bool:
        """Whether a computed prefix may be skipped.

        It may not while log probabilities of the prompt are still to be reported, nor if pooling needs the hidden
        states of the skipped tokens.
        """
        return self.has_prompt_logprobs and (self.pooling is None or self.pooling.kind == "last")

    @property
    def num_prompt_logprobs_to_schedule(self) -> int:
        """Number of unscheduled prompt tokens whose following token's log probabilities are to be reported."""
        if self.has_prompt_logprobs:
            return 0
        return max(0, self.num_prompt_tokens - 1 - self.num_scheduled_tokens)

    def move_to(self, status: Status) -> None:
        """Changes the status. Raises AssertionError for an illegal transition."""
        assert (self.status, status) in _LEGAL, f"{self.sequence_id}: {self.status} -> {status}"
        self.status = status

    def start_at(self, num_tokens: int) -> None:
        """Marks the first `num_tokens` as computed, the rest as unscheduled. The sequence must not be in flight."""
        assert self.num_in_flight == 0, self.sequence_id
        self.num_computed_tokens = self.num_scheduled_tokens = num_tokens
        self.num_pending_tokens = 0
        self.again = 0

    def uncut(self, start: int, num_tokens: int) -> int:
        """Returns how many tokens from `start` on a step computes, so that no image is cut.

        The step has room for `num_tokens`. If these would end inside an image that must not be cut, the step computes
        only the tokens before the image. If there are none before it, the step computes the whole image, even
        beyond its budget, so that the sequence progresses.
        """
        end = start + num_tokens
        for image in self.images if self.whole_images and num_tokens > 0 else ():
            if image.start < end < image.start + image.num_tokens:
                return image.start - start if image.start > start else image.start + image.num_tokens - start
        return num_tokens


def from_spec(spec: SequenceSpec, rules: StopRules, number: int, block_size: int, vocab_size: int = 0) -> Sequence:
    """Returns a new sequence. `number` is the running number of the added sequence and breaks ties of `arrival`.

    `vocab_size` is needed for a spec with a prompt adapter.
    """
    num_virtual = spec.num_prompt_tokens - len(spec.prompt_token_ids)
    tokens = array("I", range(vocab_size, vocab_size + num_virtual))
    tokens.extend(spec.prompt_token_ids)
    tokens.extend(spec.output_token_ids)
    rank = spec.client_priority if spec.client else spec.priority
    return Sequence(
        sequence_id=spec.sequence_id,
        params=spec.params,
        rules=rules,
        tokens=tokens,
        num_prompt_tokens=spec.num_prompt_tokens,
        num_carried_tokens=len(spec.output_token_ids),
        age=(rank + (IDLE_AGE if spec.idle_until_s > 0 else 0), spec.arrival, number),
        cache_salt=spec.cache_salt,
        sequence_group=spec.sequence_group,
        # The hashes that came with the prompt do not count its virtual tokens.
        block_hashes=[] if num_virtual else list(spec.block_hashes[: len(tokens) // block_size]),
        priority=spec.priority,
        client=spec.client,
        client_weight=spec.client_weight,
        client_priority=spec.client_priority,
        has_prompt_logprobs=spec.params.prompt_logprobs is None or len(spec.prompt_token_ids) == 1,
        pooling=spec.pooling,
        kv_transfer_id=spec.kv_transfer_id,
        adapter=spec.adapter,
        prompt_adapter=spec.prompt_adapter,
        images=spec.images,
        canary=spec.canary,
        idle_until_s=spec.idle_until_s,
        kv_keep_s=spec.kv_keep_s,
    )
