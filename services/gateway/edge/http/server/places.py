"""The open connections of a gateway: as many as it has descriptors for, and which of them make room for new ones.

Without this, clients that open connections and send nothing, or a byte now and then, would keep all others out. A
connection that has little to lose is closed for a new one: first the one that has been without a request for the
longest time, then the one whose request has been incomplete for the longest time. A connection whose request is being
answered is never closed. No sockets, no clock.
"""

from collections.abc import Callable


def _nothing() -> None:
    pass


class Place:
    """The place of one connection. `close` closes the connection at once; whoever has the connection sets it.

    `is_extra`: there was no room, and no other connection could make room. The connection must be refused.
    """

    __slots__ = ("_kind", "_places", "close", "is_extra")

    def __init__(self, places: "Places", *, is_extra: bool) -> None:
        self.close: Callable[[], object] = _nothing
        self.is_extra = is_extra
        self._places = places
        self._kind = places.idle
        self._kind[self] = None

    def idle(self) -> None:
        """No request has begun, or its headers are incomplete, or the last one is answered."""
        self._move(self._places.idle)

    def reading(self) -> None:
        """A request has begun, and its body is incomplete."""
        self._move(self._places.reading)

    def busy(self) -> None:
        """A complete request is being answered."""
        self._move(self._places.busy)

    def leave(self) -> None:
        """The connection has ended. May be called again."""
        self._kind.pop(self, None)

    def _move(self, kind: "dict[Place, None]") -> None:
        if self._kind.pop(self, self) is None:  # it was there: the connection has not left
            self._kind = kind
            kind[self] = None


class Places:
    """All places of a gateway, by what their connections do, in the order in which they began to do it."""

    def __init__(self, size: int) -> None:
        """`size`: the largest number of connections."""
        self.size = size
        self.idle: dict[Place, None] = {}
        self.reading: dict[Place, None] = {}
        self.busy: dict[Place, None] = {}

    def __len__(self) -> int:
        return len(self.idle) + len(self.reading) + len(self.busy)

    def take(self) -> Place:
        """Returns the place of a new connection, which is idle. Closes others if there is no room."""
        while len(self) >= self.size and (oldest := next(iter(self.idle), None) or next(iter(self.reading), None)):
            oldest.leave()
            oldest.close()
        return Place(self, is_extra=len(self) >= self.size)
