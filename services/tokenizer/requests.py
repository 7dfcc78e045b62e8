"""Checks tokenize and detokenize requests and builds their replies, without asyncio and the bus. Pure."""

from collections.abc import Sequence
from functools import partial

import msgspec

from antiphon.shared import limits
from antiphon.shared.blocks import chain_hashes
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizedPrompt,
    TokenizeReply,
    TokenizeRequest,
)
from antiphon.shared.parameters.context import check_context, check_text_size, fitted, num_bytes
from antiphon.shared.request.images import with_image_texts, with_images
from antiphon.shared.text.bad_words import bad_word_ids
from antiphon.shared.text.codec import Codec, EncodedPair
from antiphon.shared.text.templates.turns import known_ids


def check_model(model: str, served: str) -> None:
    """Raises ServiceError('model_not_found') if `model` is neither '' nor the served model."""
    if model not in ("", served):
        raise ServiceError("model_not_found", f"The model '{model}' does not exist.", param="model")


def check_request(request: TokenizeRequest) -> None:
    """Raises ServiceError for a request without text, with too many prompts, or with too much text."""
    needs_no_text = bool(request.bad_words) or request.grammar is not None
    if bool(request.prompts) == bool(request.messages) and (request.messages or not needs_no_text):
        raise ServiceError("missing_required_parameter", "Give either a prompt or messages.", param=field(request))
    if request.second_prompts and len(request.second_prompts) != len(request.prompts):
        raise ServiceError("invalid_value", "A pair of texts has two texts.", param=field(request))
    if len(request.prompts) > limits.PROMPTS_MAX or len(request.messages) > limits.MESSAGES_MAX:
        count = max(len(request.prompts), len(request.messages))
        raise ServiceError("request_too_large", f"'{field(request)}' has {count} items.", param=field(request))
    if num_characters(request) > limits.PROMPT_CHARS_MAX:
        raise ServiceError(
            "request_too_large", f"The text is longer than {limits.PROMPT_CHARS_MAX} characters.", param=field(request)
        )


def field(request: TokenizeRequest) -> str:
    """Returns the name of the field of the user's request that holds the text: `messages` or `prompt`."""
    return "messages" if request.messages else "prompt"


def prompt_name(request: TokenizeRequest, index: int) -> str:
    """Returns the field of the user's request that contains one of the prompts."""
    return request.prompt_names[index] if request.prompt_names else field(request)


def check_rendered(request: TokenizeRequest, text: str, param: str) -> None:
    """Raises ServiceError for a text of a chat template that is larger than the request allows."""
    if request.text_bytes_max:
        is_cut = bool(request.truncate_prompt_tokens)
        check_text_size(num_bytes(text), request.text_bytes_max, 0 if is_cut else request.max_model_len, param)


def num_characters(request: TokenizeRequest) -> int:
    """Returns the number of characters to tokenize, including fields and variables that a chat template may render."""
    conversation = sum(len(message.content) + len(message.fields) for message in request.messages)
    texts = sum(map(len, (*request.prompts, *request.second_prompts, *request.bad_words, *request.marks)))
    texts += len(request.suffix) * len(request.prompts)
    return texts + conversation + len(request.template_variables)


def tokenize(codec: Codec, request: TokenizeRequest, texts: tuple[str, ...]) -> TokenizeReply:
    """Returns the reply for `texts`: the request's prompts, or its rendered conversation.

    Raises ServiceError('context_length_exceeded').
    """
    special = request.add_special_tokens
    if request.second_prompts:
        return _pairs(codec, request)
    if request.images:
        texts = (with_image_texts(texts[0], request.images),)
    if request.suffix:
        encoded = codec.encode_infill(texts, request.suffix, add_special_tokens=special)
    else:
        # For pooling the first tokens of a text are kept, for generation the last tokens of the prompt.
        first = 0 if request.generates else request.truncate_prompt_tokens
        encoded = codec.encode(texts, add_special_tokens=special, keep=first)
    tail = texts[0][-limits.PROMPT_TAIL_CHARS :] if request.messages else ""
    found = [_fitted(request, index, token_ids) for index, token_ids in enumerate(encoded)]
    prompts = [_tokenized(codec, request, token_ids, tail, starts) for token_ids, starts in found]
    bad_words = tuple(map(pack_ids, bad_word_ids(codec, request.bad_words)))
    marks = codec.encode(request.marks, add_special_tokens=False) if request.marks else []
    ends = codec.infill_end_ids if request.suffix else ()
    return TokenizeReply(
        request_id=request.request_id,
        prompts=tuple(prompts),
        bad_words=bad_words,
        end_token_ids=ends,
        marks=tuple(map(pack_ids, marks)),
    )


def _fitted(request: TokenizeRequest, index: int, token_ids: list[int]) -> tuple[list[int], tuple[int, ...]]:
    """Returns a prompt cut, and with its images in their places. Raises ServiceError('context_length_exceeded')."""
    room = request.truncate_prompt_tokens, request.max_tokens, request.max_model_len
    place = partial(with_images, images=request.images) if request.images else None
    return fitted(token_ids, *room, prompt_name(request, index), generates=request.generates, place=place)


def _pairs(codec: Codec, request: TokenizeRequest) -> TokenizeReply:
    """Returns the reply for pairs of texts, which only pooling requests have.

    Raises ServiceError('context_length_exceeded').
    """
    special, keep = request.add_special_tokens, request.truncate_prompt_tokens
    return pairs_reply(codec, request, codec.encode_pairs(pairs(request), add_special_tokens=special, keep=keep))


def pairs(request: TokenizeRequest) -> list[tuple[str, str]]:
    """Returns the pairs of texts of a request."""
    return list(zip(request.prompts, request.second_prompts, strict=True))


def pairs_reply(codec: Codec, request: TokenizeRequest, encoded: Sequence[EncodedPair]) -> TokenizeReply:
    """Returns the reply for encoded pairs of texts. Raises ServiceError('context_length_exceeded')."""
    prompts: list[TokenizedPrompt] = []
    for index, pair in enumerate(encoded):
        check_context(len(pair.token_ids), 0, request.max_model_len, prompt_name(request, index), generates=False)
        prompt = _tokenized(codec, request, pair.token_ids, "", ())
        prompts.append(msgspec.structs.replace(prompt, num_first_tokens=pair.num_first))
    return TokenizeReply(request_id=request.request_id, prompts=tuple(prompts))


def detokenize(codec: Codec, request: DetokenizeRequest) -> DetokenizeReply:
    """Returns the text of the request's tokens, including special tokens; on request also each token's text.

    Raises ServiceError for ids outside the vocabulary.
    """
    token_ids = known_ids(codec, request.token_ids, "tokens")
    texts = tuple(map(codec.token_text, token_ids)) if request.return_tokens else ()
    return DetokenizeReply(request.request_id, codec.decode(token_ids), texts)


def num_tokens(reply: TokenizeReply) -> int:
    """Returns the number of tokens in all prompts of a reply."""
    return sum(len(prompt.token_ids) for prompt in reply.prompts) // 4


def _tokenized(
    codec: Codec, request: TokenizeRequest, token_ids: list[int], tail: str, starts: tuple[int, ...]
) -> TokenizedPrompt:
    packed, hashes = pack_ids(token_ids), b""
    if request.block_size > 0:
        images = tuple(zip(starts, (image.key for image in request.images), strict=True))
        hashes = chain_hashes(packed, request.block_size, request.cache_salt, images)
    texts = tuple(map(codec.vocabulary_text, token_ids)) if request.return_tokens else ()
    return TokenizedPrompt(token_ids=packed, block_hashes=hashes, tokens=texts, tail=tail, image_starts=starts)
