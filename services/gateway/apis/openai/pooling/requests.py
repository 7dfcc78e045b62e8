"""Converts the bodies to requests with pooling: defaults, ranges, limits. Every error names the parameter. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.bodies.parameters import check_priority, check_tier, prompts
from antiphon.services.gateway.apis.openai.pooling.schemas import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    PoolingFields,
    RerankBody,
    ScoreBody,
    TextFields,
)
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard, PromptInputs
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters import pooling
from antiphon.shared.parameters.pooling import POOLING_KINDS, PoolingKind, PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.request import checks
from antiphon.shared.request.checks import given, missing, refuse

ENCODINGS = ("float", "base64")
_DTYPES = ("float32", "float16")
_ORDERS = ("little", "big", "native")
_TEI = ("return_text", "raw_scores", "truncate")
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
"""Placeholder: a pooling sequence samples no tokens."""


def embeddings(body: EmbeddingBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/v1/embeddings`. Raises ServiceError naming the first parameter that is wrong."""
    texts, token_ids = prompts(body.input, card.vocab_size, "input", limits.EMBEDDING_INPUTS_MAX)
    if given(body.encoding_format, "float") not in ENCODINGS:
        refuse("encoding_format", f"must be one of {', '.join(ENCODINGS)}")
    for name, value, values in (("embed_dtype", body.embed_dtype, _DTYPES), ("endianness", body.endianness, _ORDERS)):
        if value is not None and value not in values:
            refuse(name, f"must be one of {', '.join(values)}")
    params = PoolingParams(kind=_kind(body), normalize=given(body.normalize, True), dimensions=body.dimensions)
    return _request(body, card, request_id, params, texts, names_of("input", texts or token_ids), token_ids)


def encoding(body: EmbeddingBody) -> str:
    """Returns how the numbers of a checked request are written: `float`, or the `struct` code of their bytes."""
    if given(body.encoding_format, "float") == "float":
        return "float"
    order = {"little": "<", "big": ">", "native": "="}[given(body.endianness, "little")]
    return order + {"float32": "f", "float16": "e"}[given(body.embed_dtype, "float32")]


def pooling_of(body: PoolingBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/pooling`. Raises ServiceError naming the first parameter that is wrong."""
    if given(body.task, "embed") != "embed":
        refuse("task", "must be 'embed'; labels are at /classify, scores at /v1/score")
    return embeddings(body, card, request_id)


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
    return _request(body, card, request_id, PoolingParams(kind=_kind(body)), (*first, *second), names)


def rerank(body: RerankBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/v1/rerank`. Its prompts are the query, then the documents.

    For a model with a classification head the prompts are pairs of the query and a document.

    Raises ServiceError naming the first parameter that is wrong.
    """
    query = body.query
    if query is None:
        missing("query")
    body, texts = _from_tei(body, card), document_texts(body)
    named = names_of("documents" if body.texts is None else "texts", texts)
    if body.top_n is not None and body.top_n < 1:
        refuse("top_n", "must be at least 1")
    if card.labels:
        pairs = (query,) * len(texts), texts
        return _of_pairs(body, body.use_activation, card, request_id, pairs, named)
    _check_activation(body.use_activation)
    return _request(body, card, request_id, PoolingParams(kind=_kind(body)), (query, *texts), ("query", *named))


def _from_tei(body: RerankBody, card: ModelCard) -> RerankBody:
    """Returns a body with the fields of TEI's form under their names here. Raises ServiceError."""
    if body.texts is None:
        for name in _TEI:
            if getattr(body, name) is not None:
                refuse(name, "needs 'texts'")
        return body
    if body.documents is not None:
        refuse("texts", "cannot be given together with 'documents'")
    changes: dict[str, object] = {"use_activation": False} if body.raw_scores and card.labels else {}
    if body.truncate:
        changes["truncate_prompt_tokens"] = -1
    return replace(body, **changes)


def document_texts(body: RerankBody) -> tuple[str, ...]:
    """Returns the texts of the documents. Raises ServiceError if there are none or too many."""
    if body.texts is not None:
        _check_number(body.texts, "texts")
        return tuple(body.texts)
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
    """`names`: the name of each prompt in the user's request. `second_texts`: see `PromptInputs`."""
    pooling.check(params, card.embedding_size, len(card.labels))
    return GenerationRequest(
        request_id=request_id,
        model=card.name,
        params=_PARAMS,
        inputs=PromptInputs(
            texts=texts,
            token_ids=token_ids,
            second_texts=second_texts,
            names=names,
            add_special_tokens=given(body.add_special_tokens, True),
            truncate_prompt_tokens=checks.pooling_truncation(body.truncate_prompt_tokens, card.max_model_len),
        ),
        priority=check_priority(body.priority),
        service_tier=check_tier(body.service_tier),
        pooling=params,
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
