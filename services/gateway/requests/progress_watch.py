"""Which running sequences have had no text for a while, by engine: those that the gateway asks the engine about. Pure.

Every sequence has a time: when it was placed, had text, or was asked about, whichever was last. The sequences of an
engine are kept in the order of these times, so that finding the overdue ones costs nothing for the others.
"""

from collections import OrderedDict

from services.gateway.requests.sequence_state import Address
from shared import limits


class ProgressWatch:
    """The running sequences of one gateway."""

    def __init__(self) -> None:
        self._engines: dict[Address, OrderedDict[str, float]] = {}

    def touch(self, engine: Address, sequence_id: str, now: float) -> None:
        """The sequence runs there and has just shown it. Adds it when it is new."""
        times = self._engines.setdefault(engine, OrderedDict())
        times[sequence_id] = now
        times.move_to_end(sequence_id)

    def drop(self, engine: Address, sequence_id: str) -> None:
        """The sequence does not run there any more. Harmless when repeated."""
        times = self._engines.get(engine)
        if times is not None:
            times.pop(sequence_id, None)
            if not times:
                del self._engines[engine]

    def engines(self) -> list[Address]:
        """Engines on which sequences run."""
        return list(self._engines)

    def overdue(self, engine: Address, now: float) -> list[str]:
        """Sequences without a sign of life for STALL_S, the longest silent first, at most LIVENESS_BATCH_MAX.

        They count as asked about now.
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
        """Time in which nothing could be heard does not count."""
        for times in self._engines.values():
            for sequence_id in times:
                times[sequence_id] = now
