"""Finds the first stop string in growing text and holds back text that may be the beginning of a stop string. Pure.

The first stop string is the one that is complete first, because generation ends at that character. If several stop
strings end at the same character, the longest one counts, so that no part of any of them remains. The result does not
depend on how the text is split into tokens.
"""

from collections.abc import Sequence


class StopStrings:
    """Searches for `stops` in pushed text. The shown text includes the stop string only with `include`."""

    __slots__ = ("_first_characters", "_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(filter(None, stops))  # an empty stop string would match at once
        self._include = include
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def push(self, text: str, counts: bool = True) -> tuple[str, str | None]:
        """Returns the text that can be shown now, and the stop string that ended the text or None.

        After a stop string, `push` must not be called again. With `counts` False a stop string that ends within `text`
        is treated as ordinary text (`min_tokens`).
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
        """Returns the text that was held back. To be called when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Returns the first stop string that ends after the first `num_old` characters, as (start, stop string)."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return (best[1], best[2]) if best is not None else None

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` that is the beginning of a stop string."""
        for start in range(len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                    return len(tail)
        return 0
