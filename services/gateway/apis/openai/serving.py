"""Runs generations for the endpoints of all APIs, from the converted request to the last byte of the answer.

`Serving` is what the endpoints call. A `ResponseRunner` runs one generation and has its encoder write the answer, whole
or as a stream. The generation is always cancelled at the end (success, error, client disconnected, shutdown). This has
no effect on a generation that has already ended.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import cached_property
from itertools import starmap
from typing import Protocol

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from antiphon.services.gateway.apis.openai.answers.answer_encoder import AnswerEncoder, GenerationState
from antiphon.services.gateway.apis.openai.answers.choices import Choice, ChoiceAccumulator, merge, without_output
from antiphon.services.gateway.apis.openai.bodies.parameters import RequestDefaults
from antiphon.services.gateway.apis.openai.body import GenerationFields, StreamOptions
from antiphon.services.gateway.apis.openai.request_context import Arrival, Kind, RequestContext, Resumption
from antiphon.services.gateway.apis.openai.request_meter import RequestMeter, RequestTrace
from antiphon.services.gateway.edge.access.call import current_call
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.disconnect import ClientGoneError, HandedOverError, unless_gone
from antiphon.services.gateway.edge.http.errors import as_service_error
from antiphon.services.gateway.edge.http.json_response import encoded_response
from antiphon.services.gateway.edge.http.routing.direct_route import Endpoint
from antiphon.services.gateway.edge.http.server.connection import CLOSE
from antiphon.services.gateway.edge.http.shared_answers import REPEATABLE
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.path.generation import (
    Backend,
    Generation,
    GenerationRequest,
    ModelCard,
    ResumedOutput,
    SequenceUpdate,
)
from antiphon.services.gateway.path.guest import Guests
from antiphon.shared.codec import unpack_ids
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.models.image_models import image_limit
from antiphon.shared.observability import telemetry
from antiphon.shared.request import checks
from antiphon.shared.request.sampling_fields import seeds_of

LAST_EVENT_ID = "last-event-id"
"""Header with the position at which a client resumes a stream."""
RESUMABLE = "x-antiphon-resumable"
"""Header of a client that asks for a resumable stream."""
_NOT_REPEATABLE = (
    "This stream cannot be recorded now, so it could not be repeated: send it with 'stream' false, or without "
    "'Idempotency-Key'."
)


class Sink(Protocol):
    """Receives the bytes of a stream: `sse.EventChannel`, or a store of events that clients read later."""

    async def write(self, data: bytes) -> None:
        """Writes the next bytes. Returns when there is room for more."""
        ...

    async def end(self, data: bytes) -> None:
        """Writes the last bytes."""
        ...


class JournaledSink(Sink, Protocol):
    """A store of events from which another run can continue."""

    async def flush(self) -> None:
        """Returns when all events that were written are where another run finds them."""
        ...

    def shown(self) -> list[bytes]:
        """Returns the events that other runs find."""
        ...


class Detached(Protocol):
    """A run without a connected client: a `ResponseRunner`, or an answer that several generations make."""

    @property
    def metrics(self) -> GatewayMetrics:
        """Where its failure is counted."""
        ...

    async def detached(self, sink: JournaledSink) -> None:
        """Writes the events of the answer to `sink`. Raises ServiceError."""
        ...


class RecordedStream(Protocol):
    """A resumable stream: gives its events ids, records its tokens, and omits output that the client already has.

    Its three methods that return events are called instead of those of the encoder.
    """

    @property
    def resumed(self) -> ResumedOutput | None:
        """The output that this run continues; None for the first run."""
        ...

    def opening(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """Returns the events before the output. Called once, before `output`."""
        ...

    def output(
        self,
        encoder: AnswerEncoder,
        batch: list[SequenceUpdate],
        take: Callable[[SequenceUpdate], tuple[Choice, str]],
    ) -> bytes:
        """Returns the events of new output, which `take` adds to its choice. Raises ServiceError."""
        ...

    def closing(self, encoder: AnswerEncoder, state: GenerationState) -> bytes:
        """Returns the events after the output. Called once."""
        ...

    def updates(self, generation: Generation, batch: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Returns new output with the tokens that this run continues, for a whole answer. Raises ServiceError."""
        ...

    async def whole(self, run: "ResponseRunner", receive: Receive) -> bytes:
        """Returns the body of a whole answer. Called once, instead of `serve`. Raises ServiceError."""
        ...

    async def serve(self, run: "ResponseRunner", receive: Receive, channel: sse.EventChannel) -> None:
        """Runs the request for a client; may continue after the client has disconnected. Called once.

        Raises ServiceError.
        """
        ...


class StreamBook:
    """Records streams, so that a client can resume them. Offered by a guest, whose methods only such streams enter."""

    records_all = False
    """Whether streams are recorded also if their clients do not ask for it (`RESUMABLE`)."""

    def __init__(self) -> None:
        self.kept_headers: set[str] = set()
        """Names of headers of a request, in lower case, that a run which resumes its stream needs too."""

    def resumable(self, path: str, endpoint: Endpoint) -> Endpoint:
        """Returns an endpoint whose streams can be recorded, and which resumes one for a request with `LAST_EVENT_ID`.

        `path`: that of its route.
        """

        async def resuming(request: Request) -> Response:
            if LAST_EVENT_ID in request.headers:
                return await self.resumed(request, path)
            request.state.records = path
            return await endpoint(request)

        return resuming

    def can_resume(self, path: str) -> bool:
        """Whether streams of this route can be recorded."""
        return False

    async def resumed(self, request: Request, path: str) -> Response:
        """Returns the rest of the stream that a request of this route names. Raises ServiceError."""
        raise NotImplementedError

    async def begin(self, request: Request, context: RequestContext) -> RecordedStream | None:
        """Returns the record of a new or resumed stream; None if it is not recorded. Raises ServiceError."""
        raise NotImplementedError


class Supplement:
    """Adds something to the answers of requests that ask for it with a header. Offered by a guest."""

    header = ""
    """Name of the header, in lower case."""
    for_all = False
    """Whether answers get it also if their requests do not ask for it."""

    def join(
        self, request: Request, context: RequestContext, encoder: AnswerEncoder
    ) -> tuple[RequestContext, AnswerEncoder]:
        """Returns the context and the encoder of the answer with it. Raises ServiceError if it cannot have it."""
        raise NotImplementedError

    def refuse(self, request: Request, what: str) -> None:
        """Raises ServiceError if a request asks for it, for a kind of answer that does not come from its request."""
        raise NotImplementedError


BeforeEnd = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Does nothing: the default of `before_end`."""


_NO_ECHO = "'echo' needs a tokenizer, and this server has none (--skip-tokenizer-init)."


class Serving:
    """The backend, the settings and the defaults of one application. All its APIs share one object.

    They share it because requests without a seed get seeds in the order of their arrival, across all APIs.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: GatewayMetrics,
        settings: GatewaySettings,
        keys: ApiKeys,
        guests: Guests,
    ) -> None:
        """`guests`: what they offer is for APIs. Without a `StreamBook` no streams are recorded."""
        self.backend = backend
        self.metrics = metrics
        self.settings = settings
        self.keys = keys
        self.guests = guests
        self.streams = guests.offered(StreamBook)
        self._supplement = guests.offered(Supplement)
        if self.streams is not None and self._supplement is not None:
            self.streams.kept_headers.add(self._supplement.header)
        self._is_traced = telemetry.enabled()
        self.defaults = RequestDefaults(
            draw_seed=seeds_of(settings.seed),
            chat_temperature=settings.default_chat_temperature,
            max_logprobs=settings.max_logprobs,
            images_max=image_limit(settings.limit_mm_per_prompt),
        )

    def defaults_of(self, request: Request) -> RequestDefaults:
        """Returns the defaults of a request. A request that resumes a stream gets the stream's first seed."""
        resumption: Resumption | None = request.scope["state"].get("resumption")
        if resumption is None or resumption.seed is None:
            return self.defaults
        seed = resumption.seed
        return replace(self.defaults, draw_seed=lambda: seed)

    def check_comes_later(self, request: Request, what: str) -> None:
        """Raises ServiceError if a request whose answer is fetched later asks for more than such an answer can have.

        `what`: a name of the answer, for the message.
        """
        if (more := self._supplement) is not None and more.header in request.headers:
            more.refuse(request, what)

    async def context_of(
        self, kind: Kind, arrival: Arrival, card: ModelCard, request: GenerationRequest, body: GenerationFields
    ) -> RequestContext:
        """Returns what determines the form of the answer to a body and its converted request. Raises ServiceError.

        If the answer echoes prompts that are token ids, their text comes from a tokenizer.
        """
        options, settings = body.stream_options or StreamOptions(), self.settings
        ids, as_ids, of_prompt = body.return_token_ids, body.return_tokens_as_token_ids, body.prompt_logprobs
        return RequestContext(
            kind=kind,
            arrival=arrival,
            card=card,
            request=request,
            stream=bool(body.stream),
            include_usage=bool(options.include_usage) or settings.enable_force_include_usage,
            echoes=await self._echoes(request) if body.echo else ("",) * request.inputs.num_prompts,
            # Without text, the answer has only token ids.
            return_token_ids=(settings.return_token_ids if ids is None else ids) or not request.output.detokenize,
            tokens_as_ids=(settings.return_tokens_as_token_ids if as_ids is None else as_ids)
            or not request.output.detokenize,
            continuous_usage=bool(
                (options.include_usage or settings.enable_force_include_usage) and options.continuous_usage_stats
            ),
            timings=bool(body.timings),
            prompt_logprobs=None if of_prompt is None else checks.prompt_logprobs(of_prompt, settings.max_logprobs),
            echoes_logprobs=kind == "completion" and bool(body.echo) and request.params.logprobs is not None,
        )

    async def _echoes(self, request: GenerationRequest) -> tuple[str, ...]:
        """Returns the text to echo for each prompt. For a conversation this is its last message."""
        inputs = request.inputs
        if inputs.texts:
            return inputs.texts
        if inputs.messages and not inputs.messages[-1].token_ids:
            return (inputs.messages[-1].content,)
        last = [tuple(unpack_ids(message.token_ids)) for message in inputs.messages[-1:]]
        try:
            return tuple([await self.backend.detokenize(request.model, ids) for ids in inputs.token_ids or last])
        except ServiceError as error:
            if error.param != "prompt":
                raise
            # The server has no tokenizer. The prompt was given as token ids, and it is the echo that would be text.
            raise ServiceError(error.code, _NO_ECHO, param="echo") from None

    def runner(
        self,
        request: Request,
        context: RequestContext,
        encoder: AnswerEncoder,
        before_end: BeforeEnd = nothing,
        recorded: RecordedStream | None = None,
    ) -> "ResponseRunner":
        """Returns the runner of a request. `before_end` and `recorded`: see ResponseRunner."""
        if (more := self._supplement) is not None and (more.for_all or more.header in request.headers):
            context, encoder = more.join(request, context, encoder)
        if recorded is not None and recorded.resumed is not None:
            guests = structs.replace(context.request.guests, resumed=recorded.resumed)
            context = structs.replace(context, request=structs.replace(context.request, guests=guests))
        trace = RequestTrace(context, request.headers) if self._is_traced else None
        return ResponseRunner(self.backend, context, encoder, self.metrics, trace, before_end, recorded)

    async def answer(
        self, request: Request, context: RequestContext, encoder: AnswerEncoder, before_end: BeforeEnd = nothing
    ) -> Response:
        """Runs a generation and returns its answer, whole or as a stream. Raises ServiceError."""
        recorded: RecordedStream | None = None
        if (book := self.streams) is not None:
            asked = RESUMABLE in request.headers or "resumption" in request.scope["state"]
            is_recorded = asked or (context.stream and book.records_all)
            recorded = await book.begin(request, context) if is_recorded else None
        if recorded is None and context.stream and REPEATABLE in request.scope["state"]:
            raise ServiceError("invalid_value", _NOT_REPEATABLE, param="Idempotency-Key")
        request.state.body = b""  # a recorded stream has what it needs of it
        run = self.runner(request, context, encoder, before_end, recorded)
        if context.stream:
            return StreamedAnswer(run, self.settings.keep_alive_s, recorded)
        if recorded is not None:
            return encoded_response(await recorded.whole(run, request.receive))
        return encoded_response(await run.whole(request.receive))


class ResponseRunner:
    """Runs one generation, from the request to the last byte of its answer.

    `before_end` is awaited when the answer is complete and encoded, before its last bytes are sent. So objects that it
    stores exist when the client asks for them. `recorded`: the record of a resumable stream.
    """

    def __init__(
        self,
        backend: Backend,
        context: RequestContext,
        encoder: AnswerEncoder,
        metrics: GatewayMetrics,
        trace: RequestTrace | None,
        before_end: BeforeEnd = nothing,
        recorded: RecordedStream | None = None,
    ) -> None:
        self.metrics = metrics
        self.encoder = encoder
        self._backend = backend
        self._context = context
        self._trace = trace
        self._before_end = before_end
        self._recorded = recorded
        self._flush: Callable[[GenerationState], bytes] | None = getattr(encoder, "flush", None)
        """The method that a `SnapshotEncoder` has in addition; None for other encoders."""
        self._opened = False

    @cached_property
    def _accumulator(self) -> ChoiceAccumulator:
        """The choices, from the first output on."""
        context = self._context
        return ChoiceAccumulator(
            len(context.echoes), context.request.num_sequences, keep_token_ids=context.return_token_ids
        )

    @cached_property
    def _meter(self) -> RequestMeter:
        return RequestMeter(self.metrics, self._context)

    async def whole(self, receive: Receive) -> bytes:
        """Returns the body of the whole answer. Raises ServiceError."""
        async with self._generating() as generation:
            await unless_gone(receive, self._collect(generation))
            self._accumulator.keep_best(self._context.request.n)
            data = self.encoder.whole(self._state(generation))
            await self._before_end()
            return data

    async def stream(self, receive: Receive, channel: sse.EventChannel) -> None:
        """Writes the answer while it is generated. Raises ServiceError, before or after the first byte."""
        async with self._generating() as generation:
            await unless_gone(receive, self._write(generation, channel), channel.guard())

    async def detached(self, sink: Sink) -> None:
        """Writes the streamed answer to `sink`, without a client that could disconnect. Raises ServiceError."""
        async with self._generating() as generation:
            await self._write(generation, sink)

    async def _collect(self, generation: Generation) -> None:
        async for batch in generation.updates():
            self._start_parsing(generation)
            for update in batch if self._recorded is None else self._recorded.updates(generation, batch):
                choice, text = self._take(update)
                choice.text.append(text)
        self._complete(generation)

    async def _write(self, generation: Generation, sink: Sink) -> None:
        # Each token resumes all coroutines of the task that waits for it. That of the request has about 25.
        await asyncio.create_task(self._pump(generation, sink))

    async def _pump(self, generation: Generation, sink: Sink) -> None:
        async for batch in generation.updates():
            # One write for each batch of updates, whatever the number of choices and tokens in the batch.
            if data := self._encode(batch, generation):
                await sink.write(data)
        self._complete(generation)
        last = self._opening(generation) + self._closing(generation)
        await self._before_end()
        await sink.end(last)

    def _encode(self, batch: list[SequenceUpdate], generation: Generation) -> bytes:
        if not self._opened:
            self._start_parsing(generation)
        if self._recorded is not None:
            opening = self._opening(generation)
            return opening + self._recorded.output(self.encoder, batch, self._take)
        taken = [*map(self._take, merge(batch))]
        data = self._opening(generation) + b"".join(starmap(self.encoder.chunk, taken))
        return data if self._flush is None else data + self._flush(self._state(generation))

    def _opening(self, generation: Generation) -> bytes:
        """Returns the beginning of the stream at the first call, then b""."""
        if self._opened:
            return b""
        self._opened = True
        if self._recorded is not None:
            return self._recorded.opening(self.encoder, self._state(generation))
        return self.encoder.opening(self._state(generation))

    def _closing(self, generation: Generation) -> bytes:
        if self._recorded is not None:
            return self._recorded.closing(self.encoder, self._state(generation))
        return self.encoder.closing(self._state(generation))

    def _start_parsing(self, generation: Generation) -> None:
        """Creates the parsers of the choices at the first output: they need the end of the rendered prompt."""
        answer, choices = self._context.answer_format, self._accumulator.choices
        if answer is not None and choices[0].parser is None:
            for choice in choices:
                choice.parser = answer.parser(generation.prompt_tail)

    def _take(self, update: SequenceUpdate) -> tuple[Choice, str]:
        """Adds an update to its choice. Returns the choice, and the new text if the choice has no parser."""
        if self._context.request.output.only_echoes:
            update = without_output(update)
        choice = self._accumulator.add(update)
        self._meter.saw(update)
        return choice, choice.separate(update)

    def _state(self, generation: Generation) -> GenerationState:
        return GenerationState(
            accumulator=self._accumulator,
            num_prompt_tokens=generation.num_prompt_tokens,
            generation=generation,
            time_to_first_token_s=self._meter.time_to_first_token_s,
            time_to_last_token_s=self._meter.time_to_last_token_s,
            elapsed_s=self._meter.elapsed_s,
        )

    def _complete(self, generation: Generation) -> None:
        self._accumulator.check_complete()
        self._meter.completed(self._accumulator, _num_prompt_tokens(generation))

    @contextlib.asynccontextmanager
    async def _generating(self) -> AsyncIterator[Generation]:
        reason, cause, failure = "abort", "", ""
        generation: Generation | None = None
        try:
            generation = self._backend.generate(self._context.request)
            yield generation
            reason = "stop"
        except ClientGoneError as gone:
            failure, cause = gone.code, gone.cause
            raise
        except asyncio.CancelledError as cancelled:
            # The code that cancels a request's task gives the cause as the exception's message; the task group of a
            # batch cannot.
            cause = str(cancelled.args[0]) if cancelled.args else "batch_stopped" if current_call().in_batch else ""
            raise
        except Exception as error:
            reason = "error"
            failure = cause = error.code if isinstance(error, ServiceError) else "internal_error"
            raise
        finally:
            if generation is not None:
                await generation.cancel(reason, cause)
            self._meter.ended(self._accumulator, reason)
            if self._trace is not None:
                first_token_s = self._meter.time_to_first_token_s
                self._trace.end(self._accumulator, _num_prompt_tokens(generation), first_token_s, failure)


def _num_prompt_tokens(generation: Generation | None) -> int:
    return generation.num_prompt_tokens if generation is not None else 0


class StreamedAnswer(Response):
    """An ASGI response that is written while the tokens are generated."""

    def __init__(self, run: ResponseRunner, keep_alive_s: float, recorded: RecordedStream | None = None) -> None:
        # The constructor of Response is not called, because it would render a body.
        self.background = None
        self._run = run
        self._keep_alive_s = keep_alive_s
        self._recorded = recorded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Writes the stream. Raises a failure before the first byte; sends a later failure as an event."""
        content_type = self._run.encoder.content_type
        keep_alive_s = self._keep_alive_s if content_type == sse.CONTENT_TYPE else 0.0
        channel = sse.EventChannel(send, keep_alive_s=keep_alive_s, content_type=content_type)
        try:
            if self._recorded is None:
                await self._run.stream(receive, channel)
            else:
                await self._recorded.serve(self._run, receive, channel)
        except ClientGoneError as gone:
            self._run.metrics.count_error(gone.code)
        except HandedOverError:
            # To the client the stream is interrupted, so the client resumes it; an end or an error would be final.
            if not channel.started:
                raise
            if (close := scope.get(CLOSE)) is not None:
                close()
                await asyncio.sleep(0)  # the server learns of it; else it reports an answer without an end
        except Exception as error:
            if not channel.started:
                raise
            failure = as_service_error(error)
            self._run.metrics.count_error(failure.code)
            last_words = channel.end(self._run.encoder.failure(failure))
            with contextlib.suppress(ClientGoneError):
                await unless_gone(receive, last_words, channel.guard())
