"""Prepares a request's prompts as token ids (tokenizers convert text) and the sampling parameters of its sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.requests.service_clients import ServiceClients
from shared import limits
from shared.blocks import chain_hashes
from shared.codec import TOKEN_BYTES, pack_ids
from shared.context import check_context
from shared.errors import ServiceError
from shared.messages import TokenizeReply, TokenizeRequest
from shared.request.rules import choice_params
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `packed`: its token ids as little-endian u32; `block_hashes`: the chain over its full blocks."""

    packed: bytes
    block_hashes: bytes

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.packed) // TOKEN_BYTES


async def prepare(peers: ServiceClients, request: GenerationRequest, card: ModelCard, block_size: int) -> list[Prompt]:
    """Returns the prompts of a request as token ids.

    Raises ServiceError if a prompt is too long for the context, has no tokens or ids outside the vocabulary, or if the
    chat template refuses the conversation.
    """
    if request.token_ids:
        names = map(request.prompt_name, range(request.num_prompts))
        given = zip(request.token_ids, names, strict=True)
        return [_given(ids, name, request, card, block_size) for ids, name in given]
    prompts: list[Prompt] = []
    for part in _parts(request):
        message = tokenize_message(part, card, block_size)
        reply = await peers.tokenizer(message, text_size(part), request.trace_headers)
        assert isinstance(reply, TokenizeReply)
        prompts += [Prompt(prompt.token_ids, prompt.block_hashes) for prompt in reply.prompts]
    for index, prompt in enumerate(prompts):
        if not prompt.num_tokens:
            name = request.prompt_name(index)
            raise ServiceError("invalid_value", f"The text of '{name}' has no tokens.", param=name)
    return prompts


def tokenize_message(
    request: GenerationRequest, card: ModelCard, block_size: int, *, return_tokens: bool = False
) -> TokenizeRequest:
    """Returns the request to the tokenizers. With `block_size` 0 there are no block hashes and no context check."""
    return TokenizeRequest(
        request.request_id,
        card.name,
        request.texts,
        request.messages,
        request.add_special_tokens,
        request.add_generation_prompt,
        card.max_model_len if block_size else 0,
        request.params.max_tokens,
        block_size,
        request.cache_salt,
        return_tokens,
        request.pooling is None,
        request.prompt_names,
    )


def text_size(request: GenerationRequest) -> int:
    """Returns the number of characters to tokenize."""
    return sum(map(len, request.texts)) + sum(len(message.content) for message in request.messages)


def sequence_params(params: SamplingParams, choice: int, num_prompt_tokens: int, card: ModelCard) -> SamplingParams:
    """Returns the parameters of one choice: with its own seed, and with `max_tokens` filled in if that is 0."""
    return choice_params(params, choice, card.max_model_len - num_prompt_tokens)


def _parts(request: GenerationRequest) -> Iterator[GenerationRequest]:
    """Yields the request with some of its texts at a time: as many as one `TokenizeRequest` may have."""
    if request.messages:
        yield request
    first, texts = 0, request.texts
    while first < len(texts):
        end = first + _num_fitting(texts[first : first + limits.PROMPTS_MAX])
        yield replace(request, texts=texts[first:end], prompt_names=request.prompt_names[first:end])
        first = end


def _num_fitting(texts: Sequence[str]) -> int:
    """Returns how many of the first texts have at most TOKENIZE_CHARS_MAX characters together; at least one."""
    size = 0
    for number, text in enumerate(texts):
        size += len(text)
        if number and size > limits.TOKENIZE_CHARS_MAX:
            return number
    return len(texts)


def _given(ids: tuple[int, ...], name: str, request: GenerationRequest, card: ModelCard, block_size: int) -> Prompt:
    if not ids:
        raise ServiceError("invalid_value", f"'{name}' must not be empty.", param=name)
    bad = next((i for i in ids if not 0 <= i < card.vocab_size), None)
    if bad is not None:
        raise ServiceError("invalid_value", f"'{name}' holds the token id {bad}, outside the vocabulary.", param=name)
    generates = request.pooling is None
    check_context(len(ids), request.params.max_tokens, card.max_model_len, name, generates=generates)
    packed = pack_ids(ids)
    return Prompt(packed, chain_hashes(packed, block_size, request.cache_salt) if block_size else b"")
