"""Follows the prefix caches of engines between which the router can choose, and tells the router what they have.

Engines are followed only where a model has at least two that can take the same work; otherwise nothing is sent. Each
engine is asked again every BLOCK_RENEWAL_S; while something is missing, every BLOCK_RETRY_S.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client.registry import Collector

from antiphon.services.gateway.guests.prefix_caches.follower import Follower
from antiphon.services.gateway.guests.prefix_caches.metrics import PrefixCacheCollector
from antiphon.services.gateway.path.actor import GatewayActor
from antiphon.services.gateway.path.guest import Guest
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared import limits
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.codec import encode
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import BlockEvents, BlockSnapshot, EngineStatus, FollowBlocks, Heartbeat

log = logging.getLogger(__name__)


class PrefixCaches(Guest):
    """The prefix caches that one gateway follows."""

    def __init__(self, gateway: GatewayActor) -> None:
        self._gateway, self._host, self._router = gateway, gateway.host, gateway.parts.router
        self.followers: dict[Address, Follower] = {}

    async def listen(self) -> None:
        """See Guest."""
        subjects = self._host.subjects
        await self._gateway.bind(subjects.blocks(), BlockEvents)
        await self._gateway.bind(self._own_subject(), BlockEvents, BlockSnapshot)

    def collectors(self) -> Iterable[Collector]:
        """See Guest."""
        return (PrefixCacheCollector(self.followers),)

    def tick(self) -> None:
        """See Guest. Begins and ends to follow engines, and asks for what is due."""
        wanted = followed(self._gateway.engines())
        for engine in [engine for engine in self.followers if engine not in wanted]:
            self._leave(engine)
        now = self._host.clock.monotonic()
        for engine, num_blocks in wanted.items():
            if engine not in self.followers:
                self.followers[engine] = Follower(num_blocks)
            self._ask(engine, now)

    def on_lost(self, member: Address) -> None:
        """See Guest."""
        self._leave(member)

    @handles(BlockEvents)
    def on_events(self, envelope: Envelope[BlockEvents]) -> None:
        """Applies events of a followed engine, and asks for those that are missing."""
        message = envelope.message
        engine = Address(message.engine_id, message.engine_instance_id)
        if not self._is_genuine(envelope.subject, engine) or (follower := self.followers.get(engine)) is None:
            return
        try:
            follower.on_events(message)
        except ValueError as error:
            self._gateway.drop(envelope.subject, str(error))
        self._ask(engine, self._host.clock.monotonic())

    @handles(BlockSnapshot)
    def on_snapshot(self, envelope: Envelope[BlockSnapshot]) -> None:
        """Takes a piece of a snapshot. The router is told when it is complete."""
        message = envelope.message
        engine = Address(message.engine_id, message.engine_instance_id)
        if (follower := self.followers.get(engine)) is None:
            return
        was_synced = follower.is_synced
        try:
            follower.on_snapshot(message, self._host.clock.monotonic())
        except ValueError as error:
            self._gateway.drop(envelope.subject, str(error))
        if follower.is_synced and not was_synced:
            self._router.follow(engine, follower.known)

    def _ask(self, engine: Address, now: float) -> None:
        if (position := self.followers[engine].wish(now)) is None:
            return
        subjects, here = self._host.subjects, (self._host.id, self._host.instance_id)
        wish = FollowBlocks(*here, self._own_subject(), position)
        try:
            self._host.transport.send(subjects.engine_blocks(*engine), encode(wish))
        except ServiceError as error:
            log.warning("gateway %s could not ask %s for its blocks: %s", self._host.id, engine.id, error)

    def _leave(self, engine: Address) -> None:
        if self.followers.pop(engine, None) is not None:
            self._router.follow(engine, None)

    def _own_subject(self) -> str:
        return self._host.subjects.gateway_blocks(self._host.id, self._host.instance_id)

    def _is_genuine(self, subject: str, engine: Address) -> bool:
        """Whether events came from the engine that they name: only that one may publish on its subject."""
        return subject in (self._host.subjects.blocks(engine.id), self._own_subject())


def followed(engines: Sequence[Heartbeat]) -> dict[Address, int]:
    """Returns the engines to follow, with their numbers of blocks: those of groups that can take the same work.

    Beyond BLOCKS_FOLLOWED_MAX blocks in all, groups are left out as a whole.
    """
    groups: dict[tuple[str, bool], dict[Address, int]] = defaultdict(dict)
    for beat in engines:
        if beat.state == "ready" and isinstance(status := beat.status, EngineStatus):
            group = groups[status.model, status.role == "prefill"]
            group[Address(beat.id, beat.instance_id)] = status.num_blocks
    found: dict[Address, int] = {}
    left = limits.BLOCKS_FOLLOWED_MAX
    for _, group in sorted(groups.items()):
        size = sum(group.values())
        if len(group) > 1 and size <= left:
            found |= group
            left -= size
    return found


def make(gateway: GatewayActor, settings: GatewaySettings) -> PrefixCaches:
    """See `guests.make_guests`."""
    return PrefixCaches(gateway)
