"""Makes the streams of a gateway, unless nothing is kept of them (`--stream-store=off`)."""

from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.guests.resume.store import StreamStore
from antiphon.services.gateway.guests.resume.streams import Streams
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> Streams | None:
    """See `guests.make_guests`."""
    images = gateway.guests.offered(KeptImages)
    if images is None:
        return None

    def heard() -> set[tuple[str, str]]:
        return {(beat.id, beat.instance_id) for beat in gateway.gateways()}

    store, records_all = StreamStore(images), settings.record_streams == "all"
    return Streams(gateway.host, store, settings.stream_grace, records_all=records_all, heard=heard)
