"""Runs one generation for one HTTP request and answers the request, whole or as a stream.

The generation is always cancelled at the end (success, error, client disconnected, shutdown). This has no effect on a
generation that has already ended.
"""

import contextlib
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.generation import Backend, Generation, SequenceUpdate
from services.gateway.http import sse
from services.gateway.http.disconnect import ClientGoneError, unless_gone
from services.gateway.http.errors import as_service_error, error_body
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import full_response as responses
from services.gateway.openai.choices import Choice, ChoiceAccumulator, merge
from services.gateway.openai.request_context import RequestContext
from services.gateway.openai.request_meter import RequestMeter
from services.gateway.openai.stream_encoder import ChunkEncoder
from services.gateway.openai.tracing import RequestTrace
from shared.errors import ServiceError


class ResponseRunner:
    """Runs one generation, from the request to the last byte of its answer."""

    def __init__(self, backend: Backend, context: RequestContext, metrics: GatewayMetrics, trace: RequestTrace) -> None:
        self.metrics = metrics
        self._backend = backend
        self._context = context
        self._trace = trace
        self._accumulator = ChoiceAccumulator(
            len(context.echoes), context.request.n, keep_token_ids=context.return_token_ids
        )
        self._meter = RequestMeter(metrics, context)
        self._chunks = ChunkEncoder(context)
        self._opening = self._chunks.opening()

    async def whole(self, receive: Receive) -> bytes:
        """Returns the body of the whole answer. Raises ServiceError."""
        async with self._generating() as generation:
            await unless_gone(receive, self._collect(generation))
            return responses.answer(self._context, self._accumulator, generation.num_prompt_tokens)

    async def stream(self, receive: Receive, channel: sse.EventChannel) -> None:
        """Writes the answer while it is generated. Raises ServiceError, before or after the first byte."""
        async with self._generating() as generation:
            await unless_gone(receive, self._pump(generation, channel), channel.mind())

    async def _collect(self, generation: Generation) -> None:
        async for batch in generation.updates():
            self._start_parsing(generation)
            for update in batch:
                choice = self._take(update)
                if choice.parser is None:
                    choice.text.append(update.text)
                else:
                    choice.events += choice.parsed(update)
        self._complete(generation)

    async def _pump(self, generation: Generation, channel: sse.EventChannel) -> None:
        async for batch in generation.updates():
            self._start_parsing(generation)
            # One write for each batch of updates, whatever the number of choices and tokens in the batch.
            if data := self._encode(batch):
                await channel.write(data)
        self._complete(generation)
        usage = (
            self._chunks.usage(self._accumulator, generation.num_prompt_tokens) if self._context.include_usage else b""
        )
        await channel.end(usage + sse.DONE)

    def _encode(self, batch: list[SequenceUpdate]) -> bytes:
        parts, self._opening = [self._opening], b""
        for update in merge(batch):
            choice = self._take(update)
            if choice.parser is None:
                parts.append(self._chunks.chunk(choice, update.text))
            else:
                parts.append(self._chunks.events(choice, choice.parsed(update)))
        return b"".join(parts)

    def _start_parsing(self, generation: Generation) -> None:
        """Makes the parsers of the choices, which need the end of the prompt, when the first output has arrived."""
        answer, choices = self._context.answer_format, self._accumulator.choices
        if answer is not None and choices[0].parser is None:
            for choice in choices:
                choice.parser = answer.parser(generation.prompt_tail)

    def _take(self, update: SequenceUpdate) -> Choice:
        choice = self._accumulator.choices[update.index]
        choice.add(update)
        self._meter.saw(update)
        return choice

    def _complete(self, generation: Generation) -> None:
        self._accumulator.check_complete()
        self._meter.completed(self._accumulator, _num_prompt_tokens(generation))

    @contextlib.asynccontextmanager
    async def _generating(self) -> AsyncIterator[Generation]:
        reason = "abort"
        generation: Generation | None = None
        try:
            generation = self._backend.generate(self._context.request)
            yield generation
            reason = "stop"
        except ClientGoneError as gone:
            self._trace.failed(gone.code)
            raise
        except Exception as error:
            reason = "error"
            self._trace.failed(error.code if isinstance(error, ServiceError) else "internal_error")
            raise
        finally:
            if generation is not None:
                await generation.cancel(reason)
            self._meter.ended(self._accumulator, reason)
            self._trace.end(self._accumulator, _num_prompt_tokens(generation), self._meter.time_to_first_token_s)


def _num_prompt_tokens(generation: Generation | None) -> int:
    return generation.num_prompt_tokens if generation is not None else 0


class StreamedAnswer(Response):
    """An ASGI response that writes server-sent events while tokens are generated."""

    def __init__(self, run: ResponseRunner, keep_alive_s: float) -> None:
        # The constructor of Response is not called, because it would render a body.
        self.background = None
        self._run = run
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream. Raises a failure before the first byte; sends a later failure as an event."""
        channel = sse.EventChannel(send, keep_alive_s=self._keep_alive_s)
        try:
            await self._run.stream(receive, channel)
        except ClientGoneError as gone:
            self._run.metrics.count_error(gone.code)
        except Exception as error:
            if not channel.started:
                raise
            failure = as_service_error(error)
            self._run.metrics.count_error(failure.code)
            # Without [DONE], so that an aborted stream does not look complete.
            last_words = channel.end(sse.event(error_body(failure)))
            with contextlib.suppress(ClientGoneError):
                await unless_gone(receive, last_words, channel.mind())
