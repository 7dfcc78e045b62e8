"""The gateways that own streams: which streams have lost their owner, and which owners must be asked. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from antiphon.shared import limits
from antiphon.shared.bus.transport import Headers
from antiphon.shared.messages import Heartbeat, SequenceRef
from antiphon.shared.subjects import Subjects
from antiphon.shared.text.detokenization.stream import TextStream


@dataclass(slots=True, kw_only=True)
class StreamEntry:
    """An open stream with its subjects and times, monotonic seconds. `started_ns` and `headers`: for the trace."""

    stream: TextStream
    reply_subject: str
    """The text subject of the stream's gateway; also identifies the gateway."""
    engine_subject: str
    opened_at: float
    started_ns: int
    headers: Headers | None
    confirmed_at: float
    """Latest of these times: the stream was opened; it got tokens; its gateway was asked whether it owns the stream."""
    resent_at: float = float("-inf")


@dataclass(slots=True)
class _Gateway:
    """A gateway: its control subject and the time of its last heartbeat."""

    control_subject: str
    heard_at: float


class Owners:
    """The gateways from which heartbeats have come."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._gateways: dict[str, _Gateway] = {}

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Records that a gateway is alive."""
        gateway = beat.id, beat.instance_id
        subject = self._subjects.gateway_text(*gateway)
        self._gateways[subject] = _Gateway(self._subjects.gateway_control(*gateway), now)

    def excuse(self, now: float) -> None:
        """Counts all gateways as alive: while this process is disconnected, missing heartbeats show nothing."""
        for gateway in self._gateways.values():
            gateway.heard_at = now

    def orphans(self, streams: Iterable[StreamEntry], now: float) -> list[StreamEntry]:
        """Returns the streams whose gateway is dead, and forgets gateways that have long been."""
        found = [one for one in streams if now - self._alive_at(one) > limits.ORPHAN_S]
        self._gateways = {k: g for k, g in self._gateways.items() if now - g.heard_at <= 2 * limits.ORPHAN_S}
        return found

    def _alive_at(self, entry: StreamEntry) -> float:
        gateway = self._gateways.get(entry.reply_subject)
        return max(entry.opened_at, gateway.heard_at if gateway else entry.opened_at)

    def unconfirmed(self, streams: Iterable[StreamEntry], now: float) -> dict[str, list[SequenceRef]]:
        """Returns the streams that got no tokens for ORPHAN_S, whose `CloseStream` may be lost, by control subject.

        A returned stream is not returned again for another ORPHAN_S.
        """
        due: dict[str, list[SequenceRef]] = {}
        for one in sorted(streams, key=lambda each: each.confirmed_at):
            if now - one.confirmed_at <= limits.ORPHAN_S:
                break
            if (gateway := self._gateways.get(one.reply_subject)) is None:
                continue
            asked = due.setdefault(gateway.control_subject, [])
            if len(asked) < limits.LIVENESS_BATCH_MAX:
                asked.append(SequenceRef(one.stream.sequence_id, one.stream.attempt))
                one.confirmed_at = now
        return due
