"""The endpoints for embeddings, labels, scores and reranking: decode a body, run the request, encode the answer."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.openai.bodies import request_fields
from antiphon.services.gateway.apis.openai.bodies.request_fields import FieldRules
from antiphon.services.gateway.apis.openai.pooling import answers, requests, schemas
from antiphon.services.gateway.apis.openai.pooling.runner import Pooled, run
from antiphon.services.gateway.apis.openai.request_context import Arrival
from antiphon.services.gateway.edge.http import request_body
from antiphon.services.gateway.edge.http.json_response import encoded_response
from antiphon.services.gateway.edge.metrics import GatewayMetrics
from antiphon.services.gateway.path.generation import Backend, GenerationRequest, ModelCard
from antiphon.shared.request.checks import given

B = TypeVar("B", bound=schemas.TextFields)
T = TypeVar("T")
_TURN = 32
"""Number of vectors that are scored or encoded before the event loop runs other tasks; each takes up to 1 ms."""


@dataclass(frozen=True, slots=True)
class _Asked(Generic[B]):
    """A request that has been run. `head`: the first members of its answer."""

    body: B
    card: ModelCard
    head: dict[str, Any]
    found: Pooled

    def scores(self, num_first: int) -> Iterator[float]:
        """Returns the score of each pair.

        Without a classification head, the first `num_first` vectors are paired with the vectors after them.
        """
        if self.card.labels:
            return answers.first_numbers(self.found.vectors)
        return answers.cosines(self.found.vectors[:num_first], self.found.vectors[num_first:])


class PoolingEndpoints:
    """The endpoints whose answers are made of vectors."""

    def __init__(self, backend: Backend, metrics: GatewayMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def embeddings(self, request: Request) -> Response:
        """Answers with a vector for each input."""
        asked = await self._pooled(request, schemas.EMBEDDING_DECODER, requests.embeddings, "embd")
        items = await in_turns(answers.embedding_items(asked.found.vectors, requests.encoding(asked.body)))
        return encoded_response(answers.embeddings(asked.head, items, asked.found.num_tokens))

    async def pooling(self, request: Request) -> Response:
        """Answers with a vector for each input, in the form of vLLM's /pooling."""
        asked = await self._pooled(request, schemas.POOLING_DECODER, requests.pooling_of, "pool")
        encoding = requests.encoding(asked.body)
        items = await in_turns(answers.embedding_items(asked.found.vectors, encoding, "pooling", "data"))
        return encoded_response(answers.embeddings(asked.head, items, asked.found.num_tokens))

    async def classify(self, request: Request) -> Response:
        """Answers with the label of each input, and the model's value for each label."""
        asked = await self._pooled(request, schemas.CLASSIFY_DECODER, requests.classify, "classify")
        items = await in_turns(answers.label_items(asked.found.vectors, asked.card.labels))
        return encoded_response(answers.labelled(asked.head, items, asked.found.num_tokens))

    async def score(self, request: Request) -> Response:
        """Answers with a score for each pair: the cosine of the vectors, or the output of a classification head."""
        asked = await self._pooled(request, schemas.SCORE_DECODER, requests.score, "score", schemas.SCORE_RULES)
        num_first = 1 if isinstance(asked.body.text_1, str) else len(asked.body.text_1 or ())
        values = await in_turns(asked.scores(num_first))
        return encoded_response(answers.scores(asked.head, values, asked.found.num_tokens))

    async def rerank(self, request: Request) -> Response:
        """Answers with the documents that match a query best: those with the highest scores."""
        asked = await self._pooled(request, schemas.RERANK_DECODER, requests.rerank, "rerank")
        values = await in_turns(asked.scores(1))
        if asked.body.texts is not None:
            shown = asked.body.texts if asked.body.return_text else None
            return encoded_response(answers.tei_ranking(values, asked.body.top_n, shown))
        documents = requests.document_texts(asked.body) if given(asked.body.return_documents, True) else None
        body = answers.ranking(asked.head, values, asked.found.num_tokens, asked.body.top_n, documents)
        return encoded_response(body)

    async def _pooled(
        self,
        request: Request,
        decoder: "msgspec.json.Decoder[B]",
        convert: Callable[[B, ModelCard, str], GenerationRequest],
        prefix: answers.Prefix,
        rules: FieldRules = request_fields.OPENAI,
    ) -> "_Asked[B]":
        """Runs a request. Returns its body, the beginning of its answer, and the vectors of its texts."""
        arrival = Arrival.now()
        data = await request_body.read(request.scope["headers"], request.receive)
        body = request_fields.read(data, decoder, rules)
        card = self._backend.resolve_model(body.model)
        wanted = convert(body, card, request.state.request_id)
        found = await run(self._backend, self._metrics, wanted, arrival, request.headers, request.receive)
        head = answers.head(prefix, request.state.request_id, arrival.created, card.name)
        return _Asked(body, card, head, found)


async def in_turns(items: Iterator[T]) -> list[T]:
    """Returns all items of an iterator. Yields to the event loop every `_TURN` items."""
    found: list[T] = []
    for item in items:
        found.append(item)
        if len(found) % _TURN == 0:
            await asyncio.sleep(0)
    return found
