"""Makes the recorded requests of a gateway, if it records streams."""

from antiphon.services.gateway.guests.background.requests import BackgroundStreams
from antiphon.services.gateway.guests.background.store import BackgroundStore
from antiphon.services.gateway.guests.resume.streams import Streams
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.shared import limits
from antiphon.shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> None:
    """See `guests.make_guests`. The requests are offered to `api`."""
    streams = gateway.guests.offered(Streams)
    if streams is None:
        return

    def living() -> set[tuple[str, str]]:
        # A draining gateway has handed its background responses over to the others.
        return {(beat.id, beat.instance_id) for beat in gateway.gateways() if beat.state != "draining"}

    store = BackgroundStore(streams.store.images)
    requests = BackgroundStreams(gateway.host, store, streams.store, streams.journal, living)
    streams.receivers.append(requests.on_taken)
    streams.stores.append((store, limits.RESPONSE_TTL_S))
    gateway.guests.offer(requests)
