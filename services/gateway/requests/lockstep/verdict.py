"""Decides which of two engines is wrong at a position where their tokens differ. Pure.

Evidence is gathered in this order, until one kind decides: a third engine computes the token; both compute it again
from the agreed prefix; both test themselves. Without a decision nobody is right, and the request must end.
"""

from typing import Literal

Loser = Literal[0, 1]
"""Index of the engine that is wrong."""
Tokens = tuple[int | None, int | None]


def by_third(tokens: Tokens, third: int | None) -> Loser | None:
    """`third`: the token of a third engine; None if it gave none. It decides if it agrees with one of the two."""
    if third is None or third not in tokens:
        return None
    return 1 if third == tokens[0] else 0


def by_repetition(tokens: Tokens, again: Tokens) -> Loser | None:
    """`again`: what each engine gave the second time; None: nothing. The one that alone changes its mind is wrong.

    An engine that had ended and now goes on has changed its mind, too.
    """
    changed = tuple(now is not None and now != before for now, before in zip(again, tokens, strict=True))
    if None in again or changed[0] == changed[1]:
        return None
    return 0 if changed[0] else 1


def by_self_test(faults: tuple[str | None, str | None]) -> Loser | None:
    """`faults`: what each found wrong with itself; empty: nothing, None: no answer. One alone must have found a fault.

    An engine that does not answer has not been acquitted, but is not convicted either.
    """
    found = tuple(bool(fault) for fault in faults)
    if found[0] == found[1]:
        return None
    return 0 if found[0] else 1
