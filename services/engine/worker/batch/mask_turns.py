"""Computes the masks of a step's grammars within a limited time. Called by the state table.

A sequence whose mask is not computed in time gets no token in this step, and its last token is computed again in the
next one. A sequence whose grammar is too slow ends with an error (`mask_time`). The time of masks is processor time of
this thread, so that other programs on a busy machine do not count. With several ranks, which measure different times, a
mask counts as computed if every rank has it.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.services.engine.parallel.communicator import ALONE_RANK, Communicator
from antiphon.services.engine.sampling.grammar import GrammarProcessor
from antiphon.services.engine.sampling.mask_time import Stopwatch, in_turn
from antiphon.services.engine.sampling.processor import Adjustment
from antiphon.shared import limits
from antiphon.shared.parameters.grammar import SUBJECT

_FAILED, _WAITS, _READY = 0, 1, 2
"""States of a mask. With several ranks the smallest counts."""
TOO_SLOW = (
    f"{SUBJECT} cannot be used: computing the tokens that it allows takes too long. Make it simpler: shorter literals, "
    "fewer repetitions, and fewer rules that match the same text."
)
Clock = Callable[[], float]


@dataclass(slots=True)
class SequenceMasks:
    """The masks of one sequence in a step: that of its next token, then those after draft tokens."""

    processor: GrammarProcessor
    places: list[tuple[int, int, list[int]]] = field(default_factory=list[tuple[int, int, list[int]]])
    """For each mask its index in the batch, the output position of its token, and the draft tokens before it."""
    states: list[int] = field(default_factory=list[int])
    """Of each mask."""


class MaskTurns:
    """The time for the masks of a worker's steps.

    `is_limited`: False for a worker that cannot compute a token again; it computes all masks in every step.
    """

    def __init__(
        self,
        ranks: Communicator = ALONE_RANK,
        *,
        is_limited: bool = True,
        clock: Clock = time.thread_time,
        now: Clock = time.monotonic,
    ) -> None:
        """`clock`: processor time of the calling thread in seconds; `now`: monotonic time."""
        self._ranks, self._is_limited = ranks, is_limited
        self._clock, self._now = clock, now
        self._ended_s = now()

    def compute(self, sequences: Sequence[SequenceMasks], adjustments: dict[int, Adjustment]) -> None:
        """Adds the masks of a step to its adjustments, by index in the batch.

        An adjustment whose mask is not computed in time is replaced by one that `waits`.
        """
        time_s, watch = self._time(), Stopwatch(self._clock, self._now)
        for one in sequences:
            one.states = [_WAITS] * len(one.places)
        for index in in_turn([one.processor.account for one in sequences], time_s):
            _compute_one(sequences[index], adjustments, watch, time_s)
            if watch.total_s >= time_s:
                break
        self._agree(sequences)
        for one in sequences:
            one.processor.account.waited(one.states[0] == _WAITS)
            for (place, _, _), state in zip(one.places, one.states, strict=True):
                # Without the sequence's other adjustments, so that all ranks go on with the same.
                if state == _WAITS:
                    adjustments[place] = Adjustment(waits=True)
                elif state == _FAILED:
                    adjustments[place] = Adjustment(error=adjustments[place].error or TOO_SLOW)
        self._ended_s = self._now()

    def _time(self) -> float:
        """Returns the seconds for the masks of a step: as many as the rest of a step takes, within the limits."""
        if not self._is_limited:
            return math.inf
        rest_s = self._now() - self._ended_s
        return min(max(rest_s, limits.MASKS_STEP_LEAST_S), limits.MASKS_STEP_MOST_S)

    def _agree(self, sequences: Sequence[SequenceMasks]) -> None:
        """Gives each mask its smallest state over all ranks."""
        if self._ranks.shard.size == 1:
            return
        states = np.array([state for one in sequences for state in one.states], dtype=np.int8)
        agreed = iter(self._ranks.smallest_of_each(states).tolist())
        for one in sequences:
            one.states = [next(agreed) for _ in one.states]


def _compute_one(one: SequenceMasks, adjustments: dict[int, Adjustment], watch: Stopwatch, time_s: float) -> None:
    """Computes a sequence's masks. Stops between two masks if the step's time is over."""
    processor, began_s, num_pending, num_masks = one.processor, watch.total_s, one.processor.num_pending, 0
    if processor.catch_up(lambda: watch.read() < time_s):
        for place, position, drafts in one.places:
            if num_masks and watch.read() >= time_s:
                break
            processor.adjust(adjustments[place], position, drafts)
            one.states[num_masks] = _FAILED if adjustments[place].error else _READY
            num_masks += 1
    processor.account.spend(watch.read() - began_s, max(num_masks, num_pending - processor.num_pending, 1))
    if processor.account.is_exceeded:
        one.states[0], adjustments[one.places[0][0]].error = _FAILED, TOO_SLOW
