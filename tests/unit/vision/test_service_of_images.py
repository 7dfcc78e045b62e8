"""From the file in a gateway to the embeddings in an engine: two image services, one of which dies or forgets."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from antiphon.services.engine.images import ImageLoader
from antiphon.services.gateway.guests.images.encoding import encoded
from antiphon.services.gateway.guests.images.remote import RemoteImages
from antiphon.services.gateway.guests.images.store import ImageStore
from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.services.vision.actor import VisionActor
from antiphon.services.vision.encoder import EncodedImage
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.clock import SystemClock
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ImagePart, ReadImage
from antiphon.shared.request.images import ImageInput
from antiphon.shared.structures.byte_cache import ByteCache
from antiphon.shared.subjects import Subjects
from tests.support.memory import MemoryBus

MODEL = "org/eye"
FILE = bytes(range(256)) * 8192
"""Four parts."""


class Encoder:
    """Embeddings that tell which file they are of: three parts of them."""

    fingerprint, token_id, place, text = b"encoder", 7, "<place>", "\n<7>\n"
    num_pixels = 10**6

    def __init__(self) -> None:
        self.files: list[bytes] = []
        self.may_encode, self.has_begun = threading.Event(), threading.Event()
        self.may_encode.set()

    def encode_file(self, file: bytes) -> EncodedImage:
        self.files.append(file)
        self.has_begun.set()
        assert self.may_encode.wait(60)
        if file.startswith(b"bad"):
            raise ServiceError("invalid_value", "The image is damaged.")
        return EncodedImage(
            rows=2,
            columns=3,
            embeddings=hashlib.sha256(file).digest() * 40_000,
            dtype="float32",
            num_pixels=self.num_pixels,
        )


class Holder(Actor):
    """The part of a gateway that has files."""

    def __init__(self, host: Host) -> None:
        super().__init__("holder", host.transport)
        self.subject = host.subjects.gateway_images(host.id, host.instance_id)
        self.store = ImageStore(RemoteImages(""), self.subject)

    async def listen(self) -> None:
        await self.bind(self.subject, ReadImage)

    @handles(ReadImage)
    def on_read(self, envelope: Envelope) -> ImagePart:
        assert isinstance(envelope.message, ReadImage)
        return self.store.part(envelope.message)


class System:
    """A gateway, image services and an engine on one bus."""

    def __init__(self) -> None:
        self.bus = MemoryBus(0)
        self.encoders: dict[str, Encoder] = {}
        self.visions: dict[str, VisionActor] = {}
        gateway = self._host("gw")
        self.holder = Holder(gateway)
        self.clients = ServiceClients(gateway, Members())
        self.loader = ImageLoader(self._host("engine"), MODEL)
        self._running: dict[Actor, asyncio.Task[None]] = {}

    def _host(self, name: str) -> Host:
        return Host(
            transport=self.bus.connect(name), subjects=Subjects(), clock=SystemClock(), id=name, instance_id="b0"
        )

    async def start(self, actor: Any) -> None:
        await actor.listen()
        self._running[actor] = asyncio.create_task(actor.run())

    async def vision(self, name: str) -> None:
        self.encoders[name] = Encoder()
        self.visions[name] = VisionActor(self._host(name), self.encoders[name], MODEL)  # pyright: ignore[reportArgumentType]
        await self.start(self.visions[name])
        await self.bus.connect(f"probe-{name}").barrier()

    async def stop(self, actor: Actor) -> None:
        await actor.stop()
        await self._running.pop(actor)
        await actor.transport.close()

    async def close(self) -> None:
        for actor in list(self._running):
            await self.stop(actor)


def run(test: Callable[[System], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        system = System()
        await system.start(system.holder)
        try:
            await test(system)
        finally:
            await system.close()

    asyncio.run(main())


def test_embeddings_reach_the_engine_and_another_service_takes_over() -> None:
    async def test(system: System) -> None:
        await system.vision("v1")
        images = [ImageInput("a", FILE), ImageInput("b", b"small"), ImageInput("c", FILE)]
        files = system.holder.store.hold(images)
        found = await encoded(system.clients, MODEL, images, files, "bob")
        assert sorted(map(len, system.encoders["v1"].files)) == [5, len(FILE)]
        assert found[0].tokens == found[2].tokens != found[1].tokens
        assert (found[0].tokens.token_id, found[0].tokens.num_tokens) == (7, 6)
        assert (found[0].tokens.place, found[0].tokens.text) == ("<place>", "\n<7>\n")
        places = [one.placed(start) for one, start in zip(found, (2, 20, 40), strict=True)]
        placed = await system.loader.load(places)
        assert [one.start for one in placed] == [2, 20, 40]
        assert placed[0].embeddings == hashlib.sha256(FILE).digest() * 40_000
        assert placed[0].embeddings is placed[2].embeddings
        # The service forgets, then dies: each time the image is encoded again from the gateway's file.
        system.visions["v1"].cache = ByteCache(1)
        fresh = ImageLoader(system._host("engine-2"), MODEL)
        assert (await fresh.load(places[:1]))[0].embeddings == placed[0].embeddings
        await system.stop(system.visions["v1"])
        await system.vision("v2")
        another = ImageLoader(system._host("engine-3"), MODEL)
        assert (await another.load(places[:1]))[0].embeddings == placed[0].embeddings
        assert system.encoders["v2"].files == [FILE]
        # The file lives as long as the requests that have it.
        system.holder.store.release(files)
        assert system.holder.store.num_bytes == 0

    run(test)


def test_a_image_that_cannot_be_used_is_named() -> None:
    async def test(system: System) -> None:
        await system.vision("v1")
        images = [ImageInput("messages[0].content[1].image_url", b"bad")]
        files = system.holder.store.hold(images)
        with pytest.raises(
            ServiceError, match=r"The image of 'messages\[0\].content\[1\].image_url' is damaged"
        ) as got:
            await encoded(system.clients, MODEL, images, files, "bob")
        assert got.value.param == "messages[0].content[1].image_url"

    run(test)


def test_without_an_image_service_a_request_waits_and_then_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUE_WAIT_S", 0.2)

    async def test(system: System) -> None:
        images = [ImageInput("a", FILE)]
        files = system.holder.store.hold(images)
        with pytest.raises(ServiceError, match="No image service of the model 'org/eye' answers") as got:
            await encoded(system.clients, MODEL, images, files, "bob")
        assert got.value.code == "no_vision"

    run(test)


def test_a_service_takes_a_bounded_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VISION_JOBS_MAX", 1)

    async def test(system: System) -> None:
        await system.vision("v1")
        images = [ImageInput(str(number), b"x" * number) for number in (1, 2, 3)]
        files = system.holder.store.hold(images)
        with pytest.raises(ServiceError, match="too many images"):
            await encoded(system.clients, MODEL, images, files, "bob")

    run(test)


def numbered(*names: str) -> list[ImageInput]:
    return [ImageInput(name, name.encode()) for name in names]


def test_a_image_of_one_client_does_not_wait_for_all_images_of_another() -> None:
    async def test(system: System) -> None:
        await system.vision("v1")
        encoder = system.encoders["v1"]
        encoder.may_encode.clear()

        def ask(images: list[ImageInput], client: str) -> "asyncio.Task[Any]":
            files = system.holder.store.hold(images)
            return asyncio.create_task(encoded(system.clients, MODEL, images, files, client))

        many = [ask(numbered(*(f"bob {request} {n}" for n in range(32))), "bob") for request in range(4)]
        await asyncio.to_thread(encoder.has_begun.wait, 60)
        while system.visions["v1"].num_requests < 4 * limits.IMAGES_AT_ONCE:
            await asyncio.sleep(0.001)
        small = ask(numbered("ann"), "ann")
        while system.visions["v1"].num_requests < 4 * limits.IMAGES_AT_ONCE + 1:
            await asyncio.sleep(0.001)
        encoder.may_encode.set()
        await small
        # Two of bob's images had places already; a turn of his may come before hers.
        assert b"ann" in encoder.files[: limits.VISION_FILES_MAX + 2]
        await asyncio.gather(*many)

    run(test)


def test_a_request_has_a_bounded_number_of_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IMAGES_PIXELS_MAX", 10 * Encoder.num_pixels)

    async def test(system: System) -> None:
        await system.vision("v1")
        names = [f"image {number}" for number in range(limits.IMAGES_MAX)]
        for images in (numbered(*names[:10]), [ImageInput(name, b"the same") for name in names[:10]]):
            await encoded(system.clients, MODEL, images, system.holder.store.hold(images), "bob")
        images = numbered(*names)
        with pytest.raises(ServiceError, match="more than 10000000 pixels") as refused:
            await encoded(system.clients, MODEL, images, system.holder.store.hold(images), "bob")
        assert (refused.value.code, refused.value.param in names) == ("invalid_value", True)
        await system.visions["v1"].settle()
        assert len(system.encoders["v1"].files) <= 1 + 10 + limits.IMAGES_AT_ONCE

    run(test)


def test_after_a_image_that_cannot_be_used_the_others_are_not_encoded() -> None:
    async def test(system: System) -> None:
        await system.vision("v1")
        images = numbered("bad", *map(str, range(limits.IMAGES_MAX - 1)))
        with pytest.raises(ServiceError, match="is damaged"):
            await encoded(system.clients, MODEL, images, system.holder.store.hold(images), "bob")
        await system.visions["v1"].stop()
        assert len(system.encoders["v1"].files) <= 2 * limits.IMAGES_AT_ONCE

    run(test)


def test_a_gateway_keeps_a_bounded_number_of_bytes() -> None:
    async def test(system: System) -> None:
        store = ImageStore(RemoteImages(""), "subject", bytes_max=10)
        files = store.hold([ImageInput("a", b"12345678"), ImageInput("b", b"12345678")])
        with pytest.raises(ServiceError, match="too many images"):
            store.hold([ImageInput("c", b"other")])
        store.release(files)
        assert store.num_bytes == 0
        with pytest.raises(ServiceError, match="No running request"):
            store.part(ReadImage(files[0].digest, 0))
        store.close()

    run(test)


def test_the_cache_forgets_what_was_not_used_for_the_longest_time() -> None:
    cache = ByteCache[str](10)
    for name in (b"a", b"b", b"c"):
        cache.put(name, "value", 4)
        cache.get(b"a")
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None
    assert cache.num_bytes == 8
    cache.put(b"large", "value", 11)
    assert cache.get(b"large") is not None
    assert cache.num_bytes == 11
