"""A step plan under construction. Used by `scheduler`, `residency` and the lanes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from antiphon.services.engine.core.plan import NewSequence, ScheduledSequence
from antiphon.services.engine.core.sequence import Sequence

PART_MIN = 4
"""Number of decoding sequences up to which a plan is not divided for pipeline stages: with so few, reading the weights
takes most of a step's time, and two smaller plans would read them twice.
"""


def part_of(num_sequences: int, num_stages: int) -> int:
    """Returns how many of the decoding sequences a plan may have, so that the plans in flight have equal parts."""
    return num_sequences if num_stages == 1 else max(PART_MIN, -(-num_sequences // num_stages))


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    """The tokens that are scheduled so far, and the rest of the budget.

    `budget` is the number of tokens that may still be scheduled; `prompt_logprobs` is the number of prompt tokens after
    which log probabilities may still be reported.
    """

    step: int
    budget: int
    prompt_logprobs: int
    now_s: float
    room: int
    """Number of decoding sequences (with one token to compute) that may still be scheduled."""
    num_drafting: int = 0
    """Number of sequences that may still get draft tokens in this step."""
    predicts: bool = False
    """Whether the draft layer may predict tokens after this step."""
    draft_cost: float = 0.0
    """See `SpeculationController`."""
    predicts_prompts: bool = False
    """Whether the draft layer may compute parts of prompts in this step."""
    scheduled: list[ScheduledSequence] = field(default_factory=list[ScheduledSequence])
    joined: list[Sequence] = field(default_factory=list[Sequence])
    canary: Sequence | None = None
    """The canary if it joins. It does not count among `joined`."""
    refilled: list[Sequence] = field(default_factory=list[Sequence])
    """Scheduled beams whose rows the worker must fill anew."""
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_tokens: int = 0
    num_draft_tokens: int = 0
    urgent_canary: bool = False
    """Whether the canary joins before all others are scheduled."""
    may_join: bool = False
    """Whether waiting sequences may join (`admission`)."""
    closed: bool = False
    """Whether the lanes after the one that set it leave this step alone."""

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        new_blocks: Iterable[int] = (),
        draft_tokens: tuple[int, ...] = (),
        new_windows: Iterable[int] = (),
    ) -> None:
        """Schedules the sequence's next `num_tokens` and the draft tokens after them.

        The sequence's block table must already have the blocks, and the columns `new_windows` beside them.
        """
        start = sequence.num_scheduled_tokens
        at_end = start + num_tokens == len(sequence.tokens) + sequence.num_pending_tokens
        pools = at_end and sequence.pooling is not None
        samples = at_end and not pools
        reports = min(num_tokens, sequence.num_prompt_logprobs_to_schedule)
        decodes = num_tokens == 1
        num_drafts = self._num_drafts(sequence, samples, decodes) if sequence.drafter is not None else -1
        num_tokens += len(draft_tokens)
        self.scheduled.append(
            ScheduledSequence(
                row=sequence.row,
                start=start,
                num_tokens=num_tokens,
                samples=samples,
                new_block_ids=tuple(new_blocks),
                new_window_ids=tuple(new_windows),
                draft_token_ids=draft_tokens,
                num_prompt_logprobs=reports,
                pools=pools,
                num_drafts=num_drafts,
                state=sequence.state_share[0],
                states=sequence.state_share[1],
            )
        )
        self.prompt_logprobs -= reports
        sequence.num_scheduled_tokens = start + num_tokens
        sequence.num_pending_tokens += samples + len(draft_tokens)
        sequence.num_drafted_tokens = len(draft_tokens)
        sequence.num_predicted_tokens = max(0, num_drafts)
        sequence.num_in_flight += 1
        sequence.again = 0
        self.num_tokens += num_tokens
        self.num_draft_tokens += len(draft_tokens)
        self.num_drafting -= bool(draft_tokens)
        self.room -= decodes
        self.budget = max(0, self.budget - num_tokens)

    def _num_drafts(self, sequence: Sequence, samples: bool, decodes: bool) -> int:
        """Returns `ScheduledSequence.num_drafts`."""
        predicted = None if sequence.drafter is None else sequence.drafter.predicted
        if predicted is None or not (self.predicts if decodes else self.predicts_prompts):
            return -1
        # The step samples one token, and the next one another, besides the drafts.
        most = sequence.rules.max_tokens - sequence.num_output_tokens - 2
        return min(predicted.num_wanted(self.draft_cost), max(0, most)) if samples and self.predicts else 0

    def refill(self, beam: Sequence) -> None:
        """Makes the plan send a beam completely, and copy the partly filled block that it shares."""
        self.refilled.append(beam)
        if beam.copied_block is not None:
            self.copies.append((beam.copied_block, beam.block_table[-1]))
            column = beam.window_blocks[len(beam.window_blocks) - len(beam.copied_window) :]
            self.copies += zip(beam.copied_window, column, strict=True)
            beam.copied_block, beam.copied_window = None, ()

    def limited(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` the step can compute, given the log probabilities to report."""
        reports = sequence.num_prompt_logprobs_to_schedule
        return num_tokens if reports <= self.prompt_logprobs else min(num_tokens, self.prompt_logprobs)


def joining(sequence: Sequence) -> NewSequence:
    """Returns the complete data of a joining sequence for the worker."""
    return NewSequence(
        row=sequence.row,
        sequence_id=sequence.sequence_id,
        token_ids=tuple(sequence.tokens),
        num_prompt_tokens=sequence.num_prompt_tokens,
        block_ids=tuple(sequence.block_table),
        window_ids=tuple(sequence.window_blocks),
        params=sequence.params,
        pooling=sequence.pooling,
        adapter_slot=sequence.adapter_slot,
        prompt_adapter=sequence.prompt_adapter_version,
        images=sequence.images,
    )
