"""The large head's lane: without chunked prefill, a long prompt at the head of the queue comes before all others.

The prompt may be longer than the budget that the running sequences leave, or than the whole budget; in the latter case
the head runs alone.
"""

from antiphon.services.engine.core.lanes.lane import Lane, Shared
from antiphon.services.engine.core.step_builder import StepBuilder


class LargeHeadLane(Lane):
    """Schedules the head in at most every other step while sequences run, so that these progress too."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.sleeps = self._limits.enable_chunked_prefill
        self._went_first = False
        """Whether the head was scheduled before the running sequences in the last step."""

    def schedule(self, builder: StepBuilder) -> None:
        """Schedules the head if `waiting` could not, and no running sequence would have to be preempted for it."""
        if not builder.may_join:
            return
        admission, num_others = self._admission, self._residency.num_ordinary
        went_first, self._went_first = self._went_first and num_others > 0, False
        head = None if went_first else admission.head()
        if head is None or head.num_tokens + num_others <= builder.budget:
            return
        tokens, blocks = self._demand_of_others()
        spare = blocks + (admission.reserved_blocks if num_others else 0)
        found = admission.fit(head, max(builder.budget, head.num_tokens), spare)
        # With what it reuses it may be short enough for `waiting`.
        if found is None or head.num_tokens - found.num_tokens + tokens <= builder.budget:
            return
        admission.join(head, found, builder)
        self._went_first = True

    def _demand_of_others(self) -> tuple[int, int]:
        """Returns the number of tokens and of new blocks that the other running sequences need for their next tokens.

        Idle ones do not count, because they can be preempted.
        """
        tokens = blocks = 0
        for sequence in self._residency.running[: self._residency.num_ordinary]:
            wanted = sequence.num_unscheduled_tokens
            tokens += wanted
            num_blocks = self._residency.blocks_for(sequence.num_scheduled_tokens + wanted)
            blocks += max(0, num_blocks - len(sequence.block_table))
        return tokens, blocks * (1 + self._residency.windows.groups)
