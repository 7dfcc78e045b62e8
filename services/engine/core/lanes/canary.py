"""The canary's lane: the sequence with which the engine tests itself (`antiphon.services.engine.canary`).

The canary has a reserved row and does not queue. It joins when a step has budget for its whole prompt, or before all
others once it is urgent. It is not counted as a running sequence. Once it runs, it is the oldest sequence of all, so
`running` schedules it first, and it is never preempted.
"""

from collections.abc import Iterable

from antiphon.services.engine.core.lanes.lane import Lane, Shared
from antiphon.services.engine.core.sequence import Sequence
from antiphon.services.engine.core.step_builder import StepBuilder


class CanaryLane(Lane):
    """Has at most one waiting sequence."""

    takes_leftovers = True
    sleeps = True

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._sequence: Sequence | None = None
        """The canary while it waits."""

    def begin(self, builder: StepBuilder) -> None:
        """Schedules the canary before all others if it is urgent."""
        if builder.urgent_canary and self._sequence is not None:
            self._join(self._sequence, builder)

    def schedule(self, builder: StepBuilder) -> None:
        """Schedules the canary if the others have left enough budget for its whole prompt."""
        if self._sequence is not None and builder.budget >= self._sequence.num_tokens:
            self._join(self._sequence, builder)

    def owns(self, sequence: Sequence) -> bool:
        """See `Lane`."""
        return sequence.canary

    def add(self, sequence: Sequence) -> None:
        """See `Lane`."""
        assert self._residency.rows.has_canary_row, "there is no row for a canary"
        assert self._sequence is None, "a canary waits already"
        self._sequence, self.sleeps = sequence, False

    def forget(self, sequence: Sequence) -> None:
        """See `Lane`."""
        self._sequence, self.sleeps = None, True

    def waiting(self) -> Iterable[Sequence]:
        """See `Lane`."""
        return () if self._sequence is None else (self._sequence,)

    def _join(self, sequence: Sequence, builder: StepBuilder) -> None:
        """Schedules the canary's prompt, if there are blocks for the whole sequence. It reuses no KV."""
        residency = self._residency
        # All blocks at once: it must never have to preempt a sequence for its output.
        num_all = sequence.num_prompt_tokens + sequence.rules.max_tokens
        has_room = builder.budget > 0 and residency.states.has_room()
        count, windows = residency.blocks_for(num_all), residency.windows
        blocks = residency.pool.allocate(count * (1 + windows.groups)) if has_room else None
        if blocks is None:
            return
        self._sequence, self.sleeps = None, True
        residency.rows.take(sequence)
        sequence.block_table, sequence.window_blocks = blocks[:count], blocks[count:]
        sequence.first_scheduled_step = builder.step
        builder.canary = sequence
        num_tokens = min(sequence.num_tokens, builder.budget)
        residency.states.plan(sequence, num_tokens)
        builder.add(sequence, num_tokens)
