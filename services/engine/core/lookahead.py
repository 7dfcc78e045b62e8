"""Guesses of the next tokens from a sequence's own: what followed the last time the same few tokens stood there.

A guess (draft) costs a worker little if it computes several tokens of a sequence in one pass, and saves a pass for each
token that turns out right. Wrong guesses cost: how far a sequence guesses follows from how its last guesses went, and
after a guess with nothing right it rests, longer each time. Pure; one object for each sequence. Used by `scheduler`
(drafts) and `core` (verdicts).
"""

from array import array

NGRAMS = (3, 2)
"""Lengths of the endings that are looked up, longest first."""
FIRST_REACH = 4
REST_STEPS_MAX = 64


class Lookahead:
    """One sequence's memory of its tokens, and how far to guess."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reach = min(FIRST_REACH, most)
        self._misses = 0
        self._rest = 0
        self._num_indexed = 0
        self._follows: dict[bytes, int] = {}
        """Each ending to the place of the token that followed its last occurrence."""

    def draft(self, tokens: "array[int]", most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow; empty while resting or where nothing like the end was seen before."""
        if self._rest:
            self._rest -= 1
            return ()
        most = min(most, self._reach)
        if most < 1:
            return ()
        self._index(tokens)
        place = self._find(tokens)
        if place is None:
            return ()
        # What is guessed beyond the known tokens repeats the guess.
        period = len(tokens) - place
        return tuple(tokens[place + offset % period] for offset in range(most))

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """How a draft went."""
        if num_accepted == 0:
            self._misses += 1
            self._rest = min(2**self._misses, REST_STEPS_MAX)
            self._reach = max(1, self._reach // 2)
            return
        self._misses = 0
        self._reach = min(self._most, 2 * self._reach if num_accepted == num_drafted else num_accepted + 1)

    def _index(self, tokens: "array[int]") -> None:
        """Every ending that something follows, each once."""
        for end in range(max(self._num_indexed, 1), len(tokens)):
            for length in NGRAMS:
                if length <= end:
                    self._follows[tokens[end - length : end].tobytes()] = end
        self._num_indexed = len(tokens)

    def _find(self, tokens: "array[int]") -> int | None:
        for length in NGRAMS:
            place = self._follows.get(tokens[-length:].tobytes()) if length <= len(tokens) else None
            if place is not None:
                return place
        return None
