"""The newcomers' lane: a step of their own, without the next tokens of another client's large batch.

A newcomer is a waiting sequence of a client with few running sequences. A step with hundreds of decoding sequences
takes several times as long as one with a short prompt, and its tokens are delivered together, so in the same step a
newcomer would wait for the work of all others. At most one of `OTHER_STEPS + 1` steps is for newcomers alone, and only
while a single client has most of the running sequences.
"""

from services.engine.core.lanes.lane import Lane, Shared
from services.engine.core.sequence import Sequence
from services.engine.core.step_draft import StepDraft

RUNNING_MIN = 32
"""With fewer running sequences of one client, a step with all of them takes hardly longer than a step without them."""
FEW_SHARE = 16
"""A client's waiting sequences are newcomers if it has at most 1/FEW_SHARE as many running ones as the largest client.
"""
TOKENS_FOR_EACH = 1
"""Maximum prompt tokens of a newcomers' step, for each running sequence. With this limit, a newcomers' step takes no
longer than a step of the running sequences.
"""
OTHER_STEPS = 3
"""Steps with the running sequences between two steps without them."""


class NewcomersLane(Lane):
    """Decides which newcomers are computed in a step without the running sequences."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        # Without chunked prefill the head of the queue has its own way to come first (`large_head`).
        self.sleeps = not self._limits.enable_chunked_prefill
        self.last_step = -OTHER_STEPS
        """The last step without the running sequences."""

    def schedule(self, draft: StepDraft) -> None:
        """Schedules newcomers, if this step may be theirs. Then the step is closed."""
        if not draft.may_join:
            return
        running = self._residency.running[: self._residency.num_ordinary]
        if not self._may_go_first(draft.step, running):
            return
        admission = self._admission
        while (head := self._next(running, draft.num_tokens)) is not None:
            if admission.cannot_join(head) or not admission.admits(head, draft):
                break
            if (found := admission.fit(head, draft.budget, admission.reserved_blocks)) is None:
                break
            self.last_step = draft.step
            admission.join(head, found, draft)
        draft.closed = bool(draft.joined)

    def _may_go_first(self, step: int, running: list[Sequence]) -> bool:
        """Returns whether `step` may leave out the running sequences. `running`: those that are not idle."""
        if len(running) < RUNNING_MIN or step <= self.last_step + OTHER_STEPS:
            return False
        most = self._residency.waiting.num_of_largest_client
        return most >= RUNNING_MIN and 2 * most > len(running)

    def _next(self, running: list[Sequence], num_tokens: int) -> Sequence | None:
        """Returns the next newcomer for a step without the running sequences, which has `num_tokens` tokens so far.

        Returns None if the newcomer's client has a lower rank than the client of a running sequence.
        """
        waiting = self._residency.waiting
        # The last rows are for clients without a running sequence, as everywhere.
        few = 0 if self._admission.rows_are_short else waiting.num_of_largest_client // FEW_SHARE
        head = waiting.head_of_few(few)
        if head is None or num_tokens + head.num_tokens > TOKENS_FOR_EACH * len(running):
            return None
        return head if all(head.client_priority <= one.client_priority for one in running) else None
