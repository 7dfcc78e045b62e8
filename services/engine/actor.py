"""The engine's actor: receives commands from the bus and publishes token events.

The actor admits sequences (`sequence_table`), passes them to the step loop (`loop`, on a thread of its own) and turns
each step's report into one `TokenEvents` message for each detokenizer. It makes no scheduling decisions (`core` does)
and computes nothing (`worker` does). It runs on the event loop; `core`, `loop` and the workers use no asyncio.
"""

import asyncio
import functools
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from services.engine.adapter_actor import AdapterActor, AdapterNotHereError
from services.engine.adapters.delta import LoadedAdapter
from services.engine.core.plan import PlacedPicture
from services.engine.core.request import Outcome, SequenceSpec, with_adapter
from services.engine.grammar_gate import LoadAdapter
from services.engine.pictures import PictureLoader
from services.engine.request_times import RequestTimes
from services.engine.sequence_table import Entry, GatewayKey, SequenceTable, split
from services.engine.steps.events import token_events
from services.engine.steps.loop import StepReport
from services.engine.steps.step_recorder import StepRecorder
from services.engine.tracing import SequenceTraces
from shared import limits
from shared.actors.actor import Actor, Envelope, handles, tell_in_parts
from shared.actors.heard import heard_on
from shared.actors.host import Host
from shared.blocks import split_hashes
from shared.codec import encode, unpack_ids
from shared.errors import ServiceError
from shared.messages import (
    Ack,
    Cancel,
    Done,
    FinishReason,
    Heartbeat,
    Message,
    OwnershipQuery,
    OwnershipReply,
    ProgressQuery,
    ProgressReply,
    Resend,
    Retarget,
    SelfTest,
    SelfTestReply,
    SequenceRef,
    SequenceSteps,
    StepEvent,
    StepEvents,
    Submit,
    SubmitBatch,
    SubmitBatchReply,
    SubmitReply,
    SubmitStatus,
    TokenEvent,
    TokenEvents,
    Withdraw,
)
from shared.observability import telemetry
from shared.parameters.sampling import check

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0
T = TypeVar("T")


class EngineActor(Actor):
    """The actor of one engine.

    `exchanges_kv`: whether the engine exchanges KV with others; without it, prompts are always computed here. The
    callbacks `add` (see `Engine.add`) and `abort` pass commands to the step loop; `record` turns the details of steps
    in the loop's reports on or off. `adapters` finds the adapters of sequences; None: the engine serves none.
    `pictures` reads the embeddings of pictures; None: the engine accepts text only. `self_test` starts a test of the
    engine, after which `answer` must be called. `report` must be called on the event loop.
    """

    def __init__(
        self,
        host: Host,
        add: Callable[[SequenceSpec, LoadAdapter | None], None],
        abort: Callable[[str], None],
        record: Callable[[bool], None] = lambda wanted: None,
        *,
        exchanges_kv: bool = False,
        adapters: AdapterActor | None = None,
        pictures: PictureLoader | None = None,
        self_test: Callable[[SelfTest], None] = lambda message: None,
    ) -> None:
        super().__init__(f"engine {host.id}", host.transport)
        self.sequences = SequenceTable()
        self.finished: dict[str, int] = defaultdict(int)
        self._host = host
        self._exchanges_kv = exchanges_kv
        self._add = add
        self._abort = abort
        self._adapters = adapters
        self._pictures = pictures
        self._arrivals = 0
        self._draining = False
        self.withdrawn = False
        """Whether an operator drains the engine (`Withdraw`)."""
        self._quiet = asyncio.Event()
        self._gateways: dict[GatewayKey, float] = {}
        self._traces = SequenceTraces(host.clock)
        self.times = RequestTimes(host.clock)
        self._record = record
        self._steps = StepRecorder(host.clock)
        self._self_test = self_test
        self.unsent = 0
        """Number of messages that could not be sent."""

    async def listen(self) -> None:
        """Subscribes to the engine's control subject and to the gateways' heartbeats."""
        subjects = self._host.subjects
        control = subjects.engine_control(self._host.id, self._host.instance_id)
        commands = SubmitBatch, Cancel, Done, Resend, Retarget, ProgressQuery, OwnershipReply, Withdraw, SelfTest
        await self.bind(control, *commands)
        await self.bind(subjects.heartbeats("gateway"), Heartbeat)

    # --- commands ---

    @handles(SubmitBatch)
    def on_submit(self, envelope: Envelope[SubmitBatch]) -> SubmitBatchReply:
        """Starts or refuses each sequence of the batch. Returns one reply for each sequence, in order.

        A repeated submit of the same attempt is answered with `duplicate` and starts nothing.
        """
        batch = envelope.message
        return SubmitBatchReply(tuple(self._submit(submit) for submit in batch.submits))

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
        if self.sequences.release(cancel.sequence_id, cancel.attempt, self._now()):
            self._end(cancel.sequence_id, cancel.attempt, "abort")

    @handles(Done)
    def on_done(self, envelope: Envelope[Done]) -> None:
        """Drops a sequence whose owner has received all its tokens. Aborts the sequence if it still runs."""
        done = envelope.message
        if self.sequences.release(done.sequence_id, done.attempt, self._now()):
            self._end(done.sequence_id, done.attempt, "abort")

    @handles(Resend)
    def on_resend(self, envelope: Envelope[Resend]) -> None:
        """Publishes a sequence's tokens from the given position on again. Does nothing if the sequence is unknown."""
        resend = envelope.message
        entry = self.sequences.get(resend.sequence_id, resend.attempt)
        if entry is not None:
            self._replay(entry, resend.position)

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
        self._replay(entry, retarget.position)
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
        self._send(query.reply_subject, lambda part: ProgressReply(*here, marks=tuple(part)), marks)
        self._send(query.reply_subject, lambda part: ProgressReply(*here, missing=tuple(part)), missing)

    @handles(SelfTest)
    def on_self_test(self, envelope: Envelope[SelfTest]) -> None:
        """Starts a test of this engine. `answer` publishes its result."""
        message = envelope.message
        self._self_test(message)

    def answer(self, message: SelfTest, fault: str) -> None:
        """Publishes the result of a self-test."""
        reply = SelfTestReply(message.test_id, self._host.id, self._host.instance_id, fault)
        self._send(message.reply_subject, lambda part: part[0], (reply,))

    @handles(OwnershipReply)
    def on_ownership_reply(self, envelope: Envelope[OwnershipReply]) -> None:
        """Ends and drops the sequences that their gateway no longer owns."""
        reply = envelope.message
        self._drop(self.sequences.disowned((reply.gateway_id, reply.gateway_instance_id), reply.released))

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
        self._traces.step(report)
        self.times.step(report)
        steps_are_due = bool(report.details) and self._steps.add(report)
        by_subject: dict[str, list[TokenEvent]] = defaultdict(list)
        for sequence_id, error in report.refused:
            self._take(_refusal(sequence_id, error, self.sequences), by_subject)
        for outcome in report.outcomes:
            for event in _token_events(outcome, self.sequences):
                self._take(event, by_subject)
        for subject, events in by_subject.items():
            self._publish_each(subject, report.step, events)
        if steps_are_due:
            self._publish_steps()

    def credits(self, max_num_seqs: int) -> int:
        """Returns the number of sequences that gateways may still place on this engine; negative if it holds too many.

        The target is one sequence for each row (batch slot) plus a queue of `ENGINE_QUEUE_AHEAD` times as many
        sequences, which lasts until the next heartbeat; in all at most `ENGINE_WAITING_MAX` sequences. Sequences of the
        idle lane do not count, because others preempt them. 0 while draining. May be called from any thread.
        """
        if self._draining or self.withdrawn:
            return 0
        return _wanted(max_num_seqs, limits.ENGINE_WAITING_MAX) - (self.sequences.num_live - self.sequences.num_idle)

    def idle_credits(self, max_num_seqs: int) -> int:
        """Returns how many sequences of the idle lane may still be placed here.

        Unlike in `credits`, all sequences on the engine count, and the target is at most half of `ENGINE_WAITING_MAX`.
        """
        if self._draining or self.withdrawn:
            return 0
        return _wanted(max_num_seqs, limits.ENGINE_WAITING_MAX // 2) - self.sequences.num_live

    def sweep(self) -> None:
        """Ends the sequences of dead gateways and asks running gateways about sequences that they have not confirmed.

        Called a few times a second. Also lets `drain` return once no live sequence is left.
        """
        now = self._now()
        self.sequences.end_idle_times(now)
        self._gateways = {k: t for k, t in self._gateways.items() if now - t < 10 * limits.ORPHAN_S}
        self._drop(self.sequences.expire(now, self._gateways))
        self._publish_steps()
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
            self._send(self._host.subjects.gateway_control(*gateway), query, refs)

    async def drain(self) -> None:
        """Refuses new sequences from now on. Returns when every waiting and running sequence has ended or has moved.

        Gateways move sequences to other engines when this engine's heartbeat says that it drains. Sequences that are
        left after `HAND_OVER_S`, because no other engine has room, are handed back to their gateways and wait there.
        """
        self._draining = True
        self._quiet.clear()
        try:
            async with asyncio.timeout(limits.HAND_OVER_S):
                await self._quiet.wait()
        except TimeoutError:
            self._hand_over()

    async def on_crash(self, error: BaseException) -> None:
        """Aborts and drops every sequence. Sends no messages."""
        for entry in list(self.sequences.entries()):
            self._abort(core_id(entry.sequence_id, entry.attempt))
            self.sequences.release(entry.sequence_id, entry.attempt, self._now())

    # --- private ---

    def _hand_over(self) -> None:
        """Ends all live sequences here and tells their gateways that this engine no longer has them."""
        left: dict[GatewayKey, list[SequenceRef]] = defaultdict(list)
        for entry in [entry for entry in self.sequences.entries() if not entry.finished]:
            left[entry.gateway].append(SequenceRef(entry.sequence_id, entry.attempt))
            self.sequences.release(entry.sequence_id, entry.attempt, self._now())
            self._end(entry.sequence_id, entry.attempt, "abort")
        here = self._host.id, self._host.instance_id
        for gateway, refs in left.items():
            log.info("%s hands over %d sequences of %s", self.name, len(refs), gateway[0])
            subject = self._host.subjects.gateway_control(*gateway)
            self._send(subject, lambda part: ProgressReply(*here, missing=tuple(part)), refs)

    def _submit(self, submit: Submit) -> SubmitReply:
        status = self.sequences.admit(submit)
        if (self._draining or self.withdrawn) and status == "accepted":
            return self._submit_reply(
                submit, "busy", ServiceError("draining", "The engine is shutting down.", retry_after_s=RETRY_AFTER_S)
            )
        if status == "busy":
            full = ServiceError("server_is_overloaded", "The engine's queue is full.", retry_after_s=RETRY_AFTER_S)
            return self._submit_reply(submit, "busy", full)
        if status == "accepted" and submit.pictures and (refused := self._reserve_pictures(submit)) is not None:
            return refused
        if status == "accepted":
            try:
                self._start(submit)
            except ServiceError as error:
                return self._submit_reply(submit, "invalid", error)
            except AdapterNotHereError:
                message = f"The adapter {submit.adapter!r} is not here yet."
                missing = ServiceError("server_is_overloaded", message, retry_after_s=RETRY_AFTER_S)
                return self._submit_reply(submit, "busy", missing)
        return self._submit_reply(submit, status)

    def _start(self, submit: Submit) -> None:
        check(submit.params)
        if submit.kv_transfer_id and not self._exchanges_kv:
            raise ServiceError("unsupported_parameter", "This engine computes no prompts for others.")
        adapter = self._adapter(submit)
        output = tuple(unpack_ids(submit.output_token_ids))
        spec = SequenceSpec(
            sequence_id=core_id(submit.sequence_id, submit.attempt),
            prompt_token_ids=tuple(unpack_ids(submit.prompt_token_ids)),
            params=submit.params,
            output_token_ids=output,
            block_hashes=tuple(split_hashes(submit.block_hashes)),
            cache_salt=submit.cache_salt,
            priority=submit.priority,
            arrival=self._arrivals,
            sequence_group=submit.sequence_group,
            client=submit.client,
            client_weight=submit.client_weight,
            client_priority=submit.client_priority,
            pooling=submit.pooling,
            kv_source=submit.kv_source if self._exchanges_kv else None,
            kv_transfer_id=submit.kv_transfer_id,
            idle_until_s=self._now() + submit.idle_s if submit.idle_s > 0 else 0.0,
        )
        if isinstance(adapter, LoadedAdapter):
            spec = with_adapter(spec, adapter)
        self._arrivals += 1
        if self.sequences.release(submit.sequence_id, submit.attempt - 1, self._now()):
            self._abort(core_id(submit.sequence_id, submit.attempt - 1))
            self.times.forget(core_id(submit.sequence_id, submit.attempt - 1))
            self._forget_steps(core_id(submit.sequence_id, submit.attempt - 1))
        self.sequences.register(submit, len(output), self._now())
        headers = telemetry.trace_headers(submit.traceparent, submit.tracestate)
        self._traces.submitted(spec.sequence_id, len(spec.prompt_token_ids), headers)
        self.times.submitted(spec.sequence_id)
        if submit.recorded:
            self._steps.submitted(spec.sequence_id)
            self._record(True)
        load = None if adapter is None or isinstance(adapter, LoadedAdapter) else adapter
        if submit.pictures:
            self._start_loading(spec, submit, load)
        else:
            self._add(spec, load)

    def _reserve_pictures(self, submit: Submit) -> SubmitReply | None:
        """Returns the refusal if the engine does not accept pictures or has no memory for them now; else None."""
        if self._pictures is None:
            message = "This engine takes text only: start it with --enable-mm."
            return self._submit_reply(submit, "invalid", ServiceError("unsupported_parameter", message))
        try:
            self._pictures.reserve(core_id(submit.sequence_id, submit.attempt), submit.pictures, self._is_live)
        except ServiceError as full:
            return self._submit_reply(submit, "busy", full)
        return None

    def _start_loading(self, spec: SequenceSpec, submit: Submit, load_adapter: LoadAdapter | None) -> None:
        """Starts to read the embeddings of a sequence's pictures.

        Queues the sequence afterwards, unless it has ended meanwhile.
        """
        assert self._pictures is not None

        def loaded(placed: tuple[PlacedPicture, ...]) -> None:
            if self._is_live(spec.sequence_id):
                self._add(replace(spec, pictures=placed), load_adapter)

        self._pictures.start(submit.pictures, loaded, functools.partial(self._refuse, spec.sequence_id))

    def _is_live(self, core_sequence_id: str) -> bool:
        return self.sequences.is_live(*_split(core_sequence_id))

    async def _refuse(self, core_sequence_id: str, error: ServiceError) -> None:
        by_subject: dict[str, list[TokenEvent]] = defaultdict(list)
        self._take(_refusal(core_sequence_id, error, self.sequences), by_subject)
        for subject, events in by_subject.items():
            self._publish_each(subject, 0, events)

    def _adapter(self, submit: Submit) -> LoadedAdapter | LoadAdapter | None:
        if not submit.adapter:
            return None
        if self._adapters is None:
            message = "This engine serves no adapters: start it with --enable-lora or --enable-prompt-adapter."
            raise ServiceError("unsupported_parameter", message, param="model")
        return self._adapters.adapter(submit.adapter, submit.adapter_version)

    def _drop(self, entries: list[Entry]) -> None:
        for entry in entries:
            if self.sequences.release(entry.sequence_id, entry.attempt, self._now()):
                self._end(entry.sequence_id, entry.attempt, "abort")

    def _take(self, event: TokenEvent | None, by_subject: dict[str, list[TokenEvent]]) -> None:
        entry = self.sequences.append(event) if event is not None else None
        if entry is None or event is None:
            return
        if entry.reply_subject:  # the output of a sequence whose prompt is computed for another engine is not used
            by_subject[entry.reply_subject].append(event)
        if event.finish_reason is not None:
            self._count_end(entry.sequence_id, entry.attempt, event.finish_reason)

    def _end(self, sequence_id: str, attempt: int, reason: FinishReason) -> None:
        self._abort(core_id(sequence_id, attempt))
        self._count_end(sequence_id, attempt, reason)

    def _count_end(self, sequence_id: str, attempt: int, reason: FinishReason) -> None:
        self.finished[reason] += 1
        self.times.ended(core_id(sequence_id, attempt))
        self._forget_steps(core_id(sequence_id, attempt))
        self._traces.ended(core_id(sequence_id, attempt), reason)

    def _forget_steps(self, sequence: str) -> None:
        self._steps.ended(sequence)
        if not self._steps.is_needed:
            self._record(False)

    def _replay(self, entry: Entry, position: int) -> None:
        if entry.reply_subject:
            self._publish_each(entry.reply_subject, 0, self.sequences.replay(entry, position))

    def _publish_each(self, subject: str, step: int, events: Sequence[TokenEvent]) -> None:
        """Publishes the parts of prompts' log probabilities in messages of their own, then all other events in one."""
        for event in events:
            if event.prompt_logprobs is not None:
                self._publish(subject, step, (event,))
        others = tuple(event for event in events if event.prompt_logprobs is None)
        if others:
            self._publish(subject, step, others)

    def _publish(self, subject: str, step: int, events: tuple[TokenEvent, ...]) -> None:
        """Publishes events to a detokenizer's subject as one message, or as several if one would be too large.

        Events that cannot be sent are counted, logged and dropped. Their tokens are not lost: the sequence table keeps
        them, and the owner asks for them when it notices the gap.
        """
        message: Message = TokenEvents(self._host.id, self._host.instance_id, step, events)
        try:
            self.transport.send(subject, encode(message))
        except ServiceError as error:
            halves = split(events) if error.code == "request_too_large" else None
            if halves is None:
                self.unsent += 1
                log.warning("%s could not send tokens to %s: %s", self.name, subject, error)
                return
            for half in halves:
                self._publish(subject, step, half)

    def _publish_steps(self) -> None:
        """Publishes the steps recorded since the last call. Steps that cannot be sent are dropped and counted."""
        steps, sequences = self._steps.take()
        if steps:
            make = functools.partial(_step_events, self._host.id, self._host.instance_id, tuple(steps))
            parts: list[tuple[SequenceSteps, ...]] = [(one,) for one in sequences] or [()]
            self._send(self._host.subjects.steps(self._host.id), make, parts)

    def _send(self, subject: str, make: Callable[[Sequence[T]], Message], items: Sequence[T]) -> None:
        # A message that cannot be sent is dropped, like a message lost on the bus, and its receiver asks again.
        try:
            tell_in_parts(self.transport, subject, make, items)
        except ServiceError as error:
            self.unsent += 1
            log.warning("%s could not send to %s: %s", self.name, subject, error)

    def _submit_reply(self, submit: Submit, status: SubmitStatus, error: ServiceError | None = None) -> SubmitReply:
        reply = SubmitReply(
            sequence_id=submit.sequence_id,
            attempt=submit.attempt,
            status=status,
            engine_id=self._host.id,
            engine_instance_id=self._host.instance_id,
        )
        if error is None:
            return reply
        return msgspec.structs.replace(reply, code=error.code, message=error.message, retry_after_s=error.retry_after_s)

    def _now(self) -> float:
        return self._host.clock.monotonic()


def _step_events(
    engine_id: str, instance_id: str, steps: tuple[StepEvent, ...], parts: Sequence[tuple[SequenceSteps, ...]]
) -> StepEvents:
    return StepEvents(engine_id, instance_id, steps, tuple(itertools.chain.from_iterable(parts)))


def core_id(sequence_id: str, attempt: int) -> str:
    """Returns the id that the core uses for one attempt of a sequence.

    Each attempt is a sequence of its own in the core, because a plan in flight may still contain an older attempt.
    """
    return f"{sequence_id}#{attempt}"


def _split(core_sequence_id: str) -> tuple[str, int]:
    sequence_id, _, attempt = core_sequence_id.rpartition("#")
    return sequence_id, int(attempt)


def _token_events(outcome: Outcome, table: SequenceTable) -> list[TokenEvent]:
    sequence_id, attempt = _split(outcome.sequence_id)
    if table.get(sequence_id, attempt) is None:
        return []
    return token_events(outcome, sequence_id, attempt)


def _refusal(core_sequence_id: str, error: ServiceError, table: SequenceTable) -> TokenEvent | None:
    sequence_id, attempt = _split(core_sequence_id)
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
