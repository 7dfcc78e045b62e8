"""Makes the usage book of a gateway, unless the bus keeps nothing (`--stream-store=off`)."""

from antiphon.services.gateway.edge.access.kept_images import KeptImages
from antiphon.services.gateway.edge.access.usage_sinks import sink_of
from antiphon.services.gateway.guests.offers import RecordedOutput, RecordedRequests
from antiphon.services.gateway.guests.usage.book import LoggedUsage
from antiphon.services.gateway.guests.usage.delivery import Delivery, sink_name
from antiphon.services.gateway.guests.usage.log import UsageLog
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.shared.config import GatewaySettings


def make(gateway: GatewayActor, settings: GatewaySettings) -> LoggedUsage | None:
    """See `guests.make_guests`."""
    images = gateway.guests.offered(KeptImages)
    if images is None:
        return None
    clock, usage = gateway.host.clock, UsageLog(images.logs)

    def heard() -> set[tuple[str, str]]:
        return {(beat.id, beat.instance_id) for beat in gateway.gateways()}

    async def recorded(request_id: str) -> RecordedOutput | None:
        requests = gateway.guests.offered(RecordedRequests)
        return None if requests is None else await requests.recorded(request_id)

    delivery = None
    if settings.usage_sink:
        sink = sink_of(settings.usage_sink)
        delivery = Delivery(usage, sink_name(sink.name), sink.deliver, clock, heard)
    return LoggedUsage(usage, clock, heard, recorded, delivery)
