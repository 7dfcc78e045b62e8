"""The detokenizer's actor: opens and closes streams, and converts each step's tokens to one message per gateway.

A stream is the conversion of one sequence's tokens to text; `antiphon.shared.text.detokenization.stream` implements it
(pure). The actor passes token events to their streams, sends the resulting text events, asks the engine for missing
tokens (`Resend`) and tells the engine when a stop string has ended a sequence (`Cancel`). Tokens that arrive before
their stream is open are held (`early_events`); tokens of a closed stream are dropped and counted.

If a detokenizer dies, no request fails: the text depends only on tokens that the owner of the stream (its gateway) has,
so the owner opens the stream on another detokenizer and the text continues.
"""

import asyncio
import logging
from collections.abc import Sequence

from antiphon.services.detokenizer.early_events import EarlyEvent, EarlyEvents
from antiphon.services.detokenizer.owners import Owners, StreamEntry
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, handles, tell_in_parts
from antiphon.shared.actors.heard import heard_on
from antiphon.shared.actors.host import Host
from antiphon.shared.codec import DecodeError, encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    Ack,
    Cancel,
    CloseStream,
    Heartbeat,
    OpenBatch,
    OpenBatchReply,
    OpenReply,
    OpenStream,
    OwnershipQuery,
    OwnershipReply,
    Resend,
    SequenceRef,
    TextEvent,
    TextEvents,
    TokenEvent,
    TokenEvents,
)
from antiphon.shared.observability import telemetry
from antiphon.shared.observability.telemetry import Names
from antiphon.shared.text.detokenization.stream import TextStream
from antiphon.shared.text.vocabulary import UnknownTokenError, Vocabulary

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0
ORPHAN_CHECK_S = limits.ORPHAN_S / 5


class DetokenizerActor(Actor):
    """One detokenizer on the bus. `late_events` counts dropped token events, which no open stream expected."""

    def __init__(
        self, host: Host, vocabulary: Vocabulary, model: str, *, streams_max: int = limits.STREAMS_MAX
    ) -> None:
        super().__init__(f"detokenizer {host.id}", host.transport)
        self.text_events = self.resends = self.late_events = self.unsent = 0
        self._host = host
        self._vocabulary = vocabulary
        self._model = model
        self._streams_max = streams_max
        self._streams: dict[str, StreamEntry] = {}
        self.idle = asyncio.Event()
        """Set while no stream is open."""
        self.idle.set()
        self._early = EarlyEvents()
        self._owners = Owners(host.subjects)
        self._orphans_at = float("-inf")

    async def listen(self) -> None:
        """Subscribes to this instance's subjects and to the gateways' heartbeats."""
        subjects, here = self._host.subjects, (self._host.id, self._host.instance_id)
        await self.bind(subjects.detokenizer_control(*here), OpenBatch, OpenStream, CloseStream, OwnershipReply)
        await self.bind(subjects.detokenizer_tokens(*here), TokenEvents)
        await self.bind(subjects.heartbeats("gateway"), Heartbeat)

    @property
    def num_streams(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    # --- commands ---

    @handles(OpenBatch)
    def on_open_batch(self, envelope: Envelope[OpenBatch]) -> OpenBatchReply:
        """Opens the streams of the batch. Each stream is opened or refused separately."""
        batch = envelope.message
        return OpenBatchReply(tuple([self._open_one(stream) for stream in batch.streams]))

    @handles(OpenStream)
    def on_open(self, envelope: Envelope[OpenStream]) -> Ack:
        """Opens a stream, or opens it again with the tokens that its owner sent."""
        message = envelope.message
        self._open(message)
        return Ack(message.sequence_id)

    @handles(CloseStream)
    def on_close(self, envelope: Envelope[CloseStream]) -> None:
        """Closes a stream, unless it belongs to a newer attempt (placement of the sequence) than the message."""
        message = envelope.message
        entry = self._streams.get(message.sequence_id)
        if entry is not None and entry.stream.attempt <= message.attempt:
            self._forget(entry)

    @handles(OwnershipReply)
    def on_ownership_reply(self, envelope: Envelope[OwnershipReply]) -> None:
        """Closes streams that their gateway does not own any more."""
        reply = envelope.message
        gateway = self._host.subjects.gateway_text(reply.gateway_id, reply.gateway_instance_id)
        for ref in reply.released:
            entry = self._streams.get(ref.sequence_id)
            if entry is not None and entry.stream.attempt == ref.attempt and entry.reply_subject == gateway:
                self._forget(entry)

    @handles(Heartbeat)
    def on_heartbeat(self, envelope: Envelope[Heartbeat]) -> None:
        """Records that a gateway is alive."""
        beat = heard_on(self, envelope, self._host.subjects)
        if beat is not None:
            self._owners.heard(beat, self._now())

    # --- tokens to text ---

    @handles(TokenEvents)
    def on_token_events(self, envelope: Envelope[TokenEvents]) -> None:
        """Converts the token events of an engine step to text. Sends one message to each affected gateway."""
        message = envelope.message
        began_s = self._now()
        engine_subject = self._host.subjects.engine_control(message.engine_id, message.engine_instance_id)
        outbox: dict[str, list[TextEvent]] = {}
        gaps: list[StreamEntry] = []
        ended: list[StreamEntry] = []
        for event in message.events:
            entry = self._streams.get(event.sequence_id)
            if entry is None or entry.stream.attempt < event.attempt:
                self._hold(event, message)
                continue
            if entry.stream.attempt != event.attempt or entry.engine_subject != engine_subject:
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
            source = message.engine_id, message.engine_instance_id, message.step
            self._send_texts(reply_subject, source, events, began_s)
        for entry in ended:
            self._tell_engine(entry)
        for entry in gaps:
            self._ask_again(entry)

    def sweep(self) -> None:
        """Asks again for missing tokens, and closes streams without an owner. Called a few times a second."""
        now = self._now()
        if not self.transport.connected:
            self._owners.excuse(now)
        self.late_events += self._early.expire(now)
        if now - self._orphans_at >= ORPHAN_CHECK_S:
            self._orphans_at = now
            for entry in self._owners.orphans(self._streams.values(), now):
                self._forget(entry)
            self._check_ownership(now)
        for entry in list(self._streams.values()):
            self._ask_again(entry)

    # --- inside ---

    def _open_one(self, message: OpenStream) -> OpenReply:
        try:
            self._open(message)
        except ServiceError as error:
            return OpenReply(
                sequence_id=message.sequence_id,
                attempt=message.attempt,
                code=error.code,
                message=error.message,
                param=error.param,
                retry_after_s=error.retry_after_s,
            )
        return OpenReply(sequence_id=message.sequence_id, attempt=message.attempt)

    def _open(self, message: OpenStream) -> None:
        """Opens a stream. Raises ServiceError if it is refused."""
        old = self._streams.get(message.sequence_id)
        if old is not None and old.stream.attempt > message.attempt:
            return  # a delayed message of an older attempt: it must not replace the newer stream
        if old is None and len(self._streams) >= self._streams_max:
            raise ServiceError(
                "server_is_overloaded", "The detokenizer has too many streams open.", retry_after_s=RETRY_AFTER_S
            )
        entry = self._streams[message.sequence_id] = self._make(message)
        self.idle.clear()
        self._push_early(entry)

    def _make(self, message: OpenStream) -> StreamEntry:
        if message.model not in ("", self._model):
            raise ServiceError("model_not_found", f"The model '{message.model}' does not exist.", param="model")
        if message.stop and not self._vocabulary.has_text:
            reason = "This server has no tokenizer (--skip-tokenizer-init): use 'stop_token_ids' in place of 'stop'."
            raise ServiceError("invalid_value", reason, param="stop")
        try:
            stream = TextStream(message, self._vocabulary)
        except (UnknownTokenError, DecodeError, OverflowError):
            raise ServiceError("invalid_value", "The prompt holds token ids that the model does not have.") from None
        clock, headers = self._host.clock, telemetry.trace_headers(message.traceparent, message.tracestate)
        now = clock.monotonic()
        return StreamEntry(
            stream=stream,
            reply_subject=message.reply_subject,
            engine_subject=message.engine_subject,
            opened_at=now,
            started_ns=clock.time_ns(),
            headers=headers,
            confirmed_at=now,
        )

    def _hold(self, event: TokenEvent, source: TokenEvents) -> None:
        early = EarlyEvent(
            event=event,
            engine_id=source.engine_id,
            engine_instance_id=source.engine_instance_id,
            step=source.step,
            held_at=self._now(),
        )
        self.late_events += not self._early.hold(early)

    def _push_early(self, entry: StreamEntry) -> None:
        """Passes the held tokens, which arrived before their stream was open, to the stream."""
        began_s = self._now()
        for early in self._early.take(entry.stream.sequence_id, entry.stream.attempt):
            engine = early.engine_id, early.engine_instance_id
            if entry.stream.finished or self._host.subjects.engine_control(*engine) != entry.engine_subject:
                self.late_events += 1
                continue
            texts = self._push(entry, early.event)
            if texts:
                self._send_texts(entry.reply_subject, (*engine, early.step), texts, began_s)
        if entry.stream.finished:
            self._forget(entry, entry.stream.finish_reason)
            self._tell_engine(entry)
        elif entry.stream.gap is not None:
            self._ask_again(entry)

    def _push(self, entry: StreamEntry, event: TokenEvent) -> list[TextEvent]:
        entry.confirmed_at = self._now()
        try:
            return entry.stream.push(event)
        except AssertionError:
            raise
        except Exception:
            log.exception("%s: stream %s failed", self.name, event.sequence_id)
            return [entry.stream.fail("internal_error", "The text could not be made.")]

    def _send_texts(
        self, reply_subject: str, source: tuple[str, str, int], events: Sequence[TextEvent], began_s: float
    ) -> None:
        """Sends text events, in several messages if they are too large for one.

        `source`: the engine's id, its instance id, and the step. `began_s`: when the work on the tokens began.
        """
        work_us = round((self._now() - began_s) * 1e6)
        engine_id, engine_instance_id, step = source
        message = TextEvents(
            detokenizer_id=self._host.id,
            detokenizer_instance_id=self._host.instance_id,
            engine_id=engine_id,
            engine_instance_id=engine_instance_id,
            step=step,
            events=tuple(events),
            work_us=work_us,
        )
        try:
            self._publish(reply_subject, encode(message))
        except ServiceError:
            if len(events) == 1:
                raise
            half = len(events) // 2
            self._send_texts(reply_subject, source, events[:half], began_s)
            self._send_texts(reply_subject, source, events[half:], began_s)
            return
        self.text_events += len(events)

    def _tell_engine(self, entry: StreamEntry) -> None:
        stream = entry.stream
        if stream.stopped:
            self._publish(entry.engine_subject, encode(Cancel(stream.sequence_id, stream.attempt, "stop")))

    def _ask_again(self, entry: StreamEntry) -> None:
        """Asks the engine for a stream's missing tokens, at most once in `RESEND_INTERVAL_S`."""
        now, gap = self._now(), entry.stream.gap
        if gap is None or now - entry.resent_at < limits.RESEND_INTERVAL_S:
            return
        entry.resent_at = now
        self.resends += 1
        stream = entry.stream
        self._publish(entry.engine_subject, encode(Resend(stream.sequence_id, stream.attempt, gap)))

    def _publish(self, subject: str, data: bytes) -> None:
        """Sends a message. Raises ServiceError('request_too_large'); the caller may then send the message in parts."""
        # Other failures are only logged: as after the loss of a message on the bus, the owner notices that text is
        # missing and reopens the stream.
        try:
            self.transport.send(subject, data)
        except ServiceError as error:
            if error.code == "request_too_large":
                raise
            self._count_unsent(subject, error)

    def _check_ownership(self, now: float) -> None:
        """Asks gateways whether they still own streams that got no tokens for long."""
        name, instance = self._host.id, self._host.instance_id
        control = self._host.subjects.detokenizer_control(name, instance)

        def query(part: Sequence[SequenceRef]) -> OwnershipQuery:
            return OwnershipQuery(
                service="detokenizer",
                member_id=name,
                member_instance_id=instance,
                reply_subject=control,
                sequences=tuple(part),
            )

        for subject, refs in self._owners.unconfirmed(self._streams.values(), now).items():
            try:
                tell_in_parts(self.transport, subject, query, refs)
            except ServiceError as error:
                self._count_unsent(subject, error)

    def _count_unsent(self, subject: str, error: ServiceError) -> None:
        self.unsent += 1
        log.warning("%s could not send to %s: %s", self.name, subject, error)

    def _forget(self, entry: StreamEntry, reason: str | None = None) -> None:
        if self._streams.get(entry.stream.sequence_id) is entry:
            del self._streams[entry.stream.sequence_id]
            self._early.close(entry.stream.sequence_id, entry.stream.attempt)
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
