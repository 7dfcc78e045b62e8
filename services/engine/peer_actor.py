"""Finds the engine that keeps the copies of this engine's stored KV, and answers the engines that look for one."""

import asyncio
import logging
from collections.abc import Callable

from antiphon.services.engine.kv.connector import KvConnector
from antiphon.services.engine.kv.peers.copies import Keeper
from antiphon.services.engine.kv.peers.ring import next_keeper
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, ask, handles
from antiphon.shared.actors.heard import heard_on
from antiphon.shared.actors.host import Host
from antiphon.shared.actors.presence import Members
from antiphon.shared.bus.transport import NoRespondersError, RequestTimeoutError
from antiphon.shared.codec import Decoder
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, ErrorReply, Heartbeat, KvRoom, KvRoomQuery

log = logging.getLogger(__name__)
_ROOM = Decoder([KvRoom, ErrorReply])
TEND_S = 2 * limits.HEARTBEAT_INTERVAL_S
ASK_S = 1.0


class PeerActor(Actor):
    """The copies of one engine's blocks, and its place for those of others. `own` returns the engine's status."""

    def __init__(self, host: Host, connector: KvConnector, own: Callable[[], EngineStatus]) -> None:
        super().__init__(f"copies of KV of {host.id}", host.transport)
        self._host, self._own = host, own
        self._connector = connector
        self._sleeps = False
        self._engines = Members()
        self._keeper: Keeper | None = None
        self._avoided: dict[str, float] = {}
        """Instance ids of engines that have not kept copies, and until when they are not asked, monotonic seconds."""

    @property
    def copies_at(self) -> str:
        """Id of the engine that keeps the copies; empty if none does."""
        return "" if self._keeper is None else self._keeper.engine_id

    def sleep(self) -> None:
        """The engine falls asleep, and its connector is closed: its copies elsewhere stay, and it keeps none."""
        self._sleeps, self._keeper = True, None

    def wake(self, connector: KvConnector) -> None:
        """The engine has woken with this connector, and looks for an engine that keeps its copies."""
        self._connector, self._sleeps = connector, False

    async def listen(self) -> None:
        """Subscribes to the engine's subject of stored KV and to the heartbeats of all engines."""
        subjects = self._host.subjects
        await self.bind(subjects.engine_kv(self._host.id, self._host.instance_id), KvRoomQuery)
        await self.bind(subjects.heartbeats("engine"), Heartbeat)

    @handles(KvRoomQuery)
    def on_room_query(self, envelope: Envelope[KvRoomQuery]) -> KvRoom:
        """Admits an engine whose blocks are like this one's, unless both write the same directory."""
        query, tier, keeper = envelope.message, self._connector.tier, self._connector.keeper
        if tier is None or keeper is None or self._sleeps:
            return KvRoom(reason="it keeps no copies")
        if query.identity != tier.identity:
            return KvRoom(reason="its blocks have another form")
        if query.store == tier.directory_id:
            return KvRoom(reason="both write the same directory")
        return KvRoom(address=self._connector.address, token=keeper.admit(query.engine_id))

    @handles(Heartbeat)
    def on_heartbeat(self, envelope: Envelope[Heartbeat]) -> None:
        """Records an engine's heartbeat."""
        beat = heard_on(self, envelope, self._host.subjects)
        if beat is not None:
            self._engines.observe(beat, self._now())

    async def tend(self) -> None:
        """Looks for an engine to keep the copies whenever there is none. Runs without end."""
        while True:
            await asyncio.sleep(TEND_S)
            now = self._now()
            self._engines.expire(now)
            self._avoided = {one: until for one, until in self._avoided.items() if until > now}
            while self._connector.lost_keepers:
                self._lose(self._connector.lost_keepers.popleft())
            alive = self._engines.alive("engine", now)
            keeper = self._keeper
            if keeper is not None and all(beat.instance_id != keeper.instance_id for beat in alive):
                self._lose(keeper)
            if self._keeper is None and not self._sleeps:
                found = next_keeper(self._host.id, self._own(), alive, self._avoided)
                if found is not None:
                    await self._ask(found)

    def _lose(self, keeper: Keeper) -> None:
        self._avoided[keeper.instance_id] = self._now() + limits.KV_COPIES_AVOID_S
        if self._keeper == keeper:
            self._keeper = None
            self._connector.keep_copies_at(None)

    async def _ask(self, engine: Heartbeat) -> None:
        """Asks an engine to keep the copies; it is not asked again for a while if it does not."""
        tier = self._connector.tier
        assert tier is not None
        query = KvRoomQuery(
            engine_id=self._host.id,
            engine_instance_id=self._host.instance_id,
            identity=tier.identity,
            store=tier.directory_id,
        )
        subject = self._host.subjects.engine_kv(engine.id, engine.instance_id)
        try:
            room = await ask(self._host.transport, subject, query, _ROOM, timeout_s=ASK_S)
            assert isinstance(room, KvRoom)
            reason = room.reason
        except (ServiceError, NoRespondersError, RequestTimeoutError) as error:
            room, reason = KvRoom(), str(error) or type(error).__name__
        if not room.address:
            log.info("%s keeps no copies of this engine's KV: %s", engine.id, reason)
            self._avoided[engine.instance_id] = self._now() + limits.KV_COPIES_AVOID_S
            return
        if self._sleeps:
            return  # it fell asleep meanwhile
        log.info("%s keeps copies of this engine's KV", engine.id)
        self._keeper = Keeper(engine.id, engine.instance_id, room.address, room.token)
        self._connector.keep_copies_at(self._keeper)

    def _now(self) -> float:
        return self._host.clock.monotonic()
