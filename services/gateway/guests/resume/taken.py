"""Streams that another gateway has resumed: their runs here end."""

from collections.abc import Callable

from services.gateway.path.guest import Guest
from shared.actors.actor import Envelope, handles
from shared.messages import StreamTaken


class TakenStreams(Guest):
    """Passes the news to `receivers`."""

    def __init__(self) -> None:
        self.receivers: list[Callable[[StreamTaken], None]] = []

    @handles(StreamTaken)
    def on_stream_taken(self, envelope: Envelope[StreamTaken]) -> None:
        """Ends the run of a stream that another gateway has resumed."""
        message = envelope.message
        for receive in self.receivers:
            receive(message)
