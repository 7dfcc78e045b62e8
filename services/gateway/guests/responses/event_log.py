"""The events of a background response: written once, read by any number of clients from any event on.

Event number n of the log has the `sequence_number` n.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from antiphon.services.gateway.edge.http import sse


class EventLog:
    """Events in order. Implements `serving.Sink`; its size is bounded by the longest output of a model."""

    def __init__(self, events: Sequence[bytes] = (), *, ended: bool = False) -> None:
        self.events = list(events)
        self._ended = ended
        self._changed = asyncio.Event()

    async def write(self, data: bytes) -> None:
        """Appends events."""
        self._append(data)

    async def flush(self) -> None:
        """Does nothing: readers have what is written at once."""

    def shown(self) -> list[bytes]:
        """Returns the events so far."""
        return self.events

    async def end(self, data: bytes) -> None:
        """Appends the last events. Readers end after them."""
        self._ended = True
        self._append(data)

    async def read(self, first: int) -> AsyncGenerator[bytes]:
        """Yields the events from number `first` on, several at a time, and waits for further ones until the end."""
        while True:
            changed, ended = self._changed, self._ended
            if found := self.events[first:]:
                first += len(found)
                yield b"".join(found)
            elif ended:
                return
            else:
                await changed.wait()

    def _append(self, data: bytes) -> None:
        self.events += sse.split_events(data)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
