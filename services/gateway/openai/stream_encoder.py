"""Encodes stream chunks: each is a concatenation of constant bytes and one encoded string. Pure.

This is the hot path of the gateway.

    data: {"id":…,"choices":[{"index":0,"text":   "Good "   ,"logprobs":null,"finish_reason":null}]}
    └── head: constant for each choice ───────┘ └ encoded ┘ └── tail: constant ──────────────────┘

In chat each choice begins with a chunk that has only the role and ends with an empty delta. The role chunk has no empty
`content`: the simplest clients search a chunk for the word `content` and expect text after it. Other clients must
accept a chunk without `content` anyway, because the last chunk has none. For the same reason no key that contains this
word is ever null.
"""

from typing import Any

import msgspec

from services.gateway.http import sse
from services.gateway.http.errors import error_body
from services.gateway.openai import full_response
from services.gateway.openai.answer_encoder import GenerationState
from services.gateway.openai.choices import Choice, ChoiceAccumulator
from services.gateway.openai.logprobs import chat_logprobs, completion_logprobs
from services.gateway.openai.request_context import RequestContext, system_fingerprint
from shared.errors import ServiceError

OBJECT = {"completion": "text_completion", "chat": "chat.completion.chunk"}
_BEFORE_TEXT = {"completion": b',"text":', "chat": b',"delta":{"content":'}
_AFTER_TEXT = {"completion": b"", "chat": b"}"}
_ROLE = b',"delta":{"role":"assistant"}'
_NO_DELTA = b',"delta":{}'
_GOES_ON = b',"logprobs":null,"finish_reason":null}]'
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

    def opening(self) -> bytes:
        """Returns the chunks before any token: the role in chat, and the echo of the prompt if requested."""
        parts: list[bytes] = []
        for index, start in enumerate(self._starts):
            if self._chat:
                parts.append(start + _ROLE + _GOES_ON + self._close)
            if echo := self._context.echo(index):
                parts.append(self._plain(index, echo))
        return b"".join(parts)

    def chunk(self, choice: Choice, text: str) -> bytes:
        """Returns the encoded new output of a choice (two chunks at the end of a chat choice); b"" if there is none.

        Removes the token ids and log probabilities that it encodes from the choice.
        """
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

    def usage(self, accumulator: ChoiceAccumulator, num_prompt_tokens: int) -> bytes:
        """Returns the chunk with the token counts."""
        return self._base + b',"choices":[],"usage":' + _encode(accumulator.usage(num_prompt_tokens)) + b"}" + sse.END

    def _plain(self, index: int, text: str) -> bytes:
        return self._heads[index] + _encode(text) + self._tail

    def _head_with_ids(self, choice: Choice) -> bytes:
        token_ids, choice.token_ids = choice.token_ids, []
        return self._starts[choice.index] + b',"token_ids":' + _encode(token_ids) + _BEFORE_TEXT[self._context.kind]

    def _with_logprobs(self, choice: Choice, head: bytes, text: str) -> bytes:
        start = head + _encode(text) + self._after
        return start + b',"logprobs":' + self._logprobs(choice) + b',"finish_reason":null}]' + self._close

    def _finish(self, choice: Choice) -> bytes:
        reason, stop = _encode(choice.finish_reason), _encode(choice.stop_reason)
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
            shape = chat_logprobs(choice.logprobs)
        else:
            shape, choice.logprobs_offset = completion_logprobs(choice.logprobs, choice.logprobs_offset)
        choice.logprobs.clear()
        return _encode(shape)


def _constants(context: RequestContext) -> dict[str, Any]:
    return {
        "id": context.id,
        "object": OBJECT[context.kind],
        "created": context.arrival.created,
        "model": context.card.name,
        "system_fingerprint": system_fingerprint(context.card),
    }


class OpenAIEncoder:
    """Encodes the answers of completions and chat. Implements `AnswerEncoder`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._chunks = ChunkEncoder(context)

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return full_response.answer(self._context, state.accumulator, state.num_prompt_tokens)

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return self._chunks.opening()

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder."""
        return self._chunks.chunk(choice, text)

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        counts = b""
        if self._context.include_usage:
            counts = self._chunks.usage(state.accumulator, state.num_prompt_tokens)
        return counts + sse.DONE

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder. Without [DONE], so that an aborted stream does not look complete."""
        return sse.event(error_body(error))
