"""The lane of the waiting sequences: they join in queue order while there are rows, KV blocks and budget."""

from collections.abc import Iterable

from antiphon.services.engine.core.lanes.lane import Lane
from antiphon.services.engine.core.sequence import Sequence
from antiphon.services.engine.core.step_builder import StepBuilder, part_of


class WaitingLane(Lane):
    """Has all waiting sequences that no other lane owns."""

    def schedule(self, builder: StepBuilder) -> None:
        """Schedules the prompts of waiting sequences, or their first part, after the tokens of the running ones."""
        if not builder.may_join:
            return
        admission, residency = self._admission, self._residency
        num_waiting = min(residency.waiting.num_waiting, admission.num_free_rows)
        # With pipeline stages an equal part joins in each plan, because those that join together also decode together.
        most = len(builder.joined) + part_of(num_waiting, self._num_stages)
        while len(builder.joined) < most and builder.budget > 0 and (head := admission.head()):
            if not admission.admits(head, builder):
                return
            alone = not residency.num_ordinary and not builder.joined
            # Nobody would free blocks for a sequence that is alone, so it may use them all.
            if (found := admission.fit(head, builder.budget, 0 if alone else admission.reserved_blocks)) is None:
                return
            admission.join(head, found, builder)

    def owns(self, sequence: Sequence) -> bool:
        """See `Lane`."""
        return not sequence.idle and not sequence.canary

    def waiting(self) -> Iterable[Sequence]:
        """See `Lane`."""
        return self._residency.waiting
