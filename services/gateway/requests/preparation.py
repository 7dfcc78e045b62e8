"""Prepares an accepted request: encodes its images, tokenizes its prompts, and queues its sequences.

Tokenizers convert texts and conversations; prompts that are token ids are checked here.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.requests.gateway_parts import GatewayParts
from services.gateway.requests.messages import Prompt, RequestMessages
from services.gateway.requests.pictures import RequestPicture, encoded
from services.gateway.requests.request_actor import RequestActor
from services.gateway.requests.router import model_of
from services.gateway.requests.service_clients import ServiceClients
from shared import limits
from shared.blocks import chain_hashes
from shared.codec import pack_ids, unpack_ids
from shared.errors import ServiceError
from shared.messages import TokenizedPrompt, TokenizeReply, TokenizeRequest
from shared.parameters.context import check_context, truncated
from shared.parameters.sampling import SamplingParams, check, check_vocabulary
from shared.request.choices import param_of_number


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A tokenized request: its prompts, and its parameters with `bad_words` as token ids."""

    prompts: list[Prompt]
    params: SamplingParams


async def prepare(actor: RequestActor, parts: GatewayParts) -> None:
    """Has the prompts of a request tokenized and queues its sequences. Raises ServiceError, see `tokenize`.

    Runs in the request's task. While the gateway is disconnected from the bus, the request waits for a short time. If
    it has ended meanwhile, nothing is queued.
    """
    await parts.bus.connected()
    request, card = actor.request, actor.card
    pictures = await _encoded_pictures(actor, parts) if request.pictures else ()
    if actor.over:
        return
    tokenized = await tokenize(parts.clients, request, card, _block_size(parts, card), pictures)
    request = replace(request, params=tokenized.params)
    messages = RequestMessages(parts.host, request, card, tokenized.prompts)
    if candidates := actor.tokenized(messages):
        parts.dispatcher.enqueue(candidates)


async def _encoded_pictures(actor: RequestActor, parts: GatewayParts) -> tuple[RequestPicture, ...]:
    fetched = await parts.pictures.fetched(actor.request.pictures)
    if actor.over:
        return ()
    actor.picture_files = parts.pictures.hold(fetched)
    return await encoded(parts.clients, actor.card.served_by, fetched, actor.picture_files)


def _block_size(parts: GatewayParts, card: ModelCard) -> int:
    """Returns the block size of the model's engines, in tokens; 0 if no engine is running."""
    alive = parts.members.alive("engine", parts.host.clock.monotonic())
    for engine in (member for member in alive if model_of(member) == card.served_by):
        block_size = getattr(engine.status, "block_size", 0)
        if block_size:
            return block_size
    return 0


async def tokenize(
    clients: ServiceClients,
    request: GenerationRequest,
    card: ModelCard,
    block_size: int,
    pictures: Sequence[RequestPicture] = (),
) -> Tokenized:
    """Returns the prompts of a request as token ids, and its parameters. `pictures`: those of its conversation.

    Raises ServiceError if a prompt is too long for the context or for its log probabilities, has no tokens or ids
    outside the vocabulary, if the chat template refuses the conversation, if the grammar cannot be used, or if all
    sequences together have too many tokens.
    """
    check_vocabulary(request.params, card.vocab_size)
    prompts, bad_words = await _converted(clients, request, card, block_size, pictures)
    count = request.num_sequences * sum(prompt.num_tokens for prompt in prompts)
    if count > limits.REQUEST_TOKENS_MAX:
        text = f"All sequences of the request would have {count} prompt tokens, more than {limits.REQUEST_TOKENS_MAX}."
        param = request.prompt_name(0) if request.pooling else param_of_number(request.n, request.num_sequences)
        raise ServiceError("invalid_value", f"{text} Reduce '{param}' or the prompts.", param=param)
    for index, prompt in enumerate(prompts):
        if not prompt.num_tokens:
            name = request.prompt_name(index)
            raise ServiceError("invalid_value", f"The text of '{name}' has no tokens.", param=name)
    if request.params.prompt_logprobs is not None:
        _check_prompt_logprobs(prompts, request.params.prompt_logprobs)
    return Tokenized(prompts, _with_bad_words(request.params, bad_words))


async def _converted(
    clients: ServiceClients,
    request: GenerationRequest,
    card: ModelCard,
    block_size: int,
    pictures: Sequence[RequestPicture],
) -> tuple[list[Prompt], tuple[bytes, ...]]:
    """Returns the prompts, and the packed token ids of the words in `bad_word_texts`."""
    given = [
        _given(ids, request.prompt_name(index), request, card, block_size)
        for index, ids in enumerate(request.token_ids)
    ]
    if given and request.params.grammar is None and not request.bad_word_texts:
        return given, ()
    parts, replies = list(_parts(request)), list[TokenizeReply]()
    for first in range(0, len(parts), limits.TOKENIZE_REQUESTS_MAX):
        some = parts[first : first + limits.TOKENIZE_REQUESTS_MAX]
        replies += await asyncio.gather(*(_tokenized(clients, part, card, block_size, pictures) for part in some))
    return given or [prompt for reply in replies for prompt in _prompts(reply, pictures)], replies[0].bad_words


async def _tokenized(
    clients: ServiceClients,
    request: GenerationRequest,
    card: ModelCard,
    block_size: int,
    pictures: Sequence[RequestPicture],
) -> TokenizeReply:
    message = tokenize_message(request, card, block_size)
    if pictures:
        message = msgspec.structs.replace(message, pictures=tuple(picture.tokens for picture in pictures))
    try:
        reply = await clients.tokenizer(
            message, request.num_characters, request.trace_headers, request.record.tokenizer_silent
        )
    except ServiceError as error:
        if error.param != "messages" or not request.prompt_names:
            raise
        # Errors of chat templates call every conversation `messages`.
        name = request.prompt_name(0)
        raise ServiceError(error.code, error.message, param=name, retry_after_s=error.retry_after_s) from None
    assert isinstance(reply, TokenizeReply)
    request.record.tokenizer_answered(reply.tokenizer_id)
    return reply


async def tokenize_only(
    parts: GatewayParts, request: GenerationRequest, card: ModelCard, *, return_tokens: bool
) -> tuple[TokenizedPrompt, ...]:
    """Returns the prompts of a request that generates nothing. Raises ServiceError, see `tokenize`."""
    message = tokenize_message(request, card, 0, return_tokens=return_tokens)
    fetched = await parts.pictures.fetched(request.pictures)
    files = parts.pictures.hold(fetched)
    try:
        pictures = await encoded(parts.clients, card.served_by, fetched, files)
        message = msgspec.structs.replace(message, pictures=tuple([picture.tokens for picture in pictures]))
        reply = await parts.clients.tokenizer(message, request.num_characters, request.trace_headers)
    finally:
        parts.pictures.release(files)
    assert isinstance(reply, TokenizeReply)
    return reply.prompts


def _prompts(reply: TokenizeReply, pictures: Sequence[RequestPicture]) -> list[Prompt]:
    return [
        Prompt(
            one.token_ids,
            one.block_hashes,
            reply.end_token_ids,
            one.tail,
            tuple(picture.placed(start) for picture, start in zip(pictures, one.picture_starts, strict=True)),
            one.num_first_tokens,
        )
        for one in reply.prompts
    ]


def _with_bad_words(params: SamplingParams, packed: tuple[bytes, ...]) -> SamplingParams:
    if not packed:
        return params
    words = (*params.bad_words, *(tuple(unpack_ids(word)) for word in packed))
    params = msgspec.structs.replace(params, bad_words=words)
    check(params)
    return params


def _check_prompt_logprobs(prompts: list[Prompt], num_candidates: int) -> None:
    most = limits.PROMPT_LOGPROBS_MAX // (num_candidates + 1)
    longest = max(prompt.num_tokens for prompt in prompts)
    if longest > most:
        raise ServiceError(
            "invalid_value",
            f"Log probabilities with {num_candidates} candidates can be reported for prompts of at most {most} tokens. "
            f"This prompt has {longest}: shorten the prompt or ask for fewer candidates.",
            param="prompt",
        )


def tokenize_message(
    request: GenerationRequest, card: ModelCard, block_size: int, *, return_tokens: bool = False
) -> TokenizeRequest:
    """Returns the `TokenizeRequest`. With `block_size` 0 there are no block hashes and no context check."""
    return TokenizeRequest(
        request.request_id,
        card.served_by,
        request.texts,
        request.messages,
        request.add_special_tokens,
        request.add_generation_prompt,
        card.max_model_len if block_size else 0,
        request.params.max_tokens,
        block_size,
        request.cache_salt,
        return_tokens,
        bad_words=request.bad_word_texts,
        grammar=request.params.grammar,
        grammar_param=request.grammar_param,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        suffix=request.suffix,
        continue_final_message=request.continue_final_message,
        template_variables=request.template_variables,
        generates=request.pooling is None,
        prompt_names=request.prompt_names,
        second_prompts=request.second_texts,
    )


def _parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    """Splits the request into parts with as many prompts as one `TokenizeRequest` may have.

    A request whose prompts are token ids is one part, sent only for its grammar or its bad words.
    """
    if not request.texts and not request.conversations:
        yield request
    for messages in request.conversations:
        yield replace(request, messages=messages, conversations=())
    first, sizes = 0, list(map(len, request.texts))
    for index, second in enumerate(request.second_texts):
        sizes[index] += len(second)
    while first < len(sizes):
        end = first + _num_fitting(sizes[first : first + limits.PROMPTS_MAX], len(request.suffix))
        part = slice(first, end)
        yield replace(
            request,
            texts=request.texts[part],
            second_texts=request.second_texts[part],
            prompt_names=request.prompt_names[part],
        )
        first = end


def _num_fitting(sizes: Sequence[int], suffix_size: int) -> int:
    """Returns how many of the first texts, each with the suffix, fit into TOKENIZE_CHARS_MAX; at least one.

    `sizes`: number of characters of each text, or of a pair of texts.
    """
    size = 0
    for number, each in enumerate(sizes):
        size += each + suffix_size
        if number and size > limits.TOKENIZE_CHARS_MAX:
            return number
    return len(sizes)


def _given(ids: tuple[int, ...], name: str, request: GenerationRequest, card: ModelCard, block_size: int) -> Prompt:
    if not ids:
        raise ServiceError("invalid_value", f"'{name}' must not be empty.", param=name)
    if min(ids) < 0 or max(ids) >= card.vocab_size:
        bad = next(i for i in ids if not 0 <= i < card.vocab_size)
        raise ServiceError("invalid_value", f"'{name}' holds the token id {bad}, outside the vocabulary.", param=name)
    generates = request.pooling is None
    if generates:
        ids = truncated(ids, request.truncate_prompt_tokens, request.params.max_tokens, card.max_model_len)
    elif request.truncate_prompt_tokens:
        ids = ids[: request.truncate_prompt_tokens]
    check_context(len(ids), request.params.max_tokens, card.max_model_len, name, generates=generates)
    packed = pack_ids(ids)
    return Prompt(packed, chain_hashes(packed, block_size, request.cache_salt) if block_size else b"")
