"""Drafts the next tokens of a sequence by n-gram lookup in its own tokens (prompt lookup decoding).

The draft consists of the tokens that followed the latest earlier occurrence of the sequence's last three tokens, or
else of its last two. Computing several tokens of a sequence in one step costs a worker little, and each accepted draft
token saves a step. Rejected ones cost time. The draft length therefore follows from how many tokens of the last drafts
were accepted, and after a draft without an accepted token the sequence drafts nothing for some steps, more each time.
No I/O; one object for each sequence. `core` creates the objects, `residency` calls them.
"""

from array import array

CANDIDATES_MAX = 8
"""Number of earlier occurrences of the last two tokens that are checked for a match of the last three."""
FIRST_REACH = 4
REST_STEPS_MAX = 64
BLANKS_A_STEP = 8
BLANK_STEPS_MAX = 7
"""After every `BLANKS_A_STEP` lookups in a row without a match, one more step is skipped after each lookup, up to
`BLANK_STEPS_MAX` steps."""


class PromptLookup:
    """The token index of one sequence and its current draft length. `most` is the maximum draft length."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reach = min(FIRST_REACH, most)
        self._misses = 0
        self._rest = 0
        self._blanks = 0
        self._latest: dict[int, int] = {}
        """Maps a token pair to the index after its latest occurrence. A pair at the end of the tokens has no entry."""
        self._earlier = array("I", (0, 0))
        """For each such index, the index after the previous occurrence of the same pair; 0 if there is none."""

    def draft(self, tokens: "array[int]", most: int) -> tuple[int, ...]:
        """Returns at most `most` draft tokens; none while the sequence pauses or if its last tokens have no match."""
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
        # A draft that reaches beyond the known tokens repeats itself.
        period = len(tokens) - place
        return tuple(tokens[place + offset % period] for offset in range(most))

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Records how many tokens of a draft were accepted and adapts the draft length and the pause."""
        if num_accepted == 0:
            self._misses += 1
            self._rest = min(2**self._misses, REST_STEPS_MAX)
            self._reach = max(1, self._reach // 2)
            return
        self._misses = 0
        self._reach = min(self._most, 2 * self._reach if num_accepted == num_drafted else num_accepted + 1)

    def _index(self, tokens: "array[int]") -> None:
        """Adds the token pairs that are new since the last call and have a following token."""
        latest, earlier = self._latest, self._earlier
        for place in range(len(earlier), len(tokens)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = place

    def _find(self, tokens: "array[int]") -> int | None:
        """Returns the index after the latest match of the last three tokens, or else of the last two; None if none."""
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
