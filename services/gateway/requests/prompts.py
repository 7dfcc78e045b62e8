"""Prepares a request's prompts as token ids (tokenizers convert text) and the sampling parameters of its sequences."""

from dataclasses import dataclass

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.requests.service_clients import ServiceClients
from shared.blocks import chain_hashes
from shared.codec import TOKEN_BYTES, pack_ids
from shared.context import check_context
from shared.errors import ServiceError
from shared.messages import TokenizeReply, TokenizeRequest
from shared.request.rules import choice_params
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `packed`: its token ids as little-endian u32; `block_hashes`: the chain over its full blocks.

    `tail`: the last characters of a rendered conversation; empty for other prompts.
    """

    packed: bytes
    block_hashes: bytes
    tail: str = ""

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
        return [_given(ids, request, card, block_size) for ids in request.token_ids]
    message = tokenize_message(request, card, block_size)
    reply = await peers.tokenizer(message, text_size(request), request.trace_headers)
    assert isinstance(reply, TokenizeReply)
    prompts = [Prompt(prompt.token_ids, prompt.block_hashes, prompt.tail) for prompt in reply.prompts]
    if not all(prompt.num_tokens for prompt in prompts):
        raise ServiceError("invalid_value", "The prompt has no tokens.", param="prompt")
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
        request.continue_final_message,
        request.template_variables,
    )


def text_size(request: GenerationRequest) -> int:
    """Returns the number of characters to tokenize."""
    conversation = sum(len(message.content) + len(message.fields) for message in request.messages)
    return sum(map(len, request.texts)) + conversation + len(request.template_variables)


def sequence_params(params: SamplingParams, choice: int, num_prompt_tokens: int, card: ModelCard) -> SamplingParams:
    """Returns the parameters of one choice: with its own seed, and with `max_tokens` filled in if that is 0."""
    return choice_params(params, choice, card.max_model_len - num_prompt_tokens)


def _given(ids: tuple[int, ...], request: GenerationRequest, card: ModelCard, block_size: int) -> Prompt:
    if not ids:
        raise ServiceError("invalid_value", "'prompt' must not be empty.", param="prompt")
    bad = next((i for i in ids if not 0 <= i < card.vocab_size), None)
    if bad is not None:
        raise ServiceError(
            "invalid_value", f"'prompt' holds the token id {bad}, outside the vocabulary.", param="prompt"
        )
    check_context(len(ids), request.params.max_tokens, card.max_model_len, "prompt")
    packed = pack_ids(ids)
    return Prompt(packed, chain_hashes(packed, block_size, request.cache_salt) if block_size else b"")
