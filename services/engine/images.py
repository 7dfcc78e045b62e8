"""Reads the embeddings of images from image services before a sequence is queued, and limits their memory.

The replica of the image service that has encoded an image is asked first. If it is gone or has evicted the embeddings,
any replica for the model encodes the image again from its file, which the gateway keeps as long as the request runs.
Recently read embeddings are cached, so the choices of a prompt and the next turns of a conversation read them only
once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from antiphon.services.engine.core.plan import PlacedImage
from antiphon.shared import limits
from antiphon.shared.actors.actor import ask
from antiphon.shared.actors.background import Background
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.image_parts import read_parts
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EncodeImage, ErrorReply, ImageEncoded, PromptImage, ReadEmbeddings
from antiphon.shared.request.images import num_image_tokens, plain_places
from antiphon.shared.structures.byte_cache import ByteCache

_ENCODED = Decoder([ImageEncoded, ErrorReply])
_GONE = ("not_found", "actor_stopped", "server_is_overloaded", "timeout")
TRY_S = 8.0
PAUSE_S = 0.2
RETRY_AFTER_S = 1.0


class ImageLoader:
    """The images of one engine. `model`: the served name of its model."""

    def __init__(self, host: Host, model: str) -> None:
        self._host, self._model = host, model
        self._kept = ByteCache[bytes](limits.ENGINE_IMAGE_CACHE_BYTES)
        self._reading: dict[bytes, asyncio.Task[bytes]] = {}
        self._reserved: dict[str, int] = {}
        """Bytes of the embeddings of each live sequence with images, and of some that have ended."""
        self._starting = Background("images were not loaded")

    def reserve(self, sequence: str, images: Sequence[PromptImage], is_live: Callable[[str], bool]) -> None:
        """Reserves memory for the embeddings of a new sequence. `is_live`: whether an earlier sequence has not ended.

        Raises ServiceError ('server_is_overloaded') if the embeddings of all live sequences would be too large.
        """
        self._reserved = {name: size for name, size in self._reserved.items() if is_live(name)}
        size = sum(image.encoded.num_bytes for image in images)
        if sum(self._reserved.values()) + size > limits.ENGINE_IMAGE_BYTES_MAX:
            message = "The engine has too many images."
            raise ServiceError("server_is_overloaded", message, retry_after_s=RETRY_AFTER_S)
        self._reserved[sequence] = size

    def start(
        self,
        images: Sequence[PromptImage],
        loaded: Callable[[tuple[PlacedImage, ...]], None],
        refused: Callable[[ServiceError], Awaitable[None]],
    ) -> None:
        """Reads images in the background, and then calls `loaded`, or `refused` with the reason."""
        self._starting.spawn(self._load(images, loaded, refused))

    async def _load(
        self,
        images: Sequence[PromptImage],
        loaded: Callable[[tuple[PlacedImage, ...]], None],
        refused: Callable[[ServiceError], Awaitable[None]],
    ) -> None:
        try:
            placed = await self.load(images)
        except ServiceError as error:
            await refused(error)
            return
        loaded(placed)

    async def load(self, images: Sequence[PromptImage]) -> tuple[PlacedImage, ...]:
        """Returns the images with their embeddings. Raises ServiceError if no image service answers in time."""
        return tuple(await asyncio.gather(*map(self._placed, images)))

    async def _placed(self, image: PromptImage) -> PlacedImage:
        told = image.encoded
        embeddings = self._kept.get(told.key)
        if embeddings is None:
            task = self._reading.get(told.key)
            if task is None:
                task = self._reading[told.key] = asyncio.create_task(self._read(image))
                task.add_done_callback(lambda _: self._reading.pop(told.key, None))
            embeddings = await asyncio.shield(task)
        plain = plain_places(told.layout, told.token_id)
        return PlacedImage(
            start=image.start,
            num_tokens=num_image_tokens(told),
            rows=told.rows,
            columns=told.columns,
            key=told.key,
            embeddings=embeddings,
            dtype=told.dtype,
            plain=plain,
        )

    async def _read(self, image: PromptImage) -> bytes:
        """Returns the embeddings, from the replica that has them or else from one that encodes the image again."""
        told, deadline = image.encoded, self._now() + limits.IMAGE_ENCODE_S
        while True:
            try:
                found = await self._parts(told)
                self._kept.put(told.key, found, len(found))
                return found
            except (NoRespondersError, RequestTimeoutError):
                pass
            except ServiceError as error:
                if error.code not in _GONE:
                    raise
            told = await self._encoded_again(image, deadline)

    async def _parts(self, told: ImageEncoded) -> bytes:
        subject = self._host.subjects.vision_direct(told.holder_id, told.holder_instance_id)
        return await read_parts(
            self._host.transport, subject, lambda offset: ReadEmbeddings(told.key, offset), told.num_bytes
        )

    async def _encoded_again(self, image: PromptImage, deadline: float) -> ImageEncoded:
        subject, message = self._host.subjects.vision(self._model), EncodeImage(self._model, image.file)
        while True:
            await asyncio.sleep(PAUSE_S)
            if self._now() > deadline:
                reason = "No image service gives the engine the image. Try again shortly."
                raise ServiceError("no_vision", reason, retry_after_s=1.0)
            try:
                found = await ask(self._host.transport, subject, message, _ENCODED, timeout_s=TRY_S)
            except (NoRespondersError, RequestTimeoutError):
                continue
            except ServiceError as error:
                if error.code not in _GONE:
                    raise
                continue
            assert isinstance(found, ImageEncoded)
            if found.key != image.encoded.key:
                reason = "The image services of this model differ in their settings: give all of them the same."
                raise ServiceError("engine_failure", reason)
            return found

    def _now(self) -> float:
        return self._host.clock.monotonic()
