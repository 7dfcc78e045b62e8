"""The endpoint `GET /admin/topology`: every running service process, its load, and the age of its last heartbeat."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.listing import check_query
from antiphon.services.gateway.edge.http.json_response import NOT_KEPT, json_response
from antiphon.shared.messages import EngineStatus, Heartbeat
from antiphon.shared.version import __version__


class TopologyEndpoint:
    """`members` returns the living members with the seconds since their last heartbeats."""

    def __init__(self, members: Callable[[], Sequence[tuple[Heartbeat, float]]]) -> None:
        self._members = members

    async def topology(self, request: Request) -> Response:
        """Answers with the members.

        Counters count from the start of each process; the difference of two `now_s` is the time between two answers.
        """
        check_query(request, ())
        body = {
            "object": "topology",
            "version": __version__,
            "now_s": time.monotonic(),
            "members": [_member(beat, age_s) for beat, age_s in self._members()],
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
        "load": _load(beat),
    }


def _load(beat: Heartbeat) -> dict[str, Any]:
    """Returns the fields of a member's status; those of an engine's load and counters beside the others."""
    fields = msgspec.structs.asdict(beat.status)
    if isinstance(beat.status, EngineStatus):
        del fields["load"], fields["counters"]
        fields |= msgspec.structs.asdict(beat.status.load) | msgspec.structs.asdict(beat.status.counters)
    return fields
