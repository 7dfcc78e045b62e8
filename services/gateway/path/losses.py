"""Moves the work of a gateway away from members that are lost, that hang or compute wrong results, or that drain."""

import logging
from collections.abc import Callable, Mapping, Sequence

from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.liveness.changes import MemberChanges
from antiphon.services.gateway.path.liveness.death_probe import PROBED
from antiphon.services.gateway.path.liveness.loss_report import report, silent
from antiphon.services.gateway.path.placement.candidate import StoredKv
from antiphon.services.gateway.path.requests.request_actor import RequestActor
from antiphon.services.gateway.path.router import model_of, ready_members
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared.messages import EngineStatus, GatewayStatus, Heartbeat, StreamStatus

log = logging.getLogger(__name__)
TOLD_AFTER_S = 2.0
"""Silence of a member that nobody can replace after which the log tells it. A busy machine is silent for less."""


class Losses:
    """The losses of one gateway. `requests`: those that run now, by their ids.

    `gateways` returns all living gateways. The first of them by id writes the log's warning about a member, so that
    there is one.
    """

    def __init__(
        self,
        parts: GatewayParts,
        requests: Mapping[str, RequestActor],
        changes: MemberChanges,
        gateways: Callable[[], Sequence[Heartbeat]],
    ) -> None:
        self._parts, self._requests, self._changes, self._gateways = parts, requests, changes, gateways
        self._told: set[str] = set()
        """Instance ids of the members whose silence the log has told, and that are not heard or lost yet."""

    def on_lost(self, member: Heartbeat, why: str) -> None:
        """Tells in the log that a member is lost, and moves its work."""
        self.tell(member, why)
        self.forget(Address(member.id, member.instance_id), self._stored(member))

    def is_alone(self, member: Heartbeat) -> bool:
        """Whether nobody else could do the work of an engine or a detokenizer, so that nothing is gained by moving it.

        The work of a member that is only silent or hangs then stays until the member goes on, its process has ended, or
        another one is ready.
        """
        return member.service in PROBED and not self._others(member)

    def tell_silence(self, member: Heartbeat, silent_s: float) -> None:
        """Logs once that a member is silent whose work stays there because nobody else could do it."""
        if silent_s < TOLD_AFTER_S or member.instance_id in self._told:
            return
        self._told.add(member.instance_id)
        if self._is_first(self._gateways()):
            log.warning("%s %s, and no other %s could do its work", member.id, silent(silent_s), member.service)

    def heard(self, member: Heartbeat, *, was_lost: bool) -> None:
        """Logs that a lost or silent member, or a new process with its id, is there again."""
        if member.instance_id in self._told:
            self._told.discard(member.instance_id)
            was_lost = True
        if was_lost and self._is_first(self._gateways()):
            log.info("%s is there again", member.id)

    def tell(self, member: Heartbeat, why: str) -> None:
        """Notes and logs the loss of a member, unless it was draining: then it has handed its work over."""
        if member.state == "draining":
            return
        self._changes.lost(member, why)
        self._told.discard(member.instance_id)
        own, gateways = self._num_requests(Address(member.id, member.instance_id)), self._gateways()
        if self._is_first(gateways):
            # Other gateways know their own requests only; the member has told the number of all.
            count = own if len(gateways) <= 1 else max(own, _told_requests(member))
            log.warning("%s", report(member, why, count, self._others(member)))
        elif own:
            log.info("%s", report(member, why, own, self._others(member)))

    def _is_first(self, gateways: Sequence[Heartbeat]) -> bool:
        own = self._parts.host.id
        return all(own <= gateway.id for gateway in gateways)

    def _num_requests(self, member: Address) -> int:
        return sum(
            any(member in (one.engine, one.detokenizer) for one in request.sequences)
            for request in self._requests.values()
        )

    def _others(self, member: Heartbeat) -> list[str]:
        alive = self._parts.members.alive(member.service, self._parts.host.clock.monotonic())
        alive = self._parts.guests.eligible(alive) if member.service == "engine" else alive
        return [one.id for one in ready_members(alive, model_of(member)) if one.instance_id != member.instance_id]

    def _stored(self, member: Heartbeat) -> StoredKv | None:
        """Returns where a lost engine's KV is stored; None if it is not."""
        status = member.status
        if not isinstance(status, EngineStatus) or not status.kv_store:
            return None
        found = self._parts.members.get("engine", status.kv_copies_at)
        return StoredKv(status.kv_store, None if found is None else Address(found.id, found.instance_id))

    def forget(self, member: Address, stored: StoredKv | None = None) -> None:
        """Moves the work of a member that is lost. `stored`: where its KV is stored."""
        self._parts.router.forget(member)
        for request in list(self._requests.values()):
            request.placements.on_lost(member, stored)
        for guest in self._parts.guests:
            guest.on_lost(member)
        self._parts.dispatcher.pump()

    def leave(self, engine: Address) -> None:
        """Moves the sequences of an engine whose step hangs, or that is wrong, and tells the engine to drop them.

        The engine is told because its process is alive and a step may continue later.
        """
        for request in list(self._requests.values()):
            request.placements.on_stalled(engine)
        for guest in self._parts.guests:
            guest.on_lost(engine)
        self._parts.dispatcher.pump()

    def move_away(self, beat: Heartbeat, now: float) -> None:
        """Moves sequences or streams from a draining engine or detokenizer to others, as far as these have room.

        Called with each heartbeat of the draining member, so sequences that find no room now move later. Sequences that
        already wait in this gateway's queue get room first.
        """
        room, parts = 0, self._parts
        if beat.service == "engine":
            model = model_of(beat)
            engines = parts.guests.eligible(parts.members.alive("engine", now))
            room = max(0, parts.router.room(engines, model) - parts.dispatcher.num_waiting(model))
        member = Address(beat.id, beat.instance_id)
        for request in list(self._requests.values()):
            room -= request.placements.on_draining(member, room)
        parts.dispatcher.pump()


def has_sequences(engine: Heartbeat) -> bool:
    """Whether sequences run or wait at an engine, as its heartbeat tells."""
    return _told_requests(engine) > 0


def _told_requests(member: Heartbeat) -> int:
    """Returns the number of sequences, or of a gateway's requests, that a member's last heartbeat told."""
    match member.status:
        case EngineStatus() as status:
            return status.load.num_running + status.load.num_waiting
        case StreamStatus() as status:
            return status.num_streams
        case GatewayStatus() as status:
            return status.num_requests
        case _:
            return 0
