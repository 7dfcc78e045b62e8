"""Gives newcomers a step of their own, without the next tokens of another client's large batch.

A newcomer is a waiting sequence of a client with few running sequences. A step with hundreds of decoding sequences
takes several times as long as one with a short prompt, and its tokens are delivered together, so in the same step a
newcomer would wait for the work of all others. At most one of `OTHER_STEPS + 1` steps is for newcomers alone, and only
while a single client has most of the running sequences. Used only by `scheduler`.
"""

from collections.abc import Sequence as List

from services.engine.core.policy.waiting import WaitingQueue
from services.engine.core.sequence import Sequence

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

        `few_may`: whether the newcomer's client may have a few running sequences; if False, it may have none. Returns
        None if the newcomer's client has a lower rank than the client of a running sequence.
        """
        head = waiting.head_of_few(waiting.num_of_largest_client // FEW_SHARE if few_may else 0)
        if head is None or num_tokens + head.num_tokens > TOKENS_FOR_EACH * len(running):
            return None
        return head if all(head.client_priority <= one.client_priority for one in running) else None

    def went_first(self, step: int) -> None:
        """Records that `step` leaves out the running sequences."""
        self.last_step = step
