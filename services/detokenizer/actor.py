"""The detokenizer's actor: opens and closes streams, and turns each engine step into one message for each gateway.

The work is done by `stream` (pure); this shell finds the stream, sends what it gives, asks the engine for what is
missing (`Resend`) and tells it when a stop string ended a sequence (`Cancel`). An open is acknowledged before the owner
submits, so tokens of an unknown stream can only be late ones of a closed stream: they are dropped and counted.

What happens when it dies: nothing is failed. A stream is a function of the tokens that its owner has, so the owner
opens it on another detokenizer and the text goes on.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from shared import limits, telemetry
from shared.actors.actor import Actor, Envelope, handles
from shared.actors.host import Host
from shared.actors.transport import Headers
from shared.codec import DecodeError, encode
from shared.errors import ServiceError
from shared.messages import (
    Ack,
    Cancel,
    CloseStream,
    GatewayStatus,
    Heartbeat,
    OpenStream,
    Resend,
    TextEvent,
    TextEvents,
    TokenEvent,
    TokenEvents,
)
from shared.telemetry import Names
from shared.text.stream import TextStream
from shared.text.vocabulary import UnknownTokenError, Vocabulary

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0
ORPHAN_CHECK_S = limits.ORPHAN_S / 5


@dataclass(slots=True)
class _OpenStream:
    """A stream with its addresses and times. `started_ns` and `headers` are for the trace."""

    stream: TextStream
    reply_subject: str
    engine_subject: str
    opened_at: float
    started_ns: int
    headers: Headers | None
    resent_at: float = float("-inf")


@dataclass(slots=True)
class _Gateway:
    """What a gateway said last: when, and which sequences it owns."""

    heard_at: float
    live: frozenset[str]


class DetokenizerActor(Actor):
    """One detokenizer on the bus. `late_events` counts tokens for streams that are not open (any more)."""

    def __init__(
        self, host: Host, vocabulary: Vocabulary, model: str, *, streams_max: int = limits.STREAMS_MAX
    ) -> None:
        super().__init__(f"detokenizer {host.id}", host.transport)
        self.text_events = self.resends = self.late_events = self.unsent = 0
        self._host = host
        self._vocabulary = vocabulary
        self._model = model
        self._streams_max = streams_max
        self._streams: dict[str, _OpenStream] = {}
        self.idle = asyncio.Event()
        """Set while no stream is open."""
        self.idle.set()
        self._gateways: dict[str, _Gateway] = {}
        self._orphans_at = float("-inf")

    async def listen(self) -> None:
        """Binds this incarnation's subjects and the gateways' heartbeats."""
        subjects, here = self._host.subjects, (self._host.id, self._host.boot)
        await self.bind(subjects.detokenizer_control(*here), OpenStream, CloseStream)
        await self.bind(subjects.detokenizer_tokens(*here), TokenEvents)
        await self.bind(subjects.heartbeats("gateway"), Heartbeat)

    @property
    def num_streams(self) -> int:
        """Streams open now."""
        return len(self._streams)

    # --- commands ---

    @handles(OpenStream)
    def on_open(self, envelope: Envelope) -> Ack:
        """Opens a stream, or opens it anew with what its owner has."""
        message = envelope.message
        assert isinstance(message, OpenStream)
        old = self._streams.get(message.request_id)
        if old is not None and old.stream.epoch > message.epoch:
            return Ack(message.request_id)  # a delayed copy: nobody waits for it, and the newer stream must live
        if old is None and len(self._streams) >= self._streams_max:
            raise ServiceError(
                "server_is_overloaded", "The detokenizer has too many streams open.", retry_after_s=RETRY_AFTER_S
            )
        self._streams[message.request_id] = self._open(message, envelope.headers)
        self.idle.clear()
        return Ack(message.request_id)

    @handles(CloseStream)
    def on_close(self, envelope: Envelope) -> None:
        """Forgets a stream."""
        message = envelope.message
        assert isinstance(message, CloseStream)
        entry = self._streams.get(message.request_id)
        if entry is not None and entry.stream.epoch <= message.epoch:
            self._forget(entry)

    @handles(Heartbeat)
    def on_heartbeat(self, envelope: Envelope) -> None:
        """A gateway is alive and says which sequences it owns."""
        beat = envelope.message
        assert isinstance(beat, Heartbeat)
        if isinstance(beat.status, GatewayStatus):
            live = frozenset(item.request_id for item in beat.status.live)
            self._gateways[self._host.subjects.gateway_text(beat.id, beat.boot)] = _Gateway(self._now(), live)

    # --- tokens to text ---

    @handles(TokenEvents)
    async def on_token_events(self, envelope: Envelope) -> None:
        """One engine step: one message to each gateway that owns some of its sequences."""
        message = envelope.message
        assert isinstance(message, TokenEvents)
        engine_subject = self._host.subjects.engine_control(message.engine_id, message.engine_boot)
        outbox: dict[str, list[TextEvent]] = {}
        gaps: list[_OpenStream] = []
        ended: list[_OpenStream] = []
        for event in message.events:
            entry = self._streams.get(event.request_id)
            if entry is None or entry.stream.epoch != event.epoch or entry.engine_subject != engine_subject:
                self.late_events += 1
                continue
            texts = self._push(entry, event)
            if texts:
                outbox.setdefault(entry.reply_subject, []).extend(texts)
            if entry.stream.finished:
                self._forget(entry, entry.stream.finish_reason)
                ended.append(entry)
            elif entry.stream.gap is not None:
                gaps.append(entry)
        for reply_subject, events in outbox.items():
            await self._send_texts(reply_subject, message, events)
        for entry in ended:
            await self._tell_engine(entry)
        for entry in gaps:
            await self._ask_again(entry)

    async def sweep(self) -> None:
        """Asks again for what is still missing, and drops what nobody owns any more. Called a few times a second."""
        now = self._now()
        if not self.transport.connected:
            # Their silence says nothing while this side is cut off.
            for gateway in self._gateways.values():
                gateway.heard_at = now
        if now - self._orphans_at >= ORPHAN_CHECK_S:
            self._orphans_at = now
            self._drop_orphans(now)
        for entry in list(self._streams.values()):
            await self._ask_again(entry)

    # --- inside ---

    def _open(self, message: OpenStream, headers: Headers | None) -> _OpenStream:
        if message.model not in ("", self._model):
            raise ServiceError("model_not_found", f"The model '{message.model}' does not exist.", param="model")
        if message.stop and not self._vocabulary.has_text:
            told = "This server has no tokenizer (--skip-tokenizer-init): use 'stop_token_ids' in place of 'stop'."
            raise ServiceError("invalid_value", told, param="stop")
        try:
            stream = TextStream(message, self._vocabulary)
        except (UnknownTokenError, DecodeError, OverflowError):
            raise ServiceError("invalid_value", "The prompt holds token ids that the model does not have.") from None
        clock = self._host.clock
        return _OpenStream(
            stream, message.reply_subject, message.engine_subject, clock.monotonic(), clock.time_ns(), headers
        )

    def _push(self, entry: _OpenStream, event: TokenEvent) -> list[TextEvent]:
        try:
            return entry.stream.push(event)
        except AssertionError:
            raise
        except Exception:
            log.exception("%s: stream %s failed", self.name, event.request_id)
            return [entry.stream.fail("internal_error", "The text could not be made.")]

    async def _send_texts(self, reply_subject: str, source: TokenEvents, events: Sequence[TextEvent]) -> None:
        here = (self._host.id, self._host.boot)
        message = TextEvents(*here, source.engine_id, source.engine_boot, source.step, tuple(events))
        try:
            await self._publish(reply_subject, encode(message))
        except ServiceError:
            if len(events) == 1:
                raise
            half = len(events) // 2
            await self._send_texts(reply_subject, source, events[:half])
            await self._send_texts(reply_subject, source, events[half:])
            return
        self.text_events += len(events)

    async def _tell_engine(self, entry: _OpenStream) -> None:
        stream = entry.stream
        if stream.stopped:
            await self._publish(entry.engine_subject, encode(Cancel(stream.request_id, stream.epoch, "stop")))

    async def _ask_again(self, entry: _OpenStream) -> None:
        """Asks the engine for what a stream misses, not too often."""
        now, gap = self._now(), entry.stream.gap
        if gap is None or now - entry.resent_at < limits.RESEND_INTERVAL_S:
            return
        entry.resent_at = now
        self.resends += 1
        stream = entry.stream
        await self._publish(entry.engine_subject, encode(Resend(stream.request_id, stream.epoch, gap)))

    async def _publish(self, subject: str, data: bytes) -> None:
        """Raises ServiceError('request_too_large'): such a message can be sent in parts."""
        # What cannot be sent otherwise is as good as lost on the way: the owner notices and opens the stream anew.
        try:
            await self.transport.publish(subject, data)
        except ServiceError as error:
            if error.code == "request_too_large":
                raise
            self.unsent += 1
            log.warning("%s could not send to %s: %s", self.name, subject, error)

    def _drop_orphans(self, now: float) -> None:
        for entry in [entry for entry in self._streams.values() if self._orphaned(entry, now)]:
            self._forget(entry)
        self._gateways = {k: g for k, g in self._gateways.items() if now - g.heard_at <= 2 * limits.ORPHAN_S}

    def _orphaned(self, entry: _OpenStream, now: float) -> bool:
        gateway = self._gateways.get(entry.reply_subject)
        heard_at = max(entry.opened_at, gateway.heard_at if gateway else entry.opened_at)
        if now - heard_at > limits.ORPHAN_S:
            return True
        # Alive, yet it no longer lists the sequence: the close was lost.
        disowned = gateway is not None and entry.stream.request_id not in gateway.live
        return disowned and heard_at - entry.opened_at > limits.ORPHAN_S

    def _forget(self, entry: _OpenStream, reason: str | None = None) -> None:
        if self._streams.get(entry.stream.request_id) is entry:
            del self._streams[entry.stream.request_id]
            if not self._streams:
                self.idle.set()
        if telemetry.enabled() and entry.headers:
            attributes = {
                Names.USAGE_OUTPUT_TOKENS: entry.stream.num_tokens,
                Names.RESPONSE_FINISH_REASONS: (reason or "abort",),
            }
            now = self._host.clock.time_ns()
            telemetry.record_span(Names.DETOKENIZE, entry.started_ns, now, parent=entry.headers, attributes=attributes)

    def _now(self) -> float:
        return self._host.clock.monotonic()
