"""The engine's actor: receives commands from the bus and publishes token events.

The actor keeps the table of sequences (`sequence_table`), passes new ones to the step loop (`admission`; the loop has a
thread of its own) and turns each step's report into one `TokenEvents` message for each detokenizer (`publisher`). It
makes no scheduling decisions (`core` does) and computes nothing (`worker` does). It runs on the event loop; `core`,
`loop` and the workers use no asyncio.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Sequence

from antiphon.services.engine.adapter_actor import AdapterActor
from antiphon.services.engine.admission import Admission, StepLoop
from antiphon.services.engine.core.request import Outcome
from antiphon.services.engine.images import ImageLoader
from antiphon.services.engine.publisher import Publisher
from antiphon.services.engine.records.sequences import SequenceRecords
from antiphon.services.engine.sequence_table import Entry, GatewayKey, SequenceTable, core_id, of_core
from antiphon.services.engine.steps.events import token_events
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, handles
from antiphon.shared.actors.heard import heard_on
from antiphon.shared.actors.host import Host
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    Ack,
    Cancel,
    Done,
    FinishReason,
    FollowBlocks,
    Heartbeat,
    OwnershipQuery,
    OwnershipReply,
    ProgressQuery,
    ProgressReply,
    Resend,
    Retarget,
    SelfTest,
    SequenceRef,
    Sleep,
    SubmitBatch,
    SubmitBatchReply,
    TokenEvent,
    Wake,
    Withdraw,
)

log = logging.getLogger(__name__)


class EngineActor(Actor):
    """The actor of one engine: its sequences, and the gateways that own them.

    `adapters`, `images`: see `Admission`. `report` must be called on the event loop.
    """

    def __init__(
        self,
        host: Host,
        loop: StepLoop,
        *,
        adapters: AdapterActor | None = None,
        images: ImageLoader | None = None,
    ) -> None:
        super().__init__(f"engine {host.id}", host.transport)
        self.sequences = SequenceTable()
        self.records = SequenceRecords(host.clock, loop.record)
        self.publisher = Publisher(host)
        self._admission = Admission(
            host, loop, self.sequences, self.records, adapters=adapters, images=images, refused=self._refuse
        )
        self._host = host
        self._abort = loop.abort
        self.draining = False
        """Whether the process ends."""
        self.withdrawn = False
        """Whether an operator drains the engine (`Withdraw`)."""
        self.resting = False
        """Whether the engine sleeps, falls asleep or wakes (`sleep.sleeper`)."""
        self.submitted_at = 0.0
        """When sequences were submitted last, monotonic seconds."""
        self._quiet = asyncio.Event()
        self._gateways: dict[GatewayKey, float] = {}

    async def listen(self) -> None:
        """Subscribes to the engine's control subject and to the gateways' heartbeats.

        `SelfTest`, `Sleep` and `Wake` must be handled by other objects (`also_handles`), `FollowBlocks` can be.
        """
        subjects = self._host.subjects
        control = subjects.engine_control(self._host.id, self._host.instance_id)
        commands = SubmitBatch, Cancel, Done, Resend, Retarget, ProgressQuery, OwnershipReply, Withdraw
        await self.bind(control, *commands, SelfTest, Sleep, Wake)
        await self.bind_handled(subjects.engine_blocks(self._host.id, self._host.instance_id), FollowBlocks)
        await self.bind(subjects.heartbeats("gateway"), Heartbeat)

    # --- commands ---

    @handles(SubmitBatch)
    def on_submit(self, envelope: Envelope[SubmitBatch]) -> SubmitBatchReply:
        """Starts or refuses each sequence of the batch. Returns one reply for each sequence, in order.

        A repeated submit of the same attempt is answered with `duplicate` and starts nothing.
        """
        self.submitted_at = self._now()
        closed = self._closed
        return SubmitBatchReply(tuple(self._admission.submit(one, draining=closed) for one in envelope.message.submits))

    @handles(Cancel)
    def on_cancel(self, envelope: Envelope[Cancel]) -> None:
        """Ends a sequence.

        With the reason `stop` (a stop string was found) the tokens are kept until the owner sends `Done`. With any
        other reason the sequence is dropped at once.
        """
        cancel = envelope.message
        if cancel.reason == "stop":
            if self.sequences.end_by_stop_string(cancel.sequence_id, cancel.attempt):
                self._end(cancel.sequence_id, cancel.attempt, "stop")
            return
        self._release(cancel.sequence_id, cancel.attempt)

    @handles(Done)
    def on_done(self, envelope: Envelope[Done]) -> None:
        """Drops a sequence whose owner has received all its tokens. Aborts the sequence if it still runs."""
        self._release(envelope.message.sequence_id, envelope.message.attempt)

    @handles(Resend)
    def on_resend(self, envelope: Envelope[Resend]) -> None:
        """Publishes a sequence's tokens from the given position on again. Does nothing if the sequence is unknown."""
        resend = envelope.message
        entry = self.sequences.get(resend.sequence_id, resend.attempt)
        if entry is not None:
            _replay(self.publisher, self.sequences, entry, resend.position)

    @handles(Retarget)
    def on_retarget(self, envelope: Envelope[Retarget]) -> Ack:
        """Sends a sequence's tokens to another detokenizer, first the existing tokens from the given position on.

        Raises ServiceError ('not_found') if the engine does not hold the sequence at this attempt.
        """
        retarget = envelope.message
        entry = self.sequences.get(retarget.sequence_id, retarget.attempt)
        if entry is None:
            raise ServiceError("not_found", "The engine does not hold this sequence.")
        entry.reply_subject = retarget.reply_subject
        _replay(self.publisher, self.sequences, entry, retarget.position)
        return Ack(retarget.sequence_id)

    @handles(Withdraw)
    def on_withdraw(self, envelope: Envelope[Withdraw]) -> Ack:
        """Starts or ends draining by an operator. The next heartbeat tells the gateways."""
        message = envelope.message
        if message.withdrawn != self.withdrawn:
            log.info("%s is %s", self.name, "withdrawn" if message.withdrawn else "in service again")
        self.withdrawn = message.withdrawn
        return Ack("")

    @handles(ProgressQuery)
    def on_progress_query(self, envelope: Envelope[ProgressQuery]) -> None:
        """Publishes the progress of the queried sequences on the gateway's reply subject.

        The query also renews the leases of those sequences. Progress marks and unknown sequences are sent in separate
        messages.
        """
        query = envelope.message
        gateway = query.gateway_id, query.gateway_instance_id
        self.sequences.renew_leases(gateway, query.sequences, self._now())
        marks, missing = self.sequences.progress(query.sequences)
        here = self._host.id, self._host.instance_id
        self.publisher.in_parts(query.reply_subject, lambda part: ProgressReply(*here, marks=tuple(part)), marks)
        self.publisher.in_parts(query.reply_subject, lambda part: ProgressReply(*here, missing=tuple(part)), missing)

    @handles(OwnershipReply)
    def on_ownership_reply(self, envelope: Envelope[OwnershipReply]) -> None:
        """Ends and drops the sequences that their gateway no longer owns."""
        reply = envelope.message
        for entry in self.sequences.disowned((reply.gateway_id, reply.gateway_instance_id), reply.released):
            self._release(entry.sequence_id, entry.attempt)

    @handles(Heartbeat)
    def on_heartbeat(self, envelope: Envelope[Heartbeat]) -> None:
        """Records the time of a gateway's heartbeat."""
        beat = heard_on(self, envelope, self._host.subjects)
        if beat is None:
            return
        self._gateways[beat.id, beat.instance_id] = self._now()

    # --- reports, credits, housekeeping ---

    def report(self, report: StepReport) -> None:
        """Publishes the tokens of a step, and errors for refused sequences: one message for each detokenizer.

        A message that would be too large is split.
        """
        steps_are_due = self.records.step(report)
        by_subject: dict[str, list[TokenEvent]] = defaultdict(list)
        for sequence_id, error in report.refused:
            self._take(_refusal(sequence_id, error, self.sequences), by_subject)
        for outcome in report.outcomes:
            for event in _token_events(outcome, self.sequences):
                self._take(event, by_subject)
        for subject, events in by_subject.items():
            self.publisher.tokens(subject, report.step, events)
        if steps_are_due:
            self.publisher.steps(*self.records.take_steps())

    def credits(self, max_num_seqs: int) -> int:
        """Returns the number of sequences that gateways may still place on this engine; negative if it holds too many.

        The target is one sequence for each row (batch slot) plus a queue of `ENGINE_QUEUE_AHEAD` times as many
        sequences, which lasts until the next heartbeat; in all at most `ENGINE_WAITING_MAX` sequences. Sequences of the
        idle lane do not count, because others preempt them. 0 while draining. May be called from any thread.
        """
        if self._closed:
            return 0
        return _wanted(max_num_seqs, limits.ENGINE_WAITING_MAX) - (self.sequences.num_live - self.sequences.num_idle)

    def idle_credits(self, max_num_seqs: int) -> int:
        """Returns how many sequences of the idle lane may still be placed here.

        Unlike in `credits`, all sequences on the engine count, and the target is at most half of `ENGINE_WAITING_MAX`.
        """
        if self._closed:
            return 0
        return _wanted(max_num_seqs, limits.ENGINE_WAITING_MAX // 2) - self.sequences.num_live

    def sweep(self) -> None:
        """Ends the sequences of dead gateways and asks running gateways about sequences that they have not confirmed.

        Called a few times a second. Also lets `drain` return once no live sequence is left.
        """
        now = self._now()
        self.sequences.end_idle_times(now)
        self._gateways = {k: t for k, t in self._gateways.items() if now - t < 10 * limits.ORPHAN_S}
        for entry in self.sequences.expire(now, self._gateways):
            self._release(entry.sequence_id, entry.attempt)
        self.publisher.steps(*self.records.take_steps())
        if not self.sequences.num_live:
            self._quiet.set()
        name, instance = self._host.id, self._host.instance_id
        control = self._host.subjects.engine_control(name, instance)

        def query(part: Sequence[SequenceRef]) -> OwnershipQuery:
            return OwnershipQuery(
                service="engine",
                member_id=name,
                member_instance_id=instance,
                reply_subject=control,
                sequences=tuple(part),
            )

        for gateway, refs in self.sequences.unconfirmed(now, self._gateways).items():
            self.publisher.in_parts(self._host.subjects.gateway_control(*gateway), query, refs)

    async def drain(self) -> None:
        """Refuses new sequences from now on. Returns when every waiting and running sequence has ended or has moved.

        Gateways move sequences to other engines when this engine's heartbeat says that it drains. Sequences that are
        left after `HAND_OVER_S`, because no other engine has room, are handed back to their gateways and wait there.
        """
        self.draining = True
        self._quiet.clear()
        try:
            async with asyncio.timeout(limits.HAND_OVER_S):
                await self._quiet.wait()
        except TimeoutError:
            self.hand_over()

    async def on_crash(self, error: BaseException) -> None:
        """Aborts and drops every sequence. Sends no messages."""
        for entry in list(self.sequences.entries()):
            self._abort(core_id(entry.sequence_id, entry.attempt))
            self.sequences.release(entry.sequence_id, entry.attempt, self._now())

    def hand_over(self) -> None:
        """Ends all live sequences here and tells their gateways that this engine no longer has them."""
        left: dict[GatewayKey, list[SequenceRef]] = defaultdict(list)
        for entry in [entry for entry in self.sequences.entries() if not entry.finished]:
            left[entry.gateway].append(SequenceRef(entry.sequence_id, entry.attempt))
            self._release(entry.sequence_id, entry.attempt)
        here = self._host.id, self._host.instance_id
        for gateway, refs in left.items():
            log.info("%s hands over %d sequences of %s", self.name, len(refs), gateway[0])
            subject = self._host.subjects.gateway_control(*gateway)
            self.publisher.in_parts(subject, lambda part: ProgressReply(*here, missing=tuple(part)), refs)

    def refuse_all(self, error: ServiceError) -> None:
        """Ends all live sequences with an error, which their clients get."""
        by_subject: dict[str, list[TokenEvent]] = defaultdict(list)
        for entry in [entry for entry in self.sequences.entries() if not entry.finished]:
            name = core_id(entry.sequence_id, entry.attempt)
            self._abort(name)
            self._take(_refusal(name, error, self.sequences), by_subject)
        for subject, events in by_subject.items():
            self.publisher.tokens(subject, 0, events)

    # --- private ---

    @property
    def _closed(self) -> bool:
        """Whether new sequences are refused."""
        return self.draining or self.withdrawn or self.resting

    async def _refuse(self, core_sequence_id: str, error: ServiceError) -> None:
        by_subject: dict[str, list[TokenEvent]] = defaultdict(list)
        self._take(_refusal(core_sequence_id, error, self.sequences), by_subject)
        for subject, events in by_subject.items():
            self.publisher.tokens(subject, 0, events)

    def _release(self, sequence_id: str, attempt: int) -> None:
        """Drops a sequence, and ends it if it waits or runs."""
        if self.sequences.release(sequence_id, attempt, self._now()):
            self._end(sequence_id, attempt, "abort")

    def _take(self, event: TokenEvent | None, by_subject: dict[str, list[TokenEvent]]) -> None:
        entry = self.sequences.append(event) if event is not None else None
        if entry is None or event is None:
            return
        if entry.reply_subject:  # the output of a sequence whose prompt is computed for another engine is not used
            by_subject[entry.reply_subject].append(event)
        if event.finish_reason is not None:
            self.records.ended(core_id(entry.sequence_id, entry.attempt), event.finish_reason)

    def _end(self, sequence_id: str, attempt: int, reason: FinishReason) -> None:
        self._abort(core_id(sequence_id, attempt))
        self.records.ended(core_id(sequence_id, attempt), reason)

    def _now(self) -> float:
        return self._host.clock.monotonic()


def _token_events(outcome: Outcome, table: SequenceTable) -> list[TokenEvent]:
    sequence_id, attempt = of_core(outcome.sequence_id)
    if table.get(sequence_id, attempt) is None:
        return []
    return token_events(outcome, sequence_id, attempt)


def _replay(publisher: Publisher, sequences: SequenceTable, entry: Entry, position: int) -> None:
    if entry.reply_subject:
        publisher.tokens(entry.reply_subject, 0, sequences.replay(entry, position))


def _refusal(core_sequence_id: str, error: ServiceError, table: SequenceTable) -> TokenEvent | None:
    sequence_id, attempt = of_core(core_sequence_id)
    entry = table.get(sequence_id, attempt)
    if entry is None:
        return None
    return TokenEvent(
        sequence_id=sequence_id,
        attempt=attempt,
        position=entry.last_position,
        token_ids=(),
        finish_reason="error",
        error_code=error.code,
        error_message=error.message,
    )


def _wanted(max_num_seqs: int, most: int) -> int:
    return min(max_num_seqs + math.ceil(limits.ENGINE_QUEUE_AHEAD * max_num_seqs), most)
