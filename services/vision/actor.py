"""The image service's actor: computes the embeddings of images, and sends them to engines.

An image is identified by the digest of its file. If its embeddings are not in the cache, the actor reads the file from
the gateway that has it, and decodes and encodes it on a thread. Requests for an image that is being encoded wait for
the same job, so repeated requests are harmless. At most two files are in memory at the same time; clients take turns.

If a replica dies, nothing is lost: gateways and engines ask another replica, which reads the file again.
"""

import asyncio
import hashlib
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from antiphon.services.vision.encoder import EncodedImage, VisionEncoder
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, error_reply, handles
from antiphon.shared.actors.fair_work import RETRY_AFTER_S, FairPlaces, FairRoom
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.image_parts import part_of, read_parts
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EncodeImage, ImageEncoded, ImageFile, ImagePart, ReadEmbeddings, ReadImage
from antiphon.shared.structures.byte_cache import ByteCache
from antiphon.shared.subjects import VISION_QUEUE

log = logging.getLogger(__name__)
WAITING_MAX = 16 * limits.VISION_JOBS_MAX
"""Maximum number of requests that wait for jobs; several requests may wait for the same job."""


class VisionActor(Actor):
    """One replica. Counts requested images, those found in the cache, and the tokens of encoded images."""

    def __init__(self, host: Host, encoder: VisionEncoder, model: str) -> None:
        super().__init__(f"vision {host.id}", host.transport)
        self.num_requests = self.num_hits = self.num_tokens = 0
        self.cache = ByteCache[EncodedImage](limits.VISION_CACHE_BYTES)
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the exception of the first job that found a broken invariant."""
        self._host, self._encoder, self._model = host, encoder, model
        self._jobs: dict[bytes, asyncio.Task[EncodedImage]] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._room, self._files = FairRoom(limits.VISION_JOBS_MAX), FairPlaces(limits.VISION_FILES_MAX)
        self._thread = ThreadPoolExecutor(1, "vision")

    async def listen(self) -> None:
        """Subscribes to the model's queue group, and to the replica's own subject."""
        subjects = self._host.subjects
        own = subjects.vision_direct(self._host.id, self._host.instance_id)
        await self.bind(subjects.vision(self._model), EncodeImage, queue=VISION_QUEUE)
        await self.bind(own, EncodeImage, ReadEmbeddings)

    @handles(EncodeImage)
    def on_encode(self, envelope: Envelope[EncodeImage]) -> ImageEncoded | None:
        """Returns the image's tokens and embeddings' key for a prompt; None if a job sends the answer."""
        message = envelope.message
        file, client = message.file, message.client
        if not 0 < file.size <= limits.IMAGE_BYTES_MAX:
            raise ServiceError("request_too_large", f"The image has more than {limits.IMAGE_BYTES_MAX} bytes.")
        key = self._key(file.digest)
        found = self.cache.get(key)
        self.num_requests += 1
        if found is not None:
            self.num_hits += 1
            return self._described(key, found)
        job = self._jobs.get(file.digest)
        if len(self._waiting) >= WAITING_MAX or (job is None and not self._room.take(client, 1)):
            reason = "The image service has too many images."
            raise ServiceError("server_is_overloaded", reason, retry_after_s=RETRY_AFTER_S)
        if job is None:
            job = self._jobs[file.digest] = asyncio.create_task(self._encoded(file, key, client))
            job.add_done_callback(lambda _: self._jobs.pop(file.digest, None))
            job.add_done_callback(lambda _: self._room.give_back(client, 1))
        self._spawn(self._answer(envelope.reply, key, job))
        return None

    @handles(ReadEmbeddings)
    def on_read(self, envelope: Envelope[ReadEmbeddings]) -> ImagePart:
        """Returns a part of embeddings. Raises ServiceError('not_found') if they are not in the cache."""
        message = envelope.message
        found = self.cache.get(message.key)
        if found is None:
            raise ServiceError("not_found", "The image service does not have these embeddings.")
        return part_of(found.embeddings, message.offset)

    async def on_stop(self) -> None:
        """Finishes the jobs, then ends the thread."""
        if self._waiting:
            await asyncio.wait(self._waiting)
        self._thread.shutdown(wait=False)

    async def on_crash(self, error: BaseException) -> None:
        """Cancels the jobs; their requesters ask another replica."""
        for task in (*self._jobs.values(), *self._waiting):
            task.cancel()
        self._thread.shutdown(wait=False)

    async def _encoded(self, file: ImageFile, key: bytes, client: str) -> EncodedImage:
        async with self._files.take(client, wait_s=limits.IMAGE_ENCODE_S):
            try:
                data = await read_parts(
                    self.transport, file.source, lambda offset: ReadImage(file.digest, offset), file.size
                )
            except (NoRespondersError, RequestTimeoutError):
                raise ServiceError("timeout", "The gateway that has the image does not answer.") from None
            if hashlib.sha256(data).digest() != file.digest:
                raise ServiceError("engine_failure", "The image was damaged on its way to the image service.")
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.encode_file, data)
        self.num_tokens += found.num_tokens
        self.cache.put(key, found, len(found.embeddings))
        return found

    async def _answer(self, reply: str, key: bytes, job: "asyncio.Task[EncodedImage]") -> None:
        try:
            data = encode(self._described(key, await asyncio.shield(job)))
        except ServiceError as error:
            data = encode(error_reply(error))
        except AssertionError:
            raise
        except Exception:
            log.exception("%s could not encode an image", self.name)
            data = encode(error_reply(ServiceError("internal_error", "The image could not be processed.")))
        if reply:
            try:
                await self.transport.publish(reply, data)
            except ServiceError as error:
                log.warning("%s could not answer: %s", self.name, error)

    def _described(self, key: bytes, image: EncodedImage) -> ImageEncoded:
        return ImageEncoded(
            rows=image.rows,
            columns=image.columns,
            key=key,
            num_bytes=len(image.embeddings),
            dtype=image.dtype,
            token_id=self._encoder.token_id,
            holder_id=self._host.id,
            holder_instance_id=self._host.instance_id,
            place=self._encoder.place,
            text=self._encoder.text,
            layout=image.layout,
            num_pixels=image.num_pixels,
        )

    def _key(self, digest: bytes) -> bytes:
        return hashlib.sha256(digest + self._encoder.fingerprint).digest()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._waiting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)
