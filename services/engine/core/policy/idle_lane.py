"""The idle lane: sequences that use only capacity left by ordinary sequences, until their time in the lane is over.

An idle sequence (`Sequence.idle`) waits in a separate queue and is younger than every ordinary one. In each step the
ordinary sequences, running and joining, are scheduled first. Idle sequences get the rest of the budget; while ordinary
sequences run, their prompts get at most 1/PROMPT_SHARE of the step. No idle sequence joins while an ordinary one waits.
If an ordinary sequence lacks a row, an adapter slot or KV blocks, the youngest idle ones are preempted in the same
plan; while all of them are in a step in flight, plans leave them out, so that a later plan can preempt them. A
preempted idle sequence keeps its tokens and resumes later like any other (`swap`). When its time in the lane is over,
it becomes an ordinary sequence, waiting or running as it is, so it cannot starve. Used only by `scheduler`.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter

from services.engine.core.adapter_slots import NO_SLOT
from services.engine.core.kv.block_pool import BlockPool
from services.engine.core.policy.waiting import WaitingQueue
from services.engine.core.sequence import IDLE_AGE, Sequence, Status

PROMPT_SHARE = 8
"""While ordinary sequences run, prompts of idle ones get at most 1/PROMPT_SHARE of a step's tokens, because computing a
prompt delays the next token of all other sequences in the step.
"""
_AGE = attrgetter("age")
_FIRST = (IDLE_AGE - 2**40, 0, 0)
"""An age between those of all ordinary and those of all idle sequences."""


class IdleLane:
    """The queue of the idle sequences, and the rows, slots and blocks of the running ones.

    `running` is the scheduler's list.
    """

    def __init__(self, running: list[Sequence]) -> None:
        self.queue = WaitingQueue(idle=True)
        self.withheld = False
        """Whether the current plan leaves out the idle sequences, because ordinary ones need their rows or blocks."""
        self._running = running
        self._due_s = math.inf
        """Lower bound of the time at which the next sequence leaves the idle lane."""

    @property
    def num_ordinary(self) -> int:
        """Number of running sequences that are not idle; they come first in the list."""
        return bisect_left(self._running, _FIRST, key=_AGE)

    @property
    def running(self) -> list[Sequence]:
        """The running idle sequences, the oldest first."""
        return self._running[self.num_ordinary :]

    @property
    def num_rows(self) -> int:
        """Number of rows that running idle sequences hold, and those reserved for their beams to come."""
        return sum(one.num_rows if len(one.beams) == 1 else 1 for one in self.running)

    @property
    def holds_slots(self) -> bool:
        """Whether a running idle sequence uses a slot of an adapter."""
        return any(map(_has_slot, self.running))

    def demand_of_others(self, block_size: int) -> tuple[int, int]:
        """Returns the number of tokens and of new blocks that the other running sequences need for their next tokens.

        Idle ones do not count, because they can be preempted.
        """
        tokens = blocks = 0
        for sequence in self._running[: self.num_ordinary]:
            wanted = sequence.num_unscheduled_tokens
            tokens += wanted
            num_blocks = -(-(sequence.num_scheduled_tokens + wanted) // block_size)
            blocks += max(0, num_blocks - len(sequence.block_table))
        return tokens, blocks

    def num_blocks(self, pool: BlockPool) -> int:
        """Returns how many more blocks would be free if no idle sequence ran: those that only idle sequences hold."""
        held = Counter(block for one in self.running for block in one.block_table)
        return sum(count == pool.ref_count(block) for block, count in held.items())

    def to_preempt(self, *, for_a_slot: bool) -> Sequence | None:
        """Returns the youngest running idle sequence that no plan in flight contains; None if there is none.

        `for_a_slot`: only one that uses a slot of an adapter. Beams are preempted together.
        """
        for one in reversed(self.running):
            if not any(each.num_in_flight for each in one.beams or [one]) and (not for_a_slot or _has_slot(one)):
                return one
        return None

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self._due_s = min(self._due_s, sequence.idle_until_s)
        self.queue.push(sequence)

    def promote(self, now_s: float, waiting: WaitingQueue) -> None:
        """Turns the sequences whose time in the lane is over into ordinary ones, whether they run or wait.

        `waiting`: the queue of the ordinary ones.
        """
        if now_s < self._due_s:
            return
        self._due_s = math.inf
        for sequence in [*self.running, *self.queue]:
            if sequence.idle_until_s <= now_s:
                self._promote(sequence, waiting)
            else:
                self._due_s = min(self._due_s, sequence.idle_until_s)

    def _promote(self, sequence: Sequence, waiting: WaitingQueue) -> None:
        runs = sequence.status is Status.RUNNING
        if runs:
            del self._running[bisect_left(self._running, sequence.age, key=_AGE)]
            self.queue.stopped(sequence)
        else:
            self.queue.withdraw(sequence)
        priority, arrival, number = sequence.age
        sequence.age, sequence.idle_until_s = (priority - IDLE_AGE, arrival, number), 0.0
        # The client was charged for this sequence in the idle queue. In the ordinary queue it has not been charged yet;
        # there it will have been charged for the whole output when the sequence has ended.
        sequence.num_charged_tokens = 0
        if runs:
            insort(self._running, sequence, key=_AGE)
            waiting.count_running(sequence)
        else:
            waiting.push(sequence)


def _has_slot(sequence: Sequence) -> bool:
    return sequence.adapter_slot != NO_SLOT or sequence.prompt_slot != NO_SLOT
