"""The image service: loads a model's processor and vision encoder on a thread, and runs the actor."""

import asyncio

from antiphon.services.vision.actor import VisionActor
from antiphon.services.vision.encoder import VisionEncoder, load_encoder
from antiphon.shared.actors.host import Host
from antiphon.shared.config import VisionSettings
from antiphon.shared.messages import ServiceName, VisionStatus
from antiphon.shared.models.image_models import check_image_files, processor_kwargs
from antiphon.shared.models.model_files import located, model_directory, model_name


class VisionService:
    """One replica. Construction raises SettingsError for a model without image input, or for wrong arguments."""

    name: ServiceName = "vision"

    def __init__(self, settings: VisionSettings) -> None:
        self._settings = located(settings)
        self._directory = model_directory(self._settings)
        self._kwargs = processor_kwargs(settings.mm_processor_kwargs)
        check_image_files(self._directory)
        self._actor: VisionActor | None = None

    async def start(self, host: Host) -> None:
        """See Service. Raises SettingsError if processor or weights cannot be used."""
        encoder = await asyncio.to_thread(self._load)
        self._actor = VisionActor(host, encoder, model_name(self._settings))
        await self._actor.listen()
        self._actor_task = asyncio.create_task(self._actor.run())

    def status(self) -> VisionStatus:
        """See Service."""
        actor, model = self._actor, model_name(self._settings)
        if actor is None:
            return VisionStatus(model=model)
        return VisionStatus(
            model=model,
            num_requests=actor.num_requests,
            num_hits=actor.num_hits,
            num_tokens=actor.num_tokens,
            cached_bytes=actor.cache.num_bytes,
        )

    async def run(self) -> None:
        """See Service."""
        assert self._actor is not None
        done, _ = await asyncio.wait({self._actor_task, self._actor.broken}, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            await part

    async def drain(self) -> None:
        """See Service. Answers all requests that have arrived."""
        assert self._actor is not None
        await self._actor.stop()
        await self._actor_task

    def _load(self) -> VisionEncoder:
        return load_encoder(self._directory, self._kwargs, self._settings.vision_device)
