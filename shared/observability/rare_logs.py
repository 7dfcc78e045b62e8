"""A log for faults that others can cause as often as they like: of each kind at most one line in an interval.

The lines left out are counted, so that a flood neither fills a disk nor goes unseen.
"""

import logging
import time
from collections.abc import Callable

from antiphon.shared import limits

_OTHERS = "others"
"""The kind of all kinds beyond `limits.LOG_KINDS_MAX`."""


class RareLog:
    """Writes to `log`. `kind` says what is counted together; it must not be made of a client's input.

    `now` is a monotonic clock, seconds.
    """

    def __init__(
        self,
        log: logging.Logger,
        interval_s: float = limits.LOG_INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._interval_s, self._now = log, interval_s, now
        self._kinds: dict[str, _Kind] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """Logs a warning, or counts it if the last line of its kind is younger than the interval."""
        self._write(logging.WARNING, kind, message, args, None)

    def error(self, kind: str, error: BaseException, message: str, *args: object) -> None:
        """The same for an error, with its traceback."""
        self._write(logging.ERROR, kind, message, args, error)

    def _write(
        self, level: int, kind: str, message: str, args: tuple[object, ...], error: BaseException | None
    ) -> None:
        if kind not in self._kinds and len(self._kinds) >= limits.LOG_KINDS_MAX:
            kind = _OTHERS
        known, now = self._kinds.setdefault(kind, _Kind()), self._now()
        if now < known.due:
            known.left_out += 1
            return
        if known.left_out:
            message, args = f"{message} (%d more since the last such line)", (*args, known.left_out)
        known.due, known.left_out = now + self._interval_s, 0
        self._log.log(level, message, *args, exc_info=error)


class _Kind:
    """When the next line of a kind may be logged, and how many were left out since the last one."""

    def __init__(self) -> None:
        self.due = float("-inf")
        self.left_out = 0
