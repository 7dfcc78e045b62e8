"""Gives newcomers a step of their own, without the next tokens of another client's large batch.

A newcomer is a waiting sequence of a client with few running sequences. A step with hundreds of decoding sequences
takes several times as long as one with a short prompt, and its tokens are delivered together, so in the same step a
newcomer would wait for the work of all others. Its own step costs the others at most one of `OTHER_STEPS + 1` steps,
and only where a single client has most of the running sequences. Used only by `scheduler`.
"""

from collections.abc import Sequence as List

from services.engine.core.policy.waiting import WaitingQueue
from services.engine.core.sequence import Sequence

RUNNING_MIN = 32
"""With fewer sequences of one client, a step with all of them is hardly longer than one without."""
FEW_SHARE = 16
"""Clients with up to 1/FEW_SHARE of the largest client's running sequences have newcomers."""
TOKENS_FOR_EACH = 1
"""Prompt tokens of a newcomers' step for each running sequence, at most: it is not longer than a step with these."""
OTHER_STEPS = 3
"""Steps with the running sequences between two steps without them."""


class NewcomerSteps:
    """Decides which newcomers are computed in a step without the running sequences."""

    def __init__(self) -> None:
        self.last_step = -OTHER_STEPS
        """The last step without the running sequences."""

    def may_go_first(self, step: int, waiting: WaitingQueue, running: List[Sequence]) -> bool:
        """Returns whether `step` may leave out the running sequences. `running`: those that are not idle."""
        if len(running) < RUNNING_MIN or step <= self.last_step + OTHER_STEPS:
            return False
        most = waiting.num_of_largest_client
        return most >= RUNNING_MIN and 2 * most > len(running)

    def next(
        self, waiting: WaitingQueue, running: List[Sequence], num_tokens: int, *, few_may: bool
    ) -> Sequence | None:
        """Returns the next newcomer for a step without the running sequences, which has `num_tokens` tokens so far.

        `few_may`: whether its client may have running sequences, at most a few. A client of lower rank than a running
        sequence's does not go before it.
        """
        head = waiting.head_of_few(waiting.num_of_largest_client // FEW_SHARE if few_may else 0)
        if head is None or num_tokens + head.num_tokens > TOKENS_FOR_EACH * len(running):
            return None
        return head if all(head.client_priority <= one.client_priority for one in running) else None

    def went_first(self, step: int) -> None:
        """Records that `step` leaves out the running sequences."""
        self.last_step = step
