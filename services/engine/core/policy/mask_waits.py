"""Which sequences a step leaves out because they wait for the masks of their grammars (`StepResult.token_ids`).

Their last token would be computed in vain if the worker computes other masks again. So only a few of them, those that
have been left out longest, are tried in each step. Used by the lanes.
"""

from collections.abc import Iterable

from services.engine.core.sequence import Sequence

TRIED_MAX = 8
"""Waiting sequences in a step. One that gets a token no longer waits and makes room for another."""


def left_out(running: Iterable[Sequence]) -> frozenset[int]:
    """Returns the rows of the waiting sequences that the next step leaves out."""
    waiting = [sequence for sequence in running if sequence.again]
    if len(waiting) <= TRIED_MAX:
        return frozenset()
    waiting.sort(key=lambda sequence: sequence.again)
    return frozenset(sequence.row for sequence in waiting[TRIED_MAX:])
