"""Makes the shared answers of a gateway, unless the bus keeps nothing (`--stream-store=off`)."""

from antiphon.services.gateway.apis.openai.serving import StreamBook
from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.guests.idempotency.store import BusAnswers
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> BusAnswers | None:
    """See `guests.make_guests`."""
    images = gateway.guests.offered(KeptImages)
    if images is None:
        return None

    def heard() -> set[tuple[str, str]]:
        return {(beat.id, beat.instance_id) for beat in gateway.gateways()}

    def can_resume(path: str) -> bool:
        book = gateway.guests.offered(StreamBook)
        return book is not None and book.can_resume(path)

    return BusAnswers(images.logs, heard, can_resume)
