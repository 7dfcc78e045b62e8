"""Stop strings in growing text: finds the first, and shows nothing that may turn out to be part of one. Pure.

Which one wins: the stop string that is complete first, because generation ends at that character; if several end
there, the longest, so that nothing of any of them is left. This does not depend on how the text is cut into tokens.
"""

from collections.abc import Sequence


class StopStrings:
    """Looks for `stops` in pushed text. With `include` the stop string is shown, else the text ends before it."""

    __slots__ = ("_first_characters", "_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(filter(None, stops))  # an empty one would end every text before it begins
        self._include = include
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def push(self, text: str, counts: bool = True) -> tuple[str, str | None]:
        """What may be shown now, and the stop string that ended the text, if one did: then nothing more is taken.

        With `counts` False a stop string that ends within `text` is ordinary text (`min_tokens`).
        """
        if not text:
            return "", None
        num_old = len(self._held)
        text = self._held + text
        found = self._find(text, num_old) if counts else None
        if found is not None:
            self._held = ""
            start, stop = found
            return text[: start + len(stop) if self._include else start], stop
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        return text[:num_shown], None

    def finish(self) -> str:
        """The text that was held back, when no more can come."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The winner among stop strings that end behind the first `num_old` characters, with its start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return (best[1], best[2]) if best is not None else None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for start in range(len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                    return len(tail)
        return 0
