"""Images in conversations: fetched, kept while the request runs, and encoded by an image service."""

from collections.abc import Sequence
from operator import attrgetter

from msgspec.structs import replace

from antiphon.services.gateway.guests.images.encoding import RequestImage, encoded
from antiphon.services.gateway.guests.images.remote import RemoteImages
from antiphon.services.gateway.guests.images.store import ImageStore
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.guest import Guest, RequestGuest, Running
from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.config import GatewaySettings
from antiphon.shared.messages import ImageFile, ImagePart, ReadImage


class RequestImages(RequestGuest):
    """The images of one request. Their files are kept until it ends."""

    def __init__(
        self,
        store: ImageStore,
        clients: ServiceClients,
        request: GenerationRequest,
        card: ModelCard,
        running: Running | None,
    ) -> None:
        self._store, self._clients, self._running = store, clients, running
        self._request, self._model = request, card.served_by
        self._files: list[ImageFile] = []

    async def attachments(self) -> Sequence[RequestImage]:
        """See RequestGuest."""
        fetched = await self._store.fetched(self._request.inputs.images)
        if self._running is not None and self._running.over:
            return ()
        self._files = self._store.hold(fetched)
        return await encoded(self._clients, self._model, fetched, self._files, self._request.origin.client.name)

    def ended(self) -> None:
        """See RequestGuest."""
        self._store.release(self._files)


class Images(Guest):
    """The images of one gateway."""

    asked_by = attrgetter("inputs.images")

    def __init__(self, gateway: GatewayActor, remote: RemoteImages) -> None:
        host = gateway.host
        self._gateway = gateway
        self.store = ImageStore(remote, host.subjects.gateway_images(host.id, host.instance_id))

    async def listen(self) -> None:
        """See Guest."""
        host = self._gateway.host
        await self._gateway.bind(host.subjects.gateway_images(host.id, host.instance_id), ReadImage)

    def close(self) -> None:
        """See Guest. Ends the threads that download images."""
        self.store.close()

    async def fetched(self, request: GenerationRequest) -> GenerationRequest:
        """See Guest."""
        images = tuple(await self.store.fetched(request.inputs.images))
        return replace(request, inputs=replace(request.inputs, images=images))

    def joins(self, request: GenerationRequest, card: ModelCard, running: Running | None) -> RequestImages:
        """See Guest."""
        return RequestImages(self.store, self._gateway.parts.clients, request, card, running)

    @handles(ReadImage)
    def on_read_image(self, envelope: Envelope[ReadImage]) -> ImagePart:
        """Sends a part of an image file to an image service."""
        message = envelope.message
        return self.store.part(message)


def make(gateway: GatewayActor, settings: GatewaySettings) -> Images:
    """See `guests.make_guests`."""
    return Images(gateway, RemoteImages(settings.allowed_media_domains))
