"""The idle lane: sequences that use only capacity left by ordinary sequences, until their time in the lane is over.

An idle sequence (`Sequence.idle`) waits in a separate queue and is younger than every ordinary one. In each step the
ordinary sequences, running and joining, are scheduled first. Idle sequences get the rest of the budget; while ordinary
sequences run, their prompts get at most 1/PROMPT_SHARE of the step. No idle sequence joins while an ordinary one waits.
If an ordinary sequence lacks a row, an adapter slot or KV blocks, the youngest idle ones are preempted in the same
plan; while all of them are in a step in flight, plans leave them out, so that a later plan can preempt them. A
preempted idle sequence keeps its tokens and resumes later like any other (`swap`). When its time in the lane is over,
it becomes an ordinary sequence, waiting or running as it is, so it cannot starve.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from antiphon.services.engine.core.adapter_slots import NO_SLOT
from antiphon.services.engine.core.lanes.lane import Lane, Shared
from antiphon.services.engine.core.lanes.running import continue_running, left_out
from antiphon.services.engine.core.policy.waiting import WaitingQueue
from antiphon.services.engine.core.residency import Residency, Yielding
from antiphon.services.engine.core.sequence import IDLE_AGE, Sequence, Status
from antiphon.services.engine.core.step_builder import StepBuilder, part_of

PROMPT_SHARE = 8
"""While ordinary sequences run, prompts of idle ones get at most 1/PROMPT_SHARE of a step's tokens, because computing a
prompt delays the next token of all other sequences in the step.
"""
_AGE = attrgetter("age")


class IdleLane(Lane):
    """Schedules the idle sequences after all others, and ends their time in the lane. Without any the lane sleeps."""

    sleeps = True

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._nobody = self._residency.yielding
        self._idle = IdleSequences(self._residency, self._nobody.queue)
        self._due_s = math.inf
        """Lower bound of the time at which the next sequence leaves the idle lane."""
        self._prompt_tokens = 0
        """Number of prompt tokens of idle sequences that the step may still have."""

    def begin(self, builder: StepBuilder) -> None:
        """Turns the sequences whose time in the lane is over into ordinary ones, whether they run or wait."""
        self._idle.withheld = False
        if builder.now_s < self._due_s:
            return
        self._due_s = math.inf
        for sequence in [*self._idle.running, *self._idle.queue]:
            if sequence.idle_until_s <= builder.now_s:
                self._promote(sequence)
            else:
                self._due_s = min(self._due_s, sequence.idle_until_s)

    def schedule(self, builder: StepBuilder) -> None:
        """Schedules the idle sequences with the rest of the step; further idle sequences may join."""
        residency, queue = self._residency, self._idle.queue
        # Read `withheld` only here: the earlier lanes may just have asked idle sequences in flight to give way.
        if not (self._idle.running or queue.num_waiting):
            self.sleeps, residency.yielding = True, self._nobody
            return
        if self._idle.withheld:
            return
        divided = self._limits.enable_chunked_prefill and (residency.num_ordinary or builder.scheduled)
        # The rest and what is scheduled are together the budget of the whole step.
        self._prompt_tokens = (
            max(1, (builder.budget + builder.num_tokens) // PROMPT_SHARE) if divided else builder.budget
        )
        fits = continue_running(residency, builder, self._of_prompt, left_out(residency.running), idle=True)
        if fits and not residency.waiting.num_waiting:
            self._let_join(builder)

    def owns(self, sequence: Sequence) -> bool:
        """See `Lane`."""
        return sequence.idle

    def add(self, sequence: Sequence) -> None:
        """See `Lane`."""
        self.sleeps, self._residency.yielding = False, self._idle
        self._due_s = min(self._due_s, sequence.idle_until_s)
        super().add(sequence)

    def waiting(self) -> Iterable[Sequence]:
        """See `Lane`."""
        return self._idle.queue

    def _of_prompt(self, sequence: Sequence, num_tokens: int) -> int:
        num_tokens = min(num_tokens, self._prompt_tokens)
        self._prompt_tokens -= num_tokens
        return num_tokens

    def _let_join(self, builder: StepBuilder) -> None:
        residency, admission, chunked = self._residency, self._admission, self._limits.enable_chunked_prefill
        queue, rows = self._idle.queue, residency.rows
        last = len(builder.joined) + part_of(min(queue.num_waiting, rows.num_free), self._num_stages)
        while len(builder.joined) < last and min(builder.budget, self._prompt_tokens) > 0 and (head := queue.head()):
            if head.num_rows > rows.num_free or not rows.has_slots(head) or not builder.limited(head, 1):
                return
            most = min(builder.budget, self._prompt_tokens)
            # Without chunked prefill, a prompt that is longer than the budget runs when nothing else does.
            budget = most if builder.scheduled or chunked else head.num_tokens
            alone = not residency.running and not builder.scheduled
            spare_blocks = 0 if alone else admission.reserved_blocks
            if (found := admission.reusable_of_fitting(head, budget, spare_blocks)) is None:
                return
            self._prompt_tokens -= admission.join(head, found, builder, most)

    def _promote(self, sequence: Sequence) -> None:
        running, waiting, queue = self._residency.running, self._residency.waiting, self._idle.queue
        runs = sequence.status is Status.RUNNING
        if runs:
            running.remove(sequence)
            queue.stopped(sequence)
        else:
            queue.withdraw(sequence)
        priority, arrival, number = sequence.age
        sequence.age, sequence.idle_until_s = (priority - IDLE_AGE, arrival, number), 0.0
        # The charge is the idle queue's. The ordinary queue charges the client for the whole output when the sequence
        # ends.
        sequence.num_charged_tokens = 0
        if runs:
            insort(running, sequence, key=_AGE)
            waiting.count_running(sequence)
        else:
            waiting.push(sequence)


class IdleSequences(Yielding):
    """The idle sequences: the rows, slots and blocks of the running ones, and their queue."""

    def __init__(self, residency: Residency, queue: WaitingQueue) -> None:
        super().__init__(queue)
        self.withheld = False
        """Whether the current plan leaves out the idle sequences, because ordinary ones need their rows or blocks."""
        self._residency = residency

    @property
    def running(self) -> list[Sequence]:
        """The running idle sequences, the oldest first."""
        return self._residency.running[self._residency.num_ordinary :]

    @property
    def num_rows(self) -> int:
        """See `Yielding`."""
        return sum(one.num_rows if len(one.beams) == 1 else 1 for one in self.running)

    @property
    def holds_slots(self) -> bool:
        """See `Yielding`."""
        return any(map(_has_slot, self.running))

    def num_blocks(self) -> int:
        """See `Yielding`. Blocks that ordinary sequences hold too do not count."""
        held = Counter(block for one in self.running for block in (*one.block_table, *one.window_blocks))
        return sum(count == self._residency.pool.ref_count(block) for block, count in held.items())

    def give_way(self, *, for_a_slot: bool = False) -> bool:
        """See `Yielding`. The youngest is preempted. If all are in flight, this plan leaves them out."""
        running = self.running
        for one in reversed(running):
            # Beams are preempted together.
            if not any(each.num_in_flight for each in one.beams or [one]) and (not for_a_slot or _has_slot(one)):
                self._residency.preempt(one)
                return True
        self.withheld = bool(running)
        return False


def _has_slot(sequence: Sequence) -> bool:
    return sequence.adapter_slot != NO_SLOT or sequence.prompt_slot != NO_SLOT
