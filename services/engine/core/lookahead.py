"""Guesses of the next tokens from a sequence's own: what followed the last time the same few tokens stood there.

A guess (draft) costs a worker little if it computes several tokens of a sequence in one pass, and saves a pass for each
token that turns out right. Wrong guesses cost: how far a sequence guesses follows from how its last guesses went, and
after a guess with nothing right it rests, longer each time. Pure; one object for each sequence. Used by `scheduler`
(drafts) and `core` (verdicts).
"""

from array import array

CANDIDATES_MAX = 8
"""Places behind the same two tokens that are looked at for one behind the same three."""
FIRST_REACH = 4
REST_STEPS_MAX = 64
BLANKS_A_STEP = 8
BLANK_STEPS_MAX = 7
"""After every so many looks in a row that found nothing one step more passes without a look, up to so many steps."""


class Lookahead:
    """One sequence's memory of its tokens, and how far to guess."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reach = min(FIRST_REACH, most)
        self._misses = 0
        self._rest = 0
        self._blanks = 0
        self._latest: dict[int, int] = {}
        """Each pair of tokens to the place behind its last occurrence that something follows."""
        self._earlier = array("I", (0, 0))
        """For each such place the one behind the pair's occurrence before; 0: there is none."""

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
            self._blanks += 1
            self._rest = min(self._blanks // BLANKS_A_STEP, BLANK_STEPS_MAX)
            return ()
        self._blanks = 0
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
        """Every pair that something follows, each once."""
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = place

    def _find(self, tokens: "array[int]") -> int | None:
        """The latest place behind the last three tokens, or else behind the last two."""
        if len(tokens) < 2:
            return None
        place = first = self._latest.get(tokens[-2] << 32 | tokens[-1], 0)
        for _ in range(CANDIDATES_MAX):
            if place < 3:
                break
            if tokens[place - 3] == tokens[-3]:
                return place
            place = self._earlier[place]
        return first or None
