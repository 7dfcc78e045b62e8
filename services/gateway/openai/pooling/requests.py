"""Converts the bodies to requests with pooling: defaults, ranges, limits. Every error names the parameter. Pure."""

from collections.abc import Sequence

from services.gateway.generation import GenerationRequest, ModelCard
from services.gateway.openai.bodies.parameters import check_priority, check_tier, prompts
from services.gateway.openai.pooling.schemas import (
    ClassifyBody,
    EmbeddingBody,
    PoolingFields,
    RerankBody,
    ScoreBody,
    TextFields,
)
from shared import limits
from shared.errors import ServiceError
from shared.parameters import pooling
from shared.parameters.pooling import POOLING_KINDS, PoolingKind, PoolingParams
from shared.parameters.sampling import SamplingParams
from shared.request import rules
from shared.request.checks import given, missing, refuse

ENCODINGS = ("float", "base64")
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Placeholder: a pooling sequence samples no tokens."""


def embeddings(body: EmbeddingBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/v1/embeddings`. Raises ServiceError naming the first parameter that is wrong."""
    texts, token_ids = prompts(body.input, card.vocab_size, "input", limits.EMBEDDING_INPUTS_MAX)
    if given(body.encoding_format, "float") not in ENCODINGS:
        refuse("encoding_format", f"must be one of {', '.join(ENCODINGS)}")
    params = PoolingParams(_kind(body), given(body.normalize, True), body.dimensions)
    return _request(body, card, request_id, params, texts, names_of("input", texts or token_ids), token_ids)


def classify(body: ClassifyBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/classify`. Raises ServiceError naming the first parameter that is wrong."""
    texts, token_ids = prompts(body.input, card.vocab_size, "input", limits.EMBEDDING_INPUTS_MAX)
    params = PoolingParams(classify=True, activate=given(body.use_activation, True))
    return _request(body, card, request_id, params, texts, names_of("input", texts or token_ids), token_ids)


def score(body: ScoreBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/v1/score`. Its prompts are all texts of `text_1`, then all texts of `text_2`.

    For a model with a classification head the prompts are the pairs, in order.

    Raises ServiceError naming the first parameter that is wrong.
    """
    first, second = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
    if len(first) not in (1, len(second)):
        refuse("text_1", f"must be one text or as many as 'text_2' ({len(second)})")
    if card.labels:
        pairs = first * (len(second) // len(first)), second
        return _of_pairs(body, body.use_activation, card, request_id, pairs, names_of("text_2", second))
    _check_activation(body.use_activation)
    names = (*names_of("text_1", first), *names_of("text_2", second))
    return _request(body, card, request_id, PoolingParams(_kind(body)), (*first, *second), names)


def rerank(body: RerankBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/v1/rerank`. Its prompts are the query, then the documents.

    For a model with a classification head the prompts are pairs of the query and a document.

    Raises ServiceError naming the first parameter that is wrong.
    """
    if body.query is None:
        missing("query")
    texts = document_texts(body)
    if body.top_n is not None and body.top_n < 1:
        refuse("top_n", "must be at least 1")
    if card.labels:
        pairs = (body.query,) * len(texts), texts
        return _of_pairs(body, body.use_activation, card, request_id, pairs, names_of("documents", texts))
    _check_activation(body.use_activation)
    names = ("query", *names_of("documents", texts))
    return _request(body, card, request_id, PoolingParams(_kind(body)), (body.query, *texts), names)


def document_texts(body: RerankBody) -> tuple[str, ...]:
    """Returns the texts of the documents. Raises ServiceError if there are none or too many."""
    if body.documents is None:
        missing("documents")
    _check_number(body.documents, "documents")
    return tuple(each if isinstance(each, str) else each.text for each in body.documents)


def names_of(field: str, items: Sequence[object]) -> tuple[str, ...]:
    """Returns the names of a list's items, for errors: `field[0]` and so on; `field` alone for a single item."""
    return tuple(f"{field}[{index}]" for index in range(len(items))) if len(items) > 1 else (field,)


def _of_pairs(
    body: PoolingFields,
    use_activation: bool | None,
    card: ModelCard,
    request_id: str,
    pairs: tuple[tuple[str, ...], tuple[str, ...]],
    names: tuple[str, ...],
) -> GenerationRequest:
    """Returns the request of pairs of texts for a model with a classification head. `names`: see `_request`."""
    if body.pooling is not None:
        refuse("pooling", "has no meaning for a model with a classification head: leave it out")
    if len(card.labels) > 1:
        message = f"Scores need a classification head with one label, and this one has {len(card.labels)}: "
        raise ServiceError("unsupported_parameter", message + "send the texts to /classify.", param="model")
    params = PoolingParams(classify=True, activate=given(use_activation, True))
    return _request(body, card, request_id, params, pairs[0], names, second_texts=pairs[1])


def _check_activation(use_activation: bool | None) -> None:
    if use_activation is not None:
        refuse("use_activation", "is for models with a classification head, and this one has none: leave it out")


def _request(
    body: TextFields,
    card: ModelCard,
    request_id: str,
    params: PoolingParams,
    texts: tuple[str, ...],
    names: tuple[str, ...],
    token_ids: tuple[tuple[int, ...], ...] = (),
    *,
    second_texts: tuple[str, ...] = (),
) -> GenerationRequest:
    """`names`: the name of each prompt in the user's request. `second_texts`: see `GenerationRequest`."""
    pooling.check(params, card.embedding_size, len(card.labels))
    return GenerationRequest(
        request_id=request_id,
        model=card.name,
        params=_PARAMS,
        texts=texts,
        token_ids=token_ids,
        add_special_tokens=given(body.add_special_tokens, True),
        priority=check_priority(body.priority),
        service_tier=check_tier(body.service_tier),
        pooling=params,
        prompt_names=names,
        second_texts=second_texts,
        truncate_prompt_tokens=rules.pooling_truncation(body.truncate_prompt_tokens, card.max_model_len),
    )


def _kind(body: PoolingFields) -> PoolingKind | None:
    for kind in POOLING_KINDS:
        if kind == body.pooling:
            return kind
    if body.pooling is not None:
        refuse("pooling", f"must be one of {', '.join(POOLING_KINDS)}")
    return None


def _texts(value: str | list[str] | None, param: str) -> tuple[str, ...]:
    if value is None:
        missing(param)
    texts = (value,) if isinstance(value, str) else tuple(value)
    _check_number(texts, param)
    return texts


def _check_number(items: Sequence[object], param: str) -> None:
    if not 1 <= len(items) <= limits.EMBEDDING_INPUTS_MAX:
        refuse(param, f"must hold between 1 and {limits.EMBEDDING_INPUTS_MAX} items")
