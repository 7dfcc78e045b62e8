"""A smallest possible service, run as a process by `test_service_process`. It misbehaves as `--behaviour` says."""

import asyncio
import logging
import sys

from antiphon.shared.actors import service
from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import flag
from antiphon.shared.messages import Ack, CloseStream, Done, Message, ServiceName, StreamStatus
from antiphon.shared.settings.bus import BusSettings


class TinySettings(BusSettings):
    """Settings of the tiny service."""

    behaviour: str = flag("good", "what goes wrong", group="tiny")
    drain_s: float = flag(0.0, "how long the drain takes", group="tiny")


class TinyActor(Actor):
    """Answers."""

    @handles(CloseStream)
    def on_close(self, envelope: Envelope) -> Message:
        assert isinstance(envelope.message, CloseStream)
        return Ack(envelope.message.sequence_id)

    @handles(Done)
    def on_done(self, envelope: Envelope) -> None:
        raise AssertionError("told to break")


class TinyService:
    """A detokenizer that detokenizes nothing."""

    name: ServiceName = "detokenizer"

    def __init__(self, settings: TinySettings) -> None:
        if settings.behaviour == "unbuildable":
            raise ServiceError("invalid_value", "The model cannot be read.")
        self._settings = settings

    async def start(self, host: Host) -> None:
        if self._settings.behaviour == "refused":
            raise ServiceError("model_not_found", "There is no model at /nowhere.")
        if self._settings.behaviour == "broken":
            raise KeyError("a bug")
        if self._settings.behaviour == "slow":
            logging.getLogger(__name__).info("loading")
            await asyncio.sleep(3600)
        self.actor = TinyActor("tiny", host.transport)
        await self.actor.bind(host.subjects.detokenizer_control(host.id, host.instance_id), CloseStream, Done)

    def status(self) -> StreamStatus:
        return StreamStatus(num_streams=7)

    async def drain(self) -> None:
        await asyncio.sleep(self._settings.drain_s)
        await self.actor.stop()

    async def run(self) -> None:
        if self._settings.behaviour == "over":
            return
        await self.actor.run()


if __name__ == "__main__":
    threaded = "--behaviour=threaded" in sys.argv
    sys.exit(service.main("detokenizer", TinySettings, TinyService, heartbeat_thread=threaded))
