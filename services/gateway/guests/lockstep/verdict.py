"""Decides which of two engines is wrong at a position where their tokens differ. Pure.

Evidence is gathered in this order, until one kind decides: a third engine computes the token; both compute it again
from the agreed prefix; both test themselves. Without a decision, neither token can be trusted, and the request must
end.
"""

from typing import Literal

Loser = Literal[0, 1]
"""Index of the engine that is wrong."""
Tokens = tuple[int | None, int | None]


def by_third(tokens: Tokens, third: int | None) -> Loser | None:
    """Decides by the token of a third engine (None: it gave none). The engine that does not agree with it is wrong."""
    if third is None or third not in tokens:
        return None
    return 1 if third == tokens[0] else 0


def by_repetition(tokens: Tokens, again: Tokens) -> Loser | None:
    """Decides by the tokens that both engines computed a second time (`again`; None: no token).

    If only one engine got another token than the first time, this engine is wrong.

    An engine that first ended the sequence and now continues it counts as having got another token.
    """
    changed = tuple(now is not None and now != before for now, before in zip(again, tokens, strict=True))
    if None in again or changed[0] == changed[1]:
        return None
    return 0 if changed[0] else 1


def by_self_test(faults: tuple[str | None, str | None]) -> Loser | None:
    """Decides by self-tests. `faults`: the fault that each engine found; empty: none, None: no answer.

    There is a decision only if exactly one engine has a fault.

    An engine that does not answer counts neither as right nor as wrong.
    """
    found = tuple(bool(fault) for fault in faults)
    if found[0] == found[1]:
        return None
    return 0 if found[0] else 1
