"""Prepares an accepted request: has its prompts tokenized, and queues its sequences.

Tokenizers convert texts and conversations; prompts that are token ids are checked here.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard, ThinkingLimit
from antiphon.services.gateway.path.guest import Attachment
from antiphon.services.gateway.path.messages import Prompt, RequestMessages
from antiphon.services.gateway.path.requests.request_actor import RequestActor
from antiphon.services.gateway.path.router import model_of
from antiphon.services.gateway.path.service_clients import ServiceClients
from antiphon.shared import limits
from antiphon.shared.blocks import chain_hashes
from antiphon.shared.codec import pack_ids, unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import PromptImage, TokenizedPrompt, TokenizeReply, TokenizeRequest
from antiphon.shared.parameters.context import AS_MANY_AS_FIT, check_text_size, fitted, num_bytes, text_bytes_max
from antiphon.shared.parameters.grammar import Grammar
from antiphon.shared.parameters.sampling import SamplingParams, check, check_vocabulary
from antiphon.shared.parameters.thinking import ThinkingBudget
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.choices import param_of_number

UTF8_BYTES_MAX = 4
"""Bytes of one character in UTF-8."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A tokenized request: its prompts with the number of their tokens, and its parameters with `bad_words` as ids."""

    prompts: list[Prompt]
    num_tokens: int
    params: SamplingParams


async def prepare(actor: RequestActor, parts: GatewayParts) -> None:
    """Has the prompts of a request tokenized and queues its sequences. Raises ServiceError, see `tokenize`.

    Runs in the request's task. While the gateway is disconnected from the bus, the request waits for a short time. If
    it has ended meanwhile, nothing is queued.
    """
    request, card = actor.request, actor.card
    try:
        if not parts.host.transport.connected:
            await parts.bus.connected()
        attached = list[Attachment]()
        for guest in actor.guests:
            attached += await guest.attachments()
        if actor.over:
            return
        tokenized = await tokenize(parts.clients, request, card, _block_size(parts, card), attached)
        _tell_cut(request, card, tokenized.prompts)
        if tokenized.params is not request.params:
            request = replace(request, params=tokenized.params)
        messages = RequestMessages(parts.host, request, card, tokenized.prompts)
        if candidates := actor.tokenized(messages, tokenized.num_tokens):
            parts.dispatcher.enqueue(candidates)
    finally:
        request.origin.caller.prepared()


def _block_size(parts: GatewayParts, card: ModelCard) -> int:
    """Returns the block size of the model's engines, in tokens; 0 if no engine is running."""
    for engine in parts.members.alive("engine", parts.host.clock.monotonic()):
        if model_of(engine) == card.served_by and (block_size := getattr(engine.status, "block_size", 0)):
            return block_size
    return 0


async def tokenize(
    clients: ServiceClients,
    request: GenerationRequest,
    card: ModelCard,
    block_size: int,
    attached: Sequence[Attachment] = (),
) -> Tokenized:
    """Returns the prompts of a request as token ids, and its parameters.

    `attached`: what its conversation has besides text.

    Raises ServiceError if a prompt is too long for the context or for its log probabilities, has no tokens or ids
    outside the vocabulary, if the chat template refuses the conversation, if the grammar cannot be used, or if all
    sequences together have too many tokens.
    """
    if not request.inputs.messages:
        _check_all_texts(request)
    prompts, bad_words, marks = await _converted(clients, request, card, block_size, attached)
    num_tokens = sum(prompt.num_tokens for prompt in prompts)
    count = request.num_sequences * num_tokens
    if count > limits.REQUEST_TOKENS_MAX:
        text = f"All sequences of the request would have {count} prompt tokens, more than {limits.REQUEST_TOKENS_MAX}."
        param = request.inputs.name(0) if request.pooling else param_of_number(request.n, request.num_sequences)
        raise ServiceError("invalid_value", f"{text} Reduce '{param}' or the prompts.", param=param)
    if request.params.grammar is not None:
        _check_grammar(request, request.params.grammar, len(prompts))
    for index, prompt in enumerate(prompts):
        if not prompt.packed:
            name = request.inputs.name(index)
            raise ServiceError("invalid_value", f"The text of '{name}' has no tokens.", param=name)
    if request.params.prompt_logprobs is not None:
        _check_prompt_logprobs(prompts, request.params.prompt_logprobs)
    params = request.params
    if bad_words:
        params = _with_bad_words(params, bad_words)
    if request.pending.thinking is not None:
        params = _with_thinking(params, request.pending.thinking, prompts[0].tail, marks)
    if params is not request.params:
        check_vocabulary(params, card.vocab_size)
    return Tokenized(prompts, num_tokens, params)


async def _converted(
    clients: ServiceClients,
    request: GenerationRequest,
    card: ModelCard,
    block_size: int,
    attached: Sequence[Attachment],
) -> tuple[list[Prompt], tuple[bytes, ...], tuple[bytes, ...]]:
    """Returns the prompts, and the packed token ids of the words in `bad_word_texts` and of the marks of reasoning."""
    given = list[Prompt]()
    for index, ids in enumerate(request.inputs.token_ids):
        given.append(_given(ids, request.inputs.name(index), request, card, block_size))
    if given and request.params.grammar is None and not request.pending.bad_word_texts:
        return given, (), ()
    if request.inputs.texts or request.inputs.conversations:
        replies = await _in_parts(clients, request, card, block_size, attached)
    else:
        replies = [await _tokenized(clients, request, card, block_size, attached)]
    return given or _prompts(replies, attached), replies[0].bad_words, replies[0].marks


async def _in_parts(
    clients: ServiceClients,
    request: GenerationRequest,
    card: ModelCard,
    block_size: int,
    attached: Sequence[Attachment],
) -> list[TokenizeReply]:
    """Returns the replies for all prompts, which go to tokenizers in several messages."""
    parts, replies = list(_parts(request)), list[TokenizeReply]()
    for first in range(0, len(parts), limits.TOKENIZE_REQUESTS_MAX):
        some = parts[first : first + limits.TOKENIZE_REQUESTS_MAX]
        replies += await asyncio.gather(*(_tokenized(clients, part, card, block_size, attached) for part in some))
    return replies


async def _tokenized(
    clients: ServiceClients,
    request: GenerationRequest,
    card: ModelCard,
    block_size: int,
    attached: Sequence[Attachment],
) -> TokenizeReply:
    message = tokenize_message(request, card, block_size)
    if attached:
        message = msgspec.structs.replace(message, images=tuple(one.tokens for one in attached))
    size, origin = request.inputs.num_characters, request.origin
    try:
        if size * UTF8_BYTES_MAX > message.text_bytes_max:
            _check_texts(message, card.max_model_len)
        reply = await clients.tokenizer(message, size, origin.trace_headers or None, origin.record.tokenizer_silent)
    except ServiceError as error:
        if error.param != "messages" or not request.inputs.names:
            raise
        # Errors of chat templates call every conversation `messages`.
        name = request.inputs.name(0)
        raise ServiceError(error.code, error.message, param=name, retry_after_s=error.retry_after_s) from None
    assert isinstance(reply, TokenizeReply)
    origin.record.tokenizer_answered(reply.tokenizer_id)
    return reply


async def tokenize_only(
    parts: GatewayParts, request: GenerationRequest, card: ModelCard, *, return_tokens: bool
) -> tuple[TokenizedPrompt, ...]:
    """Returns the prompts of a request that generates nothing. Raises ServiceError, see `tokenize`."""
    message = tokenize_message(request, card, 0, return_tokens=return_tokens)
    _check_texts(message, 0)
    guests = parts.guests.joining(request, card, None)
    try:
        attached = [one for guest in guests for one in await guest.attachments()]
        message = msgspec.structs.replace(message, images=tuple([one.tokens for one in attached]))
        reply = await parts.clients.tokenizer(message, request.inputs.num_characters, request.origin.trace_headers)
    finally:
        for guest in guests:
            guest.ended()
    assert isinstance(reply, TokenizeReply)
    return reply.prompts


def _prompts(replies: Sequence[TokenizeReply], attached: Sequence[Attachment]) -> list[Prompt]:
    return [
        Prompt(
            packed=one.token_ids,
            block_hashes=one.block_hashes,
            end_token_ids=reply.end_token_ids,
            tail=one.tail,
            images=_placed(attached, one) if attached else (),
            num_first_tokens=one.num_first_tokens,
        )
        for reply in replies
        for one in reply.prompts
    ]


def _placed(attached: Sequence[Attachment], prompt: TokenizedPrompt) -> tuple[PromptImage, ...]:
    return tuple(one.placed(start) for one, start in zip(attached, prompt.image_starts, strict=True))


def _tell_cut(request: GenerationRequest, card: ModelCard, prompts: list[Prompt]) -> None:
    """Tells the client if an output must end before its maximum of tokens, because of the context (`choice_params`)."""
    room = card.max_model_len - request.params.max_tokens
    for prompt in prompts if request.pooling is None else ():
        if prompt.num_tokens > room:
            request.origin.caller.ignore("max_tokens")
            return


def _check_grammar(request: GenerationRequest, grammar: Grammar, num_prompts: int) -> None:
    """Raises ServiceError if the copies of the grammar are too long together. Tells what the grammar does without."""
    if request.num_sequences * num_prompts * len(grammar.text.encode()) > limits.GRAMMARS_BYTES_MAX:
        text = f"is too long for {request.num_sequences * num_prompts} outputs: together at most"
        refuse(request.pending.grammar_param, f"{text} {limits.GRAMMARS_BYTES_MAX} bytes")
    for name in request.pending.grammar_ignored:
        request.origin.caller.ignore(f"{request.pending.grammar_param}.{name}")


def _needed(request: GenerationRequest) -> int:
    """Returns the number of output tokens for which a prompt must leave room; 0: for at least one."""
    is_cut = not request.origin.caller.refuses_long_outputs and request.inputs.truncate_prompt_tokens != AS_MANY_AS_FIT
    return 0 if is_cut else request.params.max_tokens


def _with_bad_words(params: SamplingParams, packed: tuple[bytes, ...]) -> SamplingParams:
    words = (*params.bad_words, *(tuple(unpack_ids(word)) for word in packed))
    return _checked(msgspec.structs.replace(params, bad_words=words))


def _with_thinking(
    params: SamplingParams, limit: ThinkingLimit, prompt_tail: str, marks: tuple[bytes, ...]
) -> SamplingParams:
    """Returns the parameters with the limit of reasoning. `marks`: the packed token ids of its marks."""
    opening, closing = (tuple(unpack_ids(mark)) for mark in marks)
    budget = ThinkingBudget(
        budget=limit.budget,
        opening=opening,
        closing=closing,
        inside=limit.begins_inside(prompt_tail),
        repeats=limit.repeats,
    )
    return _checked(msgspec.structs.replace(params, thinking=budget))


def _checked(params: SamplingParams) -> SamplingParams:
    """Returns the parameters, whose number of tokens may not be known yet (0). Raises ServiceError, see `check`."""
    check(params if params.max_tokens else msgspec.structs.replace(params, max_tokens=max(1, params.min_tokens)))
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
    inputs, pending, thinking = request.inputs, request.pending, request.pending.thinking
    may_exceed = not block_size or bool(inputs.truncate_prompt_tokens)
    return TokenizeRequest(
        request_id=request.request_id,
        model=card.served_by,
        prompts=inputs.texts,
        messages=inputs.messages,
        add_special_tokens=inputs.add_special_tokens,
        add_generation_prompt=inputs.add_generation_prompt,
        max_model_len=card.max_model_len if block_size else 0,
        max_tokens=_needed(request),
        block_size=block_size,
        cache_salt=request.cache_salt,
        return_tokens=return_tokens,
        bad_words=pending.bad_word_texts,
        grammar=request.params.grammar,
        grammar_param=pending.grammar_param,
        truncate_prompt_tokens=inputs.truncate_prompt_tokens,
        suffix=inputs.suffix,
        continue_final_message=inputs.continue_final_message,
        template_variables=inputs.template_variables,
        generates=request.pooling is None,
        prompt_names=inputs.names,
        second_prompts=inputs.second_texts,
        client=request.origin.client.name,
        text_bytes_max=text_bytes_max(card.max_model_len, may_exceed=may_exceed),
        marks=() if thinking is None else (thinking.opening, thinking.closing),
    )


def _check_all_texts(request: GenerationRequest) -> None:
    """Raises ServiceError for a suffix that, with each of many prompts, is more text than a request body can have."""
    if request.inputs.num_characters > limits.PROMPT_CHARS_MAX:
        message = f"With each of the prompts, 'suffix' makes more than {limits.PROMPT_CHARS_MAX} characters of text."
        raise ServiceError("request_too_large", message, param="suffix")


def _check_texts(message: TokenizeRequest, max_model_len: int) -> None:
    """Raises ServiceError for a text that is larger than the message allows. `max_model_len` 0: see `check_text_size`.

    A chat template may leave out a part of the conversation, such as earlier reasoning. So a conversation may be larger
    than its text, which the tokenizer checks.
    """
    if message.truncate_prompt_tokens:
        max_model_len = 0
    if message.messages:
        size = len(message.template_variables)
        for one in message.messages:
            size += num_bytes(one.content) + len(one.fields)
        most = max(message.text_bytes_max, limits.TEXT_BYTES_COUNTED)
        check_text_size(size, most, max_model_len, "messages")
    suffix = num_bytes(message.suffix)
    for index, text in enumerate(message.prompts):
        size = num_bytes(text) + suffix
        if message.second_prompts:
            size += num_bytes(message.second_prompts[index])
        name = message.prompt_names[index] if message.prompt_names else "prompt"
        check_text_size(size, message.text_bytes_max, max_model_len, name)


def _parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    """Splits the request into parts with as many prompts as one `TokenizeRequest` may have."""
    inputs = request.inputs
    for messages in inputs.conversations:
        yield replace(request, inputs=replace(inputs, messages=messages, conversations=()))
    first, sizes = 0, list(map(len, inputs.texts))
    for index, second in enumerate(inputs.second_texts):
        sizes[index] += len(second)
    while first < len(sizes):
        end = first + _num_fitting(sizes[first : first + limits.PROMPTS_MAX], len(inputs.suffix))
        part = slice(first, end)
        some = replace(
            inputs, texts=inputs.texts[part], second_texts=inputs.second_texts[part], names=inputs.names[part]
        )
        yield replace(request, inputs=some)
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
    keep, generates = request.inputs.truncate_prompt_tokens, request.pooling is None
    ids, _ = fitted(ids, keep, _needed(request), card.max_model_len, name, generates=generates)
    packed = pack_ids(ids)
    return Prompt(
        packed=packed, block_hashes=chain_hashes(packed, block_size, request.cache_salt) if block_size else b""
    )
