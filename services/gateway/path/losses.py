"""Moves the work of a gateway away from members that are lost, that hang or compute wrong results, or that drain."""

import logging
from collections.abc import Mapping

from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.requests.request_actor import RequestActor
from antiphon.services.gateway.path.router import model_of
from antiphon.services.gateway.path.sequence_state import Address
from antiphon.shared.messages import Heartbeat

log = logging.getLogger(__name__)
SILENT = "it has sent nothing for longer than its lease"
RESTARTED = "its process was started again"


class Losses:
    """The losses of one gateway. `requests`: those that run now, by their ids."""

    def __init__(self, parts: GatewayParts, requests: Mapping[str, RequestActor]) -> None:
        self._parts, self._requests = parts, requests

    def on_lost(self, member: Heartbeat, why: str) -> None:
        """Tells in the log that a member is lost, and moves its work."""
        if member.state != "draining":  # otherwise it has handed its work over
            log.warning("%s is taken for lost: %s. Its work goes on elsewhere", member.id, why)
        self.forget(Address(member.id, member.instance_id))

    def forget(self, member: Address) -> None:
        """Moves the work of a member that is lost."""
        self._parts.router.forget(member)
        for request in list(self._requests.values()):
            request.placements.on_lost(member)
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
