"""The engine's actor: commands in, token events out. The only asyncio of the engine's inner life.

It admits sequences (`ledger`), hands them to the step loop (`loop`, on its own thread), and turns each step's report
into one `TokenEvents` message for each detokenizer. It holds no policy: the core decides, the worker computes.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from services.engine.core.request import Outcome, SequenceSpec
from services.engine.events import token_event
from services.engine.ledger import Entry, Ledger
from services.engine.loop import StepReport
from services.engine.tracing import SequenceTraces
from shared import limits
from shared.actors.actor import Actor, Envelope, handles
from shared.actors.host import Host
from shared.blocks import split_hashes
from shared.codec import unpack_ids
from shared.errors import ServiceError
from shared.messages import (
    Ack,
    Cancel,
    Done,
    FinishReason,
    GatewayStatus,
    Heartbeat,
    Message,
    Resend,
    Retarget,
    Submit,
    SubmitReply,
    SubmitStatus,
    TokenEvent,
    TokenEvents,
)
from shared.sampling import check

RETRY_AFTER_S = 1.0


class EngineActor(Actor):
    """One engine on the bus. `add` and `abort` reach the step loop; `report` is called on the event loop."""

    def __init__(self, host: Host, add: Callable[[SequenceSpec], None], abort: Callable[[str], None]) -> None:
        super().__init__(f"engine {host.id}", host.transport)
        self.ledger = Ledger()
        self.finished: dict[str, int] = defaultdict(int)
        self._host = host
        self._add = add
        self._abort = abort
        self._arrivals = 0
        self._draining = False
        self._quiet = asyncio.Event()
        self._gateways: dict[tuple[str, str], float] = {}
        self._traces = SequenceTraces(host.clock)

    async def listen(self) -> None:
        """Binds the control subject and the gateways' heartbeats."""
        subjects = self._host.subjects
        control = subjects.engine_control(self._host.id, self._host.boot)
        await self.bind(control, Submit, Cancel, Done, Resend, Retarget)
        await self.bind(subjects.heartbeats("gateway"), Heartbeat)

    # --- commands ---

    @handles(Submit)
    def on_submit(self, envelope: Envelope) -> SubmitReply:
        """Admits a sequence, once for each epoch."""
        submit = envelope.message
        assert isinstance(submit, Submit)
        status = self.ledger.judge(submit)
        if self._draining and status == "accepted":
            return self._submit_reply(
                submit, "busy", ServiceError("draining", "The engine is shutting down.", retry_after_s=RETRY_AFTER_S)
            )
        if status == "busy":
            full = ServiceError("server_is_overloaded", "The engine's queue is full.", retry_after_s=RETRY_AFTER_S)
            return self._submit_reply(submit, "busy", full)
        if status == "accepted":
            try:
                self._admit(submit, envelope)
            except ServiceError as error:
                return self._submit_reply(submit, "invalid", error)
        return self._submit_reply(submit, status)

    @handles(Cancel)
    async def on_cancel(self, envelope: Envelope) -> None:
        """Ends a sequence: for good, or, after a stop string, until its owner has its tokens."""
        cancel = envelope.message
        assert isinstance(cancel, Cancel)
        if cancel.reason == "stop":
            if self.ledger.end_by_stop_string(cancel.request_id, cancel.epoch):
                self._end(cancel.request_id, cancel.epoch, "stop")
            return
        if self.ledger.bury(cancel.request_id, cancel.epoch, self._now()):
            self._end(cancel.request_id, cancel.epoch, "abort")

    @handles(Done)
    async def on_done(self, envelope: Envelope) -> None:
        """The owner has everything."""
        done = envelope.message
        assert isinstance(done, Done)
        if self.ledger.bury(done.request_id, done.epoch, self._now()):
            self._end(done.request_id, done.epoch, "abort")

    @handles(Resend)
    async def on_resend(self, envelope: Envelope) -> None:
        """Publishes the tokens behind a gap again."""
        resend = envelope.message
        assert isinstance(resend, Resend)
        entry = self.ledger.get(resend.request_id, resend.epoch)
        if entry is not None:
            await self._replay(entry, resend.position)

    @handles(Retarget)
    async def on_retarget(self, envelope: Envelope) -> Ack:
        """Sends a sequence's tokens to another detokenizer from now on."""
        retarget = envelope.message
        assert isinstance(retarget, Retarget)
        entry = self.ledger.get(retarget.request_id, retarget.epoch)
        if entry is None:
            raise ServiceError("not_found", "The engine does not hold this sequence.")
        entry.sink = retarget.sink
        await self._replay(entry, retarget.position)
        return Ack(retarget.request_id)

    @handles(Heartbeat)
    async def on_heartbeat(self, envelope: Envelope) -> None:
        """A gateway is alive and says which sequences it owns."""
        beat = envelope.message
        assert isinstance(beat, Heartbeat)
        if isinstance(beat.status, GatewayStatus):
            self._gateways[beat.id, beat.boot] = self._now()
            self.ledger.claim(beat.id, beat.boot, beat.status, self._now())

    # --- facts ---

    async def report(self, report: StepReport) -> None:
        """Publishes what a step gave: one message for each detokenizer."""
        self._traces.step(report)
        by_sink: dict[str, list[TokenEvent]] = defaultdict(list)
        for request_id, error in report.refused:
            self._take(_refusal(request_id, error, self.ledger), by_sink)
        for outcome in report.outcomes:
            self._take(_token_event(outcome, self.ledger), by_sink)
        for sink, events in by_sink.items():
            await self._publish(sink, report.step, tuple(events))

    def sweep(self) -> None:
        """Drops what no gateway owns any more. Called a few times a second."""
        now = self._now()
        self._gateways = {k: t for k, t in self._gateways.items() if now - t < 10 * limits.ORPHAN_S}
        for entry in self.ledger.expire(now, self._gateways):
            if self.ledger.bury(entry.request_id, entry.epoch, now):
                self._end(entry.request_id, entry.epoch, "abort")
        if not self.ledger.num_live:
            self._quiet.set()

    async def drain(self) -> None:
        """Refuses new sequences and returns when the running ones have ended."""
        self._draining = True
        self._quiet.clear()
        await self._quiet.wait()

    async def on_crash(self, error: BaseException) -> None:
        """Tells every owner that its sequence is lost; they place it elsewhere or fail it."""
        for mark in self.ledger.marks():
            self._abort(core_id(mark.request_id, mark.epoch))
            self.ledger.bury(mark.request_id, mark.epoch, self._now())

    # --- inside ---

    def _admit(self, submit: Submit, envelope: Envelope) -> None:
        check(submit.params)
        output = tuple(unpack_ids(submit.output_token_ids))
        spec = SequenceSpec(
            core_id(submit.request_id, submit.epoch),
            tuple(unpack_ids(submit.prompt_token_ids)),
            submit.params,
            output,
            tuple(split_hashes(submit.block_hashes)),
            submit.cache_salt,
            submit.priority,
            self._arrivals,
            submit.family,
        )
        self._arrivals += 1
        if self.ledger.bury(submit.request_id, submit.epoch - 1, self._now()):
            self._abort(core_id(submit.request_id, submit.epoch - 1))
        self.ledger.enter(submit, len(output), self._now())
        self._traces.submitted(spec.request_id, len(spec.prompt_token_ids), envelope.headers)
        self._add(spec)

    def _take(self, event: TokenEvent | None, by_sink: dict[str, list[TokenEvent]]) -> None:
        entry = self.ledger.append(event) if event is not None else None
        if entry is None or event is None:
            return
        by_sink[entry.sink].append(event)
        if event.finish_reason is not None:
            self._count_end(entry.request_id, entry.epoch, event.finish_reason)

    def _end(self, request_id: str, epoch: int, reason: FinishReason) -> None:
        self._abort(core_id(request_id, epoch))
        self._count_end(request_id, epoch, reason)

    def _count_end(self, request_id: str, epoch: int, reason: FinishReason) -> None:
        self.finished[reason] += 1
        self._traces.ended(core_id(request_id, epoch), reason)

    async def _replay(self, entry: Entry, position: int) -> None:
        event = self.ledger.replay(entry, position)
        if event is not None:
            await self._publish(entry.sink, 0, (event,))

    async def _publish(self, sink: str, step: int, events: tuple[TokenEvent, ...]) -> None:
        message: Message = TokenEvents(self._host.id, self._host.boot, step, events)
        await self.tell(sink, message)

    def _submit_reply(self, submit: Submit, status: SubmitStatus, error: ServiceError | None = None) -> SubmitReply:
        here = (self._host.id, self._host.boot)
        if error is None:
            return SubmitReply(submit.request_id, submit.epoch, status, *here)
        return SubmitReply(
            submit.request_id, submit.epoch, status, *here, error.code, error.message, error.retry_after_s
        )

    def _now(self) -> float:
        return self._host.clock.monotonic()


def core_id(request_id: str, epoch: int) -> str:
    """A sequence's name inside the core: each epoch is a sequence of its own; an older one may still be in flight."""
    return f"{request_id}#{epoch}"


def _split(core_request_id: str) -> tuple[str, int]:
    request_id, _, epoch = core_request_id.rpartition("#")
    return request_id, int(epoch)


def _token_event(outcome: Outcome, ledger: Ledger) -> TokenEvent | None:
    request_id, epoch = _split(outcome.request_id)
    if ledger.get(request_id, epoch) is None:
        return None
    return token_event(outcome, request_id, epoch)


def _refusal(core_request_id: str, error: ServiceError, ledger: Ledger) -> TokenEvent | None:
    request_id, epoch = _split(core_request_id)
    entry = ledger.get(request_id, epoch)
    if entry is None:
        return None
    return TokenEvent(
        request_id, epoch, entry.high_water, (), "error", error_code=error.code, error_message=error.message
    )
