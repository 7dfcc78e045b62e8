"""Decides which requests nobody runs any more, so that somebody must write their usage records. Pure; times are given.

A request is an orphan if its gateway is not heard any more, or is this one, which does not run it. It stays one for
`USAGE_LOST_S` before it counts as lost: a gateway that only stood still goes on, and one that takes the request over
says so. A request whose client may resume it is left for as long as the client may.
"""

from collections.abc import Iterable, Set

from msgspec.structs import replace

from antiphon.services.gateway.guests.offers import RecordedOutput
from antiphon.services.gateway.guests.usage.log import OpenRequest
from antiphon.shared import limits
from antiphon.shared.messages import UsageRecord

Owner = tuple[str, str]


class Orphans:
    """The orphans that one gateway knows: as many as the log has requests that run."""

    def __init__(self, own: Owner) -> None:
        self._own = own
        self._due_at: dict[str, float] = {}
        """By request id, when to decide about it, monotonic seconds."""

    @property
    def any(self) -> bool:
        """Whether there are orphans, so that it is worthwhile to look again soon."""
        return bool(self._due_at)

    def due(self, opened: Iterable[OpenRequest], heard: Set[Owner], here: Set[str], now: float) -> list[OpenRequest]:
        """Returns the orphans about which to decide now, of all requests that have no record.

        `heard`: the living gateways, this one included. `here`: ids of requests that this gateway runs.
        """
        orphans = [one for one in opened if self._is_orphan(one, heard, here)]
        former = self._due_at
        self._due_at = {
            one.started.request_id: former.get(one.started.request_id, now + limits.USAGE_LOST_S) for one in orphans
        }
        return [one for one in orphans if self._due_at[one.started.request_id] <= now]

    def wait(self, request_id: str, until: float) -> None:
        """Decides about an orphan later."""
        self._due_at[request_id] = until

    def _is_orphan(self, one: OpenRequest, heard: Set[Owner], here: Set[str]) -> bool:
        return one.started.request_id not in here if one.owner == self._own else one.owner not in heard


def can_go_on(output: RecordedOutput | None, wall_s: float) -> bool:
    """Whether a client may still resume a request. `wall_s`: Unix time."""
    return output is not None and not output.ended and wall_s < output.until


def lost(started: UsageRecord, output: RecordedOutput | None) -> UsageRecord:
    """Returns the record of a request that has ended with its gateway. `output`: what was recorded of it.

    A gateway that has left a request to others has written what is to be recorded if nobody continues it.
    """
    if output is None or started.outcome != "lost":
        return started
    return replace(
        started,
        outcome="completed" if output.ended else "lost",
        prompt_tokens=output.prompt_tokens,
        cached_tokens=output.cached_tokens,
        computed_tokens=max(0, output.prompt_tokens - output.cached_tokens) + output.completion_tokens,
        completion_tokens=output.completion_tokens,
    )
