"""Encodes stream chunks: each is a concatenation of constant bytes and one encoded string. Pure.

This is the hot path of the gateway.

    data: {"id":…,"choices":[{"index":0,"text":   "Good "   ,"logprobs":null,"finish_reason":null}]}
    └── head: constant for each choice ───────┘ └ encoded ┘ └── tail: constant ──────────────────┘

In chat, the first chunk of each choice has only the role, and its last chunk has an empty delta. The role chunk has no
empty `content`, because the simplest clients search a chunk for the word `content` and expect text after it. Other
clients must accept a chunk without `content` anyway, because the last chunk has none. For the same reason no key that
contains this word is ever null.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from antiphon.services.gateway.apis.openai.answers import full_response
from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.chat_message import MessageEncoder
from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.apis.openai.answers.logprobs import chat_logprobs, completion_logprobs
from antiphon.services.gateway.apis.openai.answers.timings import timings
from antiphon.services.gateway.apis.openai.request_context import RequestContext, system_fingerprint
from antiphon.services.gateway.apis.parsers.events import Content
from antiphon.services.gateway.edge.http import sse
from antiphon.services.gateway.edge.http.errors import error_body
from antiphon.shared.errors import ServiceError

OBJECT = {"completion": "text_completion", "chat": "chat.completion.chunk"}
_BEFORE_TEXT = {"completion": b',"text":', "chat": b',"delta":{"content":'}
_AFTER_TEXT = {"completion": b"", "chat": b"}"}
_ROLE = b',"delta":{"role":"assistant"}'
_NO_DELTA = b',"delta":{}'
_CONTINUES = b',"finish_reason":null}]'
_GOES_ON = b',"logprobs":null' + _CONTINUES
_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Encodes the chunks of one response."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._chat = context.kind == "chat"
        self._base = sse.DATA + _encode(_constants(context))[:-1]
        # If a usage chunk follows at the end, all earlier chunks have `usage: null`.
        self._close = b',"usage":null}' + sse.END if context.include_usage else b"}" + sse.END
        choices = range(context.num_sequences)
        self._starts = [self._base + b',"choices":[{"index":%d' % index for index in choices]
        self._heads = [start + _BEFORE_TEXT[context.kind] for start in self._starts]
        self._after = _AFTER_TEXT[context.kind]
        self._tail = self._after + _GOES_ON + self._close
        answer = context.answer_format
        self._messages = MessageEncoder(answer, context.request.request_id) if answer is not None else None

    def set_usage(self, usage: dict[str, Any]) -> None:
        """Sets the token counts that all further chunks have (`continuous_usage_stats`)."""
        self._close = b',"usage":' + _encode(usage) + b"}" + sse.END
        self._tail = self._after + _GOES_ON + self._close

    def opening(self, prompt_token_ids: Sequence[list[int]] = ()) -> bytes:
        """Returns the chunks before any token: the role in chat, the ids and the echo of the prompt if requested."""
        parts: list[bytes] = []
        for index, start in enumerate(self._starts):
            ids = b""
            if prompt_token_ids:
                ids = b',"prompt_token_ids":' + _encode(prompt_token_ids[self._context.prompt_of(index)])
            if self._chat:
                parts.append(start + _ROLE + _GOES_ON + ids + self._close)
            elif ids:
                parts.append(start + ids + b',"token_ids":[]' + _BEFORE_TEXT["completion"] + b'""' + self._tail)
            if echo := self._context.echo(index):
                parts.append(self._plain(index, echo))
        return b"".join(parts)

    def chunk(self, choice: Choice, text: str) -> bytes:
        """Returns the encoded new output of a choice (two chunks at the end of a chat choice); b"" if there is none.

        Removes the token ids, log probabilities and events that it encodes from the choice.
        """
        if choice.parser is not None:
            return self._events(choice)
        head = self._head_with_ids(choice) if choice.token_ids else self._heads[choice.index]
        something = text or head is not self._heads[choice.index]
        if choice.finish_reason is None:
            if not something:
                return b""
            return self._with_logprobs(choice, head, text) if choice.logprobs else head + _encode(text) + self._tail
        if self._chat:
            said = self._with_logprobs(choice, head, text) if something or choice.logprobs else b""
            return said + self._starts[choice.index] + _NO_DELTA + b',"logprobs":null' + self._finish(choice)
        return head + _encode(text) + b',"logprobs":' + self._logprobs(choice) + self._finish(choice)

    def summary(self, *, usage: dict[str, Any] | None = None, timings: dict[str, Any] | None = None) -> bytes:
        """Returns the chunk without choices that has the token counts, the times of the request's phases, or both."""
        parts = [b',"usage":' + _encode(usage)] if usage is not None else []
        parts += [b',"timings":' + _encode(timings)] if timings is not None else []
        return b"".join((self._base, b',"choices":[]', *parts, b"}", sse.END))

    def _events(self, choice: Choice) -> bytes:
        """Returns the encoded events of a choice: one chunk for each event, and one at the end of the choice.

        Token ids and log probabilities are in the first of the chunks. If there is no event, they stay in the choice
        until the next event or the end.
        """
        assert self._messages is not None
        events, choice.events = choice.events, []
        if (
            len(events) == 1
            and isinstance(events[0], Content)
            and not (choice.token_ids or choice.logprobs or choice.finish_reason)
        ):
            return self._plain(choice.index, events[0].text)
        deltas = [b',"delta":' + _encode(self._messages.delta(choice.index, event)) for event in events]
        if choice.finish_reason is not None and not deltas and (choice.token_ids or choice.logprobs):
            deltas = [_NO_DELTA]
        parts: list[bytes] = []
        for delta in deltas:
            token_ids = b""
            if choice.token_ids:
                token_ids, choice.token_ids = b',"token_ids":' + _encode(choice.token_ids), []
            parts += (self._starts[choice.index], token_ids, delta, b',"logprobs":', self._logprobs(choice), _CONTINUES)
            parts.append(self._close)
        if choice.finish_reason is not None:
            parts += (self._starts[choice.index], _NO_DELTA, b',"logprobs":null', self._finish(choice))
        return b"".join(parts)

    def _plain(self, index: int, text: str) -> bytes:
        return self._heads[index] + _encode(text) + self._tail

    def _head_with_ids(self, choice: Choice) -> bytes:
        token_ids, choice.token_ids = choice.token_ids, []
        return self._starts[choice.index] + b',"token_ids":' + _encode(token_ids) + _BEFORE_TEXT[self._context.kind]

    def _with_logprobs(self, choice: Choice, head: bytes, text: str) -> bytes:
        start = head + _encode(text) + self._after
        return start + b',"logprobs":' + self._logprobs(choice) + _CONTINUES + self._close

    def _finish(self, choice: Choice) -> bytes:
        reason, stop = _encode(choice.reason_in(self._context.answer_format)), _encode(choice.stop_reason)
        told = b',"finish_reason":' + reason + b',"stop_reason":' + stop
        length = choice.num_characters + len(self._context.echo(choice.index))
        return (
            told
            + b',"sentence_length":%d,"cum_log_probs":' % length
            + _encode(choice.cumulative_logprob)
            + b"}]"
            + self._close
        )

    def _logprobs(self, choice: Choice) -> bytes:
        if not choice.logprobs:
            return b"null"
        if self._chat:
            shape = chat_logprobs(choice.logprobs, as_ids=self._context.tokens_as_ids)
        else:
            shape, choice.logprobs_offset = completion_logprobs(
                choice.logprobs, choice.logprobs_offset, as_ids=self._context.tokens_as_ids
            )
        choice.logprobs.clear()
        return _encode(shape)


def _constants(context: RequestContext) -> dict[str, Any]:
    return {
        "id": context.id,
        "object": OBJECT[context.kind],
        "created": context.arrival.created,
        "model": context.card.name,
        "system_fingerprint": system_fingerprint(context.card),
        **context.tier,
    }


class OpenAIEncoder:
    """Encodes the answers of completions and chat. Implements `AnswerEncoder`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._chunks = ChunkEncoder(context)
        self._usage: Callable[[], dict[str, Any]] | None = None
        """Returns the token counts so far, if every chunk has them."""

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        times = timings(state) if self._context.timings else None
        ids = state.generation.prompt_token_ids if self._context.return_token_ids else ()
        return full_response.answer(self._context, state.accumulator, state.num_prompt_tokens, times, ids)

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        if self._context.continuous_usage:
            self._usage = partial(state.accumulator.usage, state.num_prompt_tokens)
            none_yet = {"completion_tokens": 0, "total_tokens": state.num_prompt_tokens}
            self._chunks.set_usage({**self._usage(), **none_yet})
        return self._chunks.opening(state.generation.prompt_token_ids if self._context.return_token_ids else ())

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder."""
        if self._usage is not None:
            self._chunks.set_usage(self._usage())
        return self._chunks.chunk(choice, text)

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        usage = state.accumulator.usage(state.num_prompt_tokens) if self._context.include_usage else None
        times = timings(state) if self._context.timings else None
        if usage is None and times is None:
            return sse.DONE
        return self._chunks.summary(usage=usage, timings=times) + sse.DONE

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder. Without [DONE], so that an aborted stream does not look complete."""
        return sse.event(error_body(error))
