"""The recorded outputs of a request with the text of each token, for people who choose a token to fork from."""

from typing import Any

from antiphon.services.gateway.guests.replay.rerun import check_repeatable
from antiphon.services.gateway.path.generation import Backend, ModelCard
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.recorded_request import RecordedContent


async def output_of(backend: Backend, content: RecordedContent, card: ModelCard) -> dict[str, Any]:
    """Returns the answer of `GET /v1/requests/{id}/output`. Raises ServiceError without a tokenizer.

    `texts` has the text of each token inside a longer text, U+FFFD for a part of a character; it is empty if
    the request's outputs were not text. `refusal`: why the request can be neither replayed nor forked; None if it can.
    """
    params = content.params
    return {
        "object": "request.output",
        "id": content.request_id,
        "model": content.model,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "max_tokens": params.max_tokens or None,
        "refusal": _refusal(content, card),
        "is_beam_search": params.beam is not None,
        "sequences": [
            {
                "index": index,
                "num_prompt_tokens": len(content.prompts[index // content.num_sequences].token_ids),
                "num_begun": len(content.begun),
                "finish_reason": one.finish_reason,
                "engines": one.engines,
                "token_ids": one.token_ids,
                "texts": await _texts(backend, card, one.token_ids) if content.detokenize else [],
            }
            for index, one in enumerate(content.sequences)
        ],
    }


async def _texts(backend: Backend, card: ModelCard, token_ids: list[int]) -> list[str]:
    texts: list[str] = []
    for at in range(0, len(token_ids), limits.TOKENIZER_INLINE_TOKENS_MAX):
        part = tuple(token_ids[at : at + limits.TOKENIZER_INLINE_TOKENS_MAX])
        texts.extend(await backend.token_texts(card.name, part))
    return texts


def _refusal(content: RecordedContent, card: ModelCard) -> str | None:
    try:
        check_repeatable(content, card)
    except ServiceError as error:
        return error.message
    return None
