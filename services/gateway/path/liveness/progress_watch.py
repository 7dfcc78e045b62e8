"""Finds running sequences that have had no text for some time, so that the gateway can ask their engines. Pure.

For each sequence the latest time is kept at which it was placed, had text, or was asked about. The sequences of an
engine are kept in the order of these times, so finding the overdue ones does not visit the others.
"""

from collections import OrderedDict, defaultdict

from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared import limits


class ProgressWatch:
    """The running sequences of one gateway, by engine. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._engines: defaultdict[Address, OrderedDict[str, float]] = defaultdict(OrderedDict)

    def touch(self, engine: Address, sequence_id: str, now: float) -> None:
        """Sets the time of a sequence that runs on `engine` to `now`. Adds the sequence if it is new."""
        times = self._engines[engine]
        times[sequence_id] = now
        times.move_to_end(sequence_id)

    def drop(self, engine: Address, sequence_id: str) -> None:
        """Removes a sequence that no longer runs on `engine`. Idempotent."""
        times = self._engines.get(engine)
        if times is not None:
            times.pop(sequence_id, None)
            if not times:
                del self._engines[engine]

    def engines(self) -> list[Address]:
        """Returns the engines on which sequences run."""
        return list(self._engines)

    def overdue(self, engine: Address, now: float) -> list[str]:
        """Returns sequences that had no text for STALL_S, longest silence first, at most LIVENESS_BATCH_MAX.

        Sets their times to `now`, because the caller asks about them.
        """
        found: list[str] = []
        for sequence_id, touched_at in self._engines.get(engine, {}).items():
            if now - touched_at <= limits.STALL_S or len(found) >= limits.LIVENESS_BATCH_MAX:
                break
            found.append(sequence_id)
        for sequence_id in found:
            self.touch(engine, sequence_id, now)
        return found

    def touch_all(self, now: float) -> None:
        """Sets all times to `now`. Called after the gateway was disconnected, when no text could arrive."""
        for times in self._engines.values():
            for sequence_id in times:
                times[sequence_id] = now
