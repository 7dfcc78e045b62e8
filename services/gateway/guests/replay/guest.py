"""Requests that can run again: what that takes is added to their records (`--record-content-mb`)."""

from operator import attrgetter

from antiphon.services.gateway.guests.replay.content import content_of
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.guest import Guest, RequestGuest, Running
from antiphon.shared.config import GatewaySettings


class RecordsContent(RequestGuest):
    """Adds the content of a request to its record when it ends."""

    def __init__(self, running: Running) -> None:
        self._running = running
        running.request.origin.record.follow(self._content)

    def ended(self) -> None:
        """See RequestGuest."""
        self._running.request.origin.record.content(self._content())

    def _content(self) -> bytes:
        one = self._running
        if not one.prompts or not one.sequences:
            return b""
        return content_of(one.messages.request, one.card, one.prompts, one.sequences)


class Replay(Guest):
    """See the module."""

    asked_by = attrgetter("origin.record.keeps_content")

    def joins(self, request: GenerationRequest, card: ModelCard, running: Running | None) -> RecordsContent | None:
        """See Guest."""
        return None if running is None or request.pooling is not None else RecordsContent(running)


def make(gateway: GatewayActor, settings: GatewaySettings) -> Replay:
    """See `guests.make_guests`."""
    return Replay()
