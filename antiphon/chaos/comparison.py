"""Compares the tokens of a stream with those of a run without faults: counts lost, repeated and differing tokens.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MATCH = 4
"""Number of equal tokens after which two sequences count as aligned again."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Numbers of tokens lost and repeated. `differing`: whether other tokens differ."""

    lost: int = 0
    repeated: int = 0
    differing: bool = False

    def __bool__(self) -> bool:
        return self.differing or bool(self.lost or self.repeated)


def compare(known: Sequence[int], got: Sequence[int]) -> Difference:
    """Returns how `got` differs from `known`.

    At a mismatch, `known` is shifted by the smallest number of tokens after which the next `MATCH` tokens (or all that
    remain) are equal. Tokens of `known` that a shift forward skips are lost; tokens of `got` that a shift backward
    matches once more are repeated.
    """
    i = j = lost = repeated = 0
    while i < len(known) and j < len(got):
        if known[i] == got[j]:
            i, j = i + 1, j + 1
            continue
        shift = _shift(known, got, i, j)
        if shift is None:
            return Difference(lost, repeated, True)
        lost, repeated = lost + max(0, shift), repeated + max(0, -shift)
        i += shift
    # Tokens that remain in `got` came after the end of `known`.
    return Difference(lost + len(known) - i, repeated + len(got) - j)


def _shift(known: Sequence[int], got: Sequence[int], i: int, j: int) -> int | None:
    """Returns the shift of `known` after which it agrees with `got[j:]`; None if there is none.

    The shift is positive after a loss and negative after a repetition.
    """
    wanted = tuple(got[j : j + MATCH])
    for step in range(1, max(len(known) - i, i) + 1):
        for shift in (step, -step):
            begin = i + shift
            if 0 <= begin < len(known) and tuple(known[begin : begin + len(wanted)]) == wanted:
                return shift
    return None
