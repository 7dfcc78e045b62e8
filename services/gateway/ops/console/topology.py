"""The endpoint `GET /admin/topology`: every running service process, its load, and the age of its last heartbeat."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, json_response
from antiphon.services.gateway.path.liveness.changes import MemberChange, MemberChanges
from antiphon.shared.messages import EngineStatus, Heartbeat, ProcessResources
from antiphon.shared.version import __version__


class TopologyEndpoint:
    """`members` returns the living members with the seconds since their last heartbeats. `gateway`: id of this one."""

    def __init__(
        self,
        members: Callable[[], Sequence[tuple[Heartbeat, float]]],
        changes: MemberChanges,
        gateway: str = "",
    ) -> None:
        self._members, self._changes, self._gateway = members, changes, gateway
        self._began_at = time.monotonic()

    async def topology(self, request: Request) -> Response:
        """Answers with the members, and with those that were lost in the last ten minutes, as this gateway saw it.

        Counters count from the start of each process; the difference of two `now_s` is the time between two answers.
        """
        check_query(request, ())
        now = time.monotonic()
        body = {
            "object": "topology",
            "version": __version__,
            "gateway": self._gateway,
            "uptime_s": round(now - self._began_at, 3),
            "now_s": now,
            "members": [_member(beat, age_s) for beat, age_s in self._members()],
            "lost": [_lost(one, now) for one in self._changes.recently_lost()],
        }
        return json_response(body, headers=NOT_KEPT)


def _member(beat: Heartbeat, age_s: float) -> dict[str, Any]:
    return {
        "service": beat.service,
        "id": beat.id,
        "instance_id": beat.instance_id,
        "state": beat.state,
        "heartbeat_age_s": round(age_s, 3),
        "heartbeat_interval_s": beat.interval_s,
        "heartbeat_sequence": beat.sequence,
        "messages_received": beat.messages_received,
        "messages_sent": beat.messages_sent,
        "resources": _resources(beat.resources),
        "load": _load(beat),
    }


def _resources(found: ProcessResources | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**msgspec.structs.asdict(found), "gpus": [msgspec.structs.asdict(gpu) for gpu in found.gpus]}


def _lost(change: MemberChange, now: float) -> dict[str, Any]:
    return {
        "service": change.service,
        "id": change.id,
        "instance_id": change.instance_id,
        "age_s": round(now - change.at_s, 3),
        "reason": change.reason,
    }


def _load(beat: Heartbeat) -> dict[str, Any]:
    """Returns the fields of a member's status; those of an engine's load and counters beside the others."""
    fields = msgspec.structs.asdict(beat.status)
    if isinstance(beat.status, EngineStatus):
        del fields["load"], fields["counters"]
        fields |= msgspec.structs.asdict(beat.status.load) | msgspec.structs.asdict(beat.status.counters)
    return fields
