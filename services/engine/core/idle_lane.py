"""The idle lane: sequences that use only what the ordinary ones leave, until their time as idle work is over.

An idle sequence (`Sequence.idle`) waits in a queue of its own and has an age behind every ordinary one. In each step,
the ordinary sequences are scheduled first, running and joining ones; idle ones get what is left of the budget, and no
more than one part in PROMPT_SHARE of the step for their prompts while ordinary sequences run. None joins while an
ordinary sequence waits. If an ordinary sequence lacks a row, an adapter slot or KV blocks, the youngest idle ones are
preempted in the same plan; while all of them are in a step in flight, plans leave them out, so that a later plan can
preempt them. A preempted one keeps its tokens and goes on later like any other (`swap`). When the time that a sequence
may be idle is over, it becomes an ordinary one where it is, so it cannot starve. Used only by `scheduler`.
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
"""While ordinary sequences run, prompts of idle ones get one part in this many of a step's tokens: a step that computes
a prompt delays the next token of everything else in it."""
_AGE = attrgetter("age")
_FIRST = (IDLE_AGE - 2**40, 0, 0)
"""An age before that of every idle sequence and behind that of every ordinary one."""


class IdleLane:
    """The queue of the idle sequences, and what the running ones hold. `running` is always the scheduler's list."""

    def __init__(self, running: list[Sequence]) -> None:
        self.queue = WaitingQueue(idle=True)
        self.withheld = False
        """Whether the plan being made leaves out the idle sequences, because their places are wanted."""
        self._running = running
        self._due_s = math.inf
        """No sequence's time is over before this."""

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

        Idle ones do not count, as they give way.
        """
        tokens = blocks = 0
        for sequence in self._running[: self.num_ordinary]:
            wanted = sequence.num_unscheduled_tokens
            tokens += wanted
            num_blocks = -(-(sequence.num_scheduled_tokens + wanted) // block_size)
            blocks += max(0, num_blocks - len(sequence.block_table))
        return tokens, blocks

    def num_blocks(self, pool: BlockPool) -> int:
        """Returns how many blocks would be free if no idle sequence ran: those that only they hold."""
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
        """Makes ordinary sequences of those whose time as idle work is over, running or not.

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
        # Its client was charged among the idle ones; from here on it pays for the whole output when that has ended.
        sequence.num_charged_tokens = 0
        if runs:
            insort(self._running, sequence, key=_AGE)
            waiting.count_running(sequence)
        else:
            waiting.push(sequence)


def _has_slot(sequence: Sequence) -> bool:
    return sequence.adapter_slot != NO_SLOT or sequence.prompt_slot != NO_SLOT
