"""The tokenizer's actor: answers tokenize and detokenize requests. Stateless: any replica may answer any request.

Short texts are encoded in the handler, which takes less than a millisecond. Long texts and conversations become jobs:
tasks outside the mailbox that send their own answers, so that a slow request does not delay a short one. Long texts are
encoded on a thread (the library releases the interpreter lock); conversations are rendered by a worker process. The
size of all jobs is limited; further requests that need a job are refused as overload. Few texts are encoded at the same
time, because this takes up to 320 times their size of memory; clients take turns.

A gateway that gets no answer in time asks again. A request whose job is still in progress or waits joins this job:
otherwise a busy tokenizer would do the same work again and again, and answer none in time. If a tokenizer dies, its
requests in progress get no answer, and their gateways ask another replica.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from antiphon.services.tokenizer.grammar_checker import GrammarChecker
from antiphon.services.tokenizer.renderer import Renderer
from antiphon.services.tokenizer.requests import (
    check_model,
    check_rendered,
    check_request,
    detokenize,
    field,
    num_characters,
    num_tokens,
    pairs,
    pairs_reply,
    prompt_name,
    tokenize,
)
from antiphon.shared import limits
from antiphon.shared.actors.actor import Actor, Envelope, error_reply, handles
from antiphon.shared.actors.fair_work import RETRY_AFTER_S, FairPlaces, FairRoom
from antiphon.shared.actors.host import Host
from antiphon.shared.codec import encode
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import DetokenizeReply, DetokenizeRequest, Message, TokenizeReply, TokenizeRequest
from antiphon.shared.observability import telemetry
from antiphon.shared.observability.telemetry import Names
from antiphon.shared.parameters.context import num_bytes
from antiphon.shared.subjects import TOKENIZER_QUEUE
from antiphon.shared.text.codec import Codec, EncodedPair, TextFacts
from antiphon.shared.text.special_tokens import SpecialTokens
from antiphon.shared.text.templates.score_template import ScorePrompt
from antiphon.shared.text.templates.turns import json_object, plain_messages

log = logging.getLogger(__name__)
THREADS_MAX = 4
LONG_BYTES = 128 * 2**10
"""Size from which a text is a long one. Long texts wait for each other, so that they do not delay the others."""
JOB_BYTES_MIN = 64 * 2**10
"""Size that counts for a job with less text. So there are at most 1024 jobs, of one client 512."""
T = TypeVar("T")


class TokenizerActor(Actor):
    """One replica. `num_requests` and `num_tokens` count the answered requests and the prompt tokens in the answers."""

    def __init__(
        self,
        host: Host,
        codec: Codec,
        renderer: Renderer,
        facts: TextFacts,
        model: str,
        *,
        score_template: bool = False,
        escaped: SpecialTokens | None = None,
        jobs_bytes_max: int = limits.TOKENIZER_JOBS_BYTES_MAX,
    ) -> None:
        """`score_template`: whether the template of `renderer` also joins pairs of texts to prompts.

        `escaped`: special tokens that are ordinary text in the contents of conversations.
        """
        super().__init__(f"tokenizer {host.id}", host.transport)
        self.num_requests = self.num_tokens = 0
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the exception of the first job that found a broken invariant."""
        self._host = host
        self._codec = codec
        self._renderer = renderer
        self._score_template = score_template
        self._escaped = escaped
        self._grammars = GrammarChecker()
        self._bos_token = facts.named_tokens.get("bos_token", "")
        self._end_token_ids = facts.end_token_ids
        self._model = model
        self._room = FairRoom(jobs_bytes_max)
        self._jobs: set[asyncio.Task[None]] = set()
        self._replies: dict[Message, list[str]] = {}
        """For each message with a job: the reply subjects of its requests."""
        num_threads = min(THREADS_MAX, os.cpu_count() or 1)
        self._usual, self._long = FairPlaces(num_threads), FairPlaces(limits.TOKENIZER_LONG_BYTES_MAX)
        self._threads = ThreadPoolExecutor(2 * num_threads, "tokenizer")

    async def listen(self) -> None:
        """Subscribes to the model's queue group, and to the replica's own subject for requests that are retried."""
        subjects = self._host.subjects
        await self.bind(subjects.tokenize(self._model), TokenizeRequest, DetokenizeRequest, queue=TOKENIZER_QUEUE)
        await self.bind(
            subjects.tokenizer_direct(self._host.id, self._host.instance_id), TokenizeRequest, DetokenizeRequest
        )

    @handles(TokenizeRequest)
    def on_tokenize(self, envelope: Envelope[TokenizeRequest]) -> TokenizeReply | None:
        """Converts texts or a conversation to token ids. Returns None if a job sends the answer."""
        request = envelope.message
        check_model(request.model, self._model)
        check_request(request)
        size = num_characters(request)
        if request.messages:
            self._start_job(envelope, lambda: self._tokenize_conversation(request, envelope), request.client, size)
            return None
        if request.second_prompts and self._score_template:
            self._start_job(envelope, lambda: self._tokenize_pairs(request, envelope), request.client, size)
            return None
        if request.grammar is not None:
            self._start_job(envelope, lambda: self._tokenize_with_grammar(request, envelope), request.client, size)
            return None
        if size > limits.TOKENIZER_INLINE_CHARS_MAX:
            self._start_job(envelope, lambda: self._tokenize_long(request, envelope), request.client, size)
            return None
        with self._span(envelope) as span:
            return self._counted(tokenize(self._codec, request, request.prompts), span)

    @handles(DetokenizeRequest)
    def on_detokenize(self, envelope: Envelope[DetokenizeRequest]) -> DetokenizeReply | None:
        """Converts token ids to text. Returns None if a job sends the answer."""
        request = envelope.message
        check_model(request.model, self._model)
        if len(request.token_ids) > 4 * limits.TOKENIZER_INLINE_TOKENS_MAX:
            self._start_job(envelope, lambda: self._detokenize_long(request), "", len(request.token_ids))
            return None
        self.num_requests += 1
        return detokenize(self._codec, request)

    async def on_stop(self) -> None:
        """Finishes the jobs, then ends the threads and the template workers."""
        if self._jobs:
            await asyncio.wait(self._jobs)
        await self._end()

    async def on_crash(self, error: BaseException) -> None:
        """Cancels the jobs; their requests get no answer, and the gateways ask another replica."""
        for job in self._jobs:
            job.cancel()
        await self._end()

    # --- jobs ---

    async def _tokenize_conversation(self, request: TokenizeRequest, envelope: Envelope) -> TokenizeReply:
        with self._span(envelope) as span:
            await self._check_grammar(request)
            messages = plain_messages(self._codec, request.messages)
            text = await self._renderer.render(
                self._given(messages),
                request.add_generation_prompt,
                self._given(json_object(request.template_variables, "chat_template_kwargs")),
                continue_final_message=request.continue_final_message,
            )
            check_rendered(request, text, field(request))
            if self._bos_token and text.startswith(self._bos_token):
                # The template has added the BOS token, so the tokenizer must not add it again.
                request = msgspec.structs.replace(request, add_special_tokens=False)
            if len(text) <= limits.TOKENIZER_INLINE_CHARS_MAX:
                reply = tokenize(self._codec, request, (text,))
            else:
                reply = await self._encoded(request, (text,))
            return self._counted(msgspec.structs.replace(reply, end_token_ids=self._end_token_ids), span)

    async def _tokenize_pairs(self, request: TokenizeRequest, envelope: Envelope) -> TokenizeReply:
        """Converts pairs of texts by the score template, one after the other."""
        with self._span(envelope) as span:
            encoded = [await self._by_template(request, index, pair) for index, pair in enumerate(pairs(request))]
            return self._counted(pairs_reply(self._codec, request, encoded), span)

    async def _by_template(self, request: TokenizeRequest, index: int, pair: tuple[str, str]) -> EncodedPair:
        keep, special = request.truncate_prompt_tokens, request.add_special_tokens
        prompt = ScorePrompt(self._codec, pair, keep=keep, add_special_tokens=special, bos=self._bos_token)
        token_ids = None
        while token_ids is None:
            try:
                text = await self._renderer.render(self._given(prompt.messages), add_generation_prompt=False)
            except ServiceError as error:
                raise ServiceError(error.code, error.message, param=prompt_name(request, index)) from None
            check_rendered(request, text, prompt_name(request, index))
            if len(text) <= limits.TOKENIZER_INLINE_CHARS_MAX:
                token_ids = prompt.token_ids(text)
            else:
                ids_of = partial(prompt.token_ids, text)
                token_ids = await self._on_thread(ids_of, request.client, num_bytes(text))
        return EncodedPair(token_ids, 0)

    def _given(self, value: T) -> T:
        """Returns what a client has sent for a template, with the special tokens escaped if that is asked for."""
        return value if self._escaped is None else self._escaped.broken(value)

    async def _tokenize_with_grammar(self, request: TokenizeRequest, envelope: Envelope) -> TokenizeReply:
        await self._check_grammar(request)
        return await self._tokenize_long(request, envelope)

    async def _check_grammar(self, request: TokenizeRequest) -> None:
        if request.grammar is not None:
            await self._grammars.check(request.grammar, request.grammar_param)

    async def _tokenize_long(self, request: TokenizeRequest, envelope: Envelope) -> TokenizeReply:
        with self._span(envelope) as span:
            return self._counted(await self._encoded(request, request.prompts), span)

    async def _detokenize_long(self, request: DetokenizeRequest) -> DetokenizeReply:
        reply = await self._on_thread(partial(detokenize, self._codec, request), "", len(request.token_ids))
        self.num_requests += 1
        return reply

    async def _encoded(self, request: TokenizeRequest, texts: tuple[str, ...]) -> TokenizeReply:
        further = (*request.second_prompts, *(request.suffix,) * len(texts))
        size = sum(map(num_bytes, (*texts, *further)))
        return await self._on_thread(partial(tokenize, self._codec, request, texts), request.client, size)

    async def _on_thread(self, work: Callable[[], T], client: str, size: int) -> T:
        """Runs work with a text of `size` bytes on a thread, when it is the client's turn."""
        is_long = size > LONG_BYTES
        places, number = (self._long, size) if is_long else (self._usual, 1)
        async with places.take(client, places=number, cost=size, wait_s=limits.QUEUE_WAIT_S):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _start_job(self, envelope: Envelope, work: Callable[[], Awaitable[Message]], client: str, size: int) -> None:
        if envelope.message in self._replies:
            self._replies[envelope.message].append(envelope.reply)
            return
        size = max(size, JOB_BYTES_MIN)
        if not self._room.take(client, size):
            raise ServiceError(
                "server_is_overloaded", "The tokenizer has too many requests.", retry_after_s=RETRY_AFTER_S
            )
        self._replies[envelope.message] = [envelope.reply]
        job = asyncio.create_task(self._answer(envelope.message, work))
        self._jobs.add(job)
        job.add_done_callback(self._job_done)
        job.add_done_callback(lambda _: self._room.give_back(client, size))

    async def _answer(self, message: Message, work: Callable[[], Awaitable[Message]]) -> None:
        try:
            data = encode(await work())
        except AssertionError:
            raise
        except ServiceError as error:
            data = encode(error_reply(error))
        except Exception:
            log.exception("%s failed on %s", self.name, type(message).__name__)
            data = encode(error_reply(ServiceError("internal_error", "The request could not be processed.")))
        finally:
            replies = self._replies.pop(message)
        for reply in reversed(replies):  # the last one is the likeliest to be waited for
            if reply:
                await self._send(reply, data)

    async def _send(self, subject: str, data: bytes) -> None:
        """Sends an answer. If it is too large for the bus, sends the error reply `request_too_large` instead."""
        try:
            try:
                await self.transport.publish(subject, data)
            except ServiceError as error:
                if error.code != "request_too_large":
                    raise
                await self.transport.publish(subject, encode(error_reply(error)))
        except ServiceError as error:
            log.warning("%s could not answer: %s", self.name, error)

    def _job_done(self, job: "asyncio.Task[None]") -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)

    # --- inside ---

    def _span(self, envelope: Envelope) -> telemetry.Span:
        return telemetry.start_span(Names.TOKENIZE, parent=envelope.headers)

    def _counted(self, reply: TokenizeReply, span: telemetry.Span) -> TokenizeReply:
        count = num_tokens(reply)
        span.set(Names.USAGE_INPUT_TOKENS, count)
        self.num_requests += 1
        self.num_tokens += count
        return msgspec.structs.replace(reply, tokenizer_id=self._host.id)

    async def _end(self) -> None:
        self._threads.shutdown(wait=False)
        await self._grammars.close()
        await self._renderer.close()
