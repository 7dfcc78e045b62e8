"""One recorded stream that runs in this gateway. It may continue without its client, and ends if it is taken over."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from starlette.types import Receive

from antiphon.services.gateway.apis.openai.answers.answer_encoder import AnswerEncoder, GenerationState
from antiphon.services.gateway.apis.openai.serving import Detached, JournaledSink, ResponseRunner
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.disconnect import ClientGoneError, HandedOverError, watched
from antiphon.services.gateway.guests.resume.journal import JournaledStream
from antiphon.services.gateway.guests.resume.positioned import PositionedEvents
from antiphon.services.gateway.path.generation import Generation, ResumedOutput, SequenceUpdate
from antiphon.shared.errors import ServiceError


class RunningStream:
    """Implements `serving.RecordedStream`.

    `grace_s`: time for which it continues without a client, seconds; 0: not at all.

    `resumed`: the tokens that were generated before the interruption, from which this generation continues. `on_end` is
    called once, when the generation has ended.
    """

    def __init__(self, events: PositionedEvents, grace_s: float, on_end: "Callable[[RunningStream], None]") -> None:
        self.resumed: ResumedOutput | None = None
        self.journaled: JournaledStream | None = None
        self.output = events.output
        """See RecordedStream. Called for each token, so without a method of this class between."""
        self._events = events
        self._grace_s = grace_s
        self._on_end = on_end
        self._work: asyncio.Task[None] | None = None
        self._taken = self._is_handed_over = self._is_followed = False
        self._gone: BaseException | None = None
        """Why there is no client any more, if the run continues without it."""
        self._over = asyncio.Event()

    def opening(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """See RecordedStream. From now on, the journal has the tokens."""
        if self.journaled is not None:
            self.journaled.follow(state.generation.outputs, self.resumed, state.num_prompt_tokens)
        return self._events.opening(encoder, state)

    def closing(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """See RecordedStream."""
        return self._events.closing(encoder, state)

    def updates(self, generation: Generation, batch: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """See RecordedStream. From the first call on, the journal has the tokens."""
        if not self._is_followed and self.journaled is not None:
            self._is_followed = True
            self.journaled.follow(generation.outputs, self.resumed, generation.num_prompt_tokens)
        return self._events.updates(batch)

    async def whole(self, run: ResponseRunner, receive: Receive) -> bytes:
        """See RecordedStream."""
        self._work = task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        try:
            if self._taken:
                raise taken()
            return await run.whole(receive)
        except asyncio.CancelledError:
            if not (self._taken or self._is_handed_over):
                raise
            while task.cancelling() > num_cancelled:
                task.uncancel()  # the cancellations were those of this object
            raise taken() if self._taken else HandedOverError from None
        finally:
            self._work = None
            self._end()

    async def serve(self, run: ResponseRunner, receive: Receive, channel: sse.EventChannel) -> None:
        """See RecordedStream. The run is in the current task."""
        if self._taken:
            self._end()
            raise taken()
        self._work = task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        try:
            await (self._with_grace(run, receive, channel) if self._grace_s else run.stream(receive, channel))
        except ClientGoneError:
            raise
        except (asyncio.CancelledError, Exception):
            if not (self._taken or self._is_handed_over or self._gone is not None):
                raise
            while task.cancelling() > num_cancelled:
                task.uncancel()  # the cancellations were those of this object
            if self._gone is None:
                raise taken() if self._taken else HandedOverError from None
        finally:
            self._work = None
            self._end()
        if (gone := self._gone) is not None:
            try:
                raise gone
            finally:
                self._gone = gone = None  # else the exception and this frame would wait for the garbage collector

    async def _with_grace(self, run: ResponseRunner, receive: Receive, channel: sse.EventChannel) -> None:
        """Runs a stream that continues for `grace_s` without its client; then its task is cancelled."""
        timer: asyncio.TimerHandle | None = None

        def gone(watcher: "asyncio.Task[NoReturn]") -> None:
            nonlocal timer
            if channel.ended or self._work is None:
                return  # the server reports the end of an answer like a disconnect
            self._gone = watcher.exception()
            channel.detach()
            cause = self._gone.cause if isinstance(self._gone, ClientGoneError) else None
            timer = asyncio.get_running_loop().call_later(self._grace_s, self._work.cancel, cause)

        try:
            await watched(receive, run.detached(channel), channel.guard(), gone)
        finally:
            if timer is not None:
                timer.cancel()

    async def detached(self, run: Detached, sink: JournaledSink) -> None:
        """Runs a request that has no client. Called once.

        Raises ServiceError('stream_taken') if another gateway takes over.
        """
        if not self._taken:
            self._work = asyncio.create_task(run.detached(sink))
        try:
            if self._work is not None:
                await asyncio.wait({self._work})
            if self._taken:
                raise taken()
            assert self._work is not None
            self._work.result()
        finally:
            if self._work is not None:
                await _stopped(self._work)
            self._end()

    def leave(self) -> None:
        """Ends the wait for a client, because the gateway shuts down: the stream can be resumed at another gateway."""
        self._grace_s = 0.0
        if self._gone is not None and self._work is not None:
            self._work.cancel("draining")

    def take_away(self, cause: str = "stream_taken") -> None:
        """Ends the run, because another gateway continues the stream or, by another `cause`, has ended it."""
        self._taken = True
        if self._work is not None:
            self._work.cancel(cause)

    def hand_over(self) -> None:
        """Ends the run, because the gateway ends: the client resumes the stream at another gateway."""
        self._is_handed_over = True
        if self._work is not None:
            self._work.cancel("draining")

    async def over(self) -> None:
        """Returns when the run has ended."""
        await self._over.wait()

    def _end(self) -> None:
        self._over.set()
        self._on_end(self)


async def _stopped(work: "asyncio.Task[None]") -> None:
    """Cancels a task that has not ended, and returns when it has. Does not raise its exception."""
    if not work.done():
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    elif not work.cancelled():
        work.exception()  # else asyncio reports that nobody has looked at it


def taken() -> ServiceError:
    """Returns the error for a client whose stream another connection has resumed."""
    return ServiceError("stream_taken", "Another connection has resumed this stream, so this one ends.")
