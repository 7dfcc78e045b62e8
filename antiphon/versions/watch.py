"""Reads from heartbeats which processes of a version are ready and whether its engines have work.

Heartbeats are received only inside `watching`, so that they do not wake an idle launcher.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable

from antiphon.settings import MODEL_SERVICES
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.bus.transport import Delivery, Subscription
from antiphon.shared.codec import Decoder
from antiphon.shared.messages import EngineStatus, Heartbeat, Message


class MemberWatch:
    """The members of a deployment, while at least one task is inside `watching`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._members = Members()
        self._decoder: Decoder[Message] = Decoder([Heartbeat])
        self._subscriptions: dict[str, Subscription] = {}
        self._num_watching = 0
        self._changing = asyncio.Lock()
        """Held while subscriptions are made or ended: a task may begin to watch while the last other one ends."""

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Receives heartbeats until the end of the context."""
        self._num_watching += 1
        try:
            async with self._changing:
                await self._subscribe()
            yield
        finally:
            self._num_watching -= 1
            async with self._changing:
                while self._subscriptions and not self._num_watching:
                    await self._subscriptions.popitem()[1].unsubscribe()

    async def _subscribe(self) -> None:
        if not self._subscriptions:
            self._members = Members()
        for service in MODEL_SERVICES:
            if service not in self._subscriptions:
                subject = self._host.subjects.heartbeats(service)
                self._subscriptions[service] = await self._host.transport.subscribe(subject, self._receive)

    def is_ready(self, model: str, services: Iterable[str]) -> bool:
        """Whether enough processes of a model are ready.

        `services` has the required ones: the name of a service as often as processes of it are required.
        """
        now = self._host.clock.monotonic()
        ready = Counter(
            service
            for service in MODEL_SERVICES
            for beat in self._members.alive(service, now)
            if beat.state in ("ready", "sleeping") and getattr(beat.status, "model", "") == model
        )
        return not Counter(services) - ready

    def is_idle(self, model: str) -> bool:
        """Whether no engine of the model has a sequence."""
        engines = self._members.alive("engine", self._host.clock.monotonic())
        statuses = [beat.status for beat in engines if isinstance(beat.status, EngineStatus)]
        return not any(one.load.num_running + one.load.num_waiting for one in statuses if one.model == model)

    def _receive(self, delivery: Delivery) -> None:
        beat = self._decoder.decode(delivery.payload)
        assert isinstance(beat, Heartbeat)
        self._members.observe(beat, self._host.clock.monotonic())
