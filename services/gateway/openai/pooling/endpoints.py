"""The endpoints `/v1/embeddings`, `/v1/score` and `/v1/rerank`: decode a body, run the request, encode the answer."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.generation import Backend, GenerationRequest, ModelCard
from services.gateway.http import request_body
from services.gateway.http.json_response import encoded_response
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai import unsupported_params
from services.gateway.openai.body import read_body, read_fields
from services.gateway.openai.pooling import answers, requests, schemas
from services.gateway.openai.pooling.runner import Pooled, run
from services.gateway.openai.request_context import Arrival
from shared.request.checks import given

B = TypeVar("B", bound=schemas.PoolingFields)
T = TypeVar("T")
Prefix = Literal["embd", "score", "rerank"]
_TURN = 32
"""Number of vectors that are scored or encoded before other requests get a turn; each takes up to a millisecond."""


class PoolingEndpoints:
    """The endpoints whose answers are made of vectors."""

    def __init__(self, backend: Backend, metrics: GatewayMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def embeddings(self, request: Request) -> Response:
        """Answers with a vector for each input."""
        body, head, found = await self._pooled(request, schemas.EMBEDDING_DECODER, requests.embeddings, "embd")
        items = await _in_turns(answers.embedding_items(found.vectors, given(body.encoding_format, "float")))
        return encoded_response(answers.embeddings(head, items, found.num_tokens))

    async def score(self, request: Request) -> Response:
        """Answers with the similarity of each pair of texts: the cosine of their vectors."""
        body, head, found = await self._pooled(request, schemas.SCORE_DECODER, requests.score, "score")
        num_first = 1 if isinstance(body.text_1, str) else len(body.text_1 or ())
        values = await _in_turns(answers.cosines(found.vectors[:num_first], found.vectors[num_first:]))
        return encoded_response(answers.scores(head, values, found.num_tokens))

    async def rerank(self, request: Request) -> Response:
        """Answers with the documents that match a query best: those whose vectors have the largest cosines with it."""
        body, head, found = await self._pooled(request, schemas.RERANK_DECODER, requests.rerank, "rerank")
        values = await _in_turns(answers.cosines(found.vectors[:1], found.vectors[1:]))
        documents = requests.document_texts(body) if given(body.return_documents, True) else None
        return encoded_response(answers.ranking(head, values, found.num_tokens, body.top_n, documents))

    async def _pooled(
        self,
        request: Request,
        decoder: "msgspec.json.Decoder[B]",
        convert: Callable[[B, ModelCard, str], GenerationRequest],
        prefix: Prefix,
    ) -> tuple[B, dict[str, Any], Pooled]:
        """Returns the body of a request, the beginning of its answer, and the vectors of its texts."""
        arrival = Arrival.now()
        data = await request_body.read(request.scope["headers"], request.receive)
        unsupported_params.check(read_fields(data), decoder.type)
        body = read_body(data, decoder)
        card = self._backend.resolve_model(body.model)
        wanted = convert(body, card, request.state.request_id)
        found = await run(self._backend, self._metrics, wanted, arrival, request.headers, request.receive)
        return body, answers.head(prefix, request.state.request_id, arrival.created, card.name), found


async def _in_turns(items: Iterator[T]) -> list[T]:
    """Returns all items. Lets other requests run from time to time."""
    found: list[T] = []
    for item in items:
        found.append(item)
        if len(found) % _TURN == 0:
            await asyncio.sleep(0)
    return found
