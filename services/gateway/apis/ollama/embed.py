"""The endpoints of Ollama's API for embeddings: decode a request, run it, encode the vectors."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon.services.gateway.apis.ollama import schemas
from antiphon.services.gateway.apis.ollama.lookup import find, read
from antiphon.services.gateway.apis.openai.bodies.parameter_names import renamed
from antiphon.services.gateway.apis.openai.pooling import requests, runner
from antiphon.services.gateway.apis.openai.pooling.endpoints import in_turns
from antiphon.services.gateway.apis.openai.pooling.schemas import EmbeddingBody
from antiphon.services.gateway.apis.openai.request_context import Arrival
from antiphon.services.gateway.apis.openai.serving import Serving
from antiphon.services.gateway.edge.access.call import ignore
from antiphon.services.gateway.edge.http.json_response import encoded_response
from antiphon.services.gateway.path.generation import ModelCard
from antiphon.shared.parameters.pooling import unpack_vector
from antiphon.shared.request.checks import given

_NANOSECONDS = 1_000_000_000
_AS_MUCH_AS_FITS = -1


class OllamaEmbedEndpoints:
    """The endpoints whose answers are vectors."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def embed(self, request: Request) -> Response:
        """Answers with a vector of length one for each text. Without a text, the model is only looked up."""
        arrival = Arrival.now()
        body = await read(request, schemas.EMBED_DECODER, schemas.EMBED_RULES)
        card = find(self._serving.backend, body.model)
        _tell(body)
        vectors, num_tokens = [], 0
        if body.input:
            asked = EmbeddingBody(
                input=[*body.input] if isinstance(body.input, list) else body.input,
                dimensions=body.dimensions,
                truncate_prompt_tokens=_AS_MUCH_AS_FITS if given(body.truncate, True) else None,
            )
            vectors, num_tokens = await self._vectors(request, arrival, card, asked)
        fields = {
            "model": card.name,
            "embeddings": vectors,
            "total_duration": int((time.perf_counter() - arrival.started_s) * _NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
        return encoded_response(msgspec.json.encode(fields))

    async def embeddings(self, request: Request) -> Response:
        """Answers with the vector of one text as the model gives it, of any length. The former form of `embed`."""
        arrival = Arrival.now()
        body = await read(request, schemas.EMBEDDINGS_DECODER, schemas.EMBED_RULES)
        card = find(self._serving.backend, body.model)
        _tell(body)
        vectors: Sequence[msgspec.Raw | list[float]] = [[]]
        if body.prompt:
            asked = EmbeddingBody(input=body.prompt, normalize=False, truncate_prompt_tokens=_AS_MUCH_AS_FITS)
            with renamed({"input": "prompt"}):
                vectors, _ = await self._vectors(request, arrival, card, asked)
        return encoded_response(msgspec.json.encode({"embedding": vectors[0]}))

    async def _vectors(
        self, request: Request, arrival: Arrival, card: ModelCard, body: EmbeddingBody
    ) -> tuple[list[msgspec.Raw], int]:
        """Returns the JSON of each vector, and the number of tokens. Raises ServiceError."""
        wanted = requests.embeddings(body, card, request.state.request_id)
        serving = self._serving
        found = await runner.run(serving.backend, serving.metrics, wanted, arrival, request.headers, request.receive)
        return await in_turns(_encoded(found.vectors)), found.num_tokens


def _encoded(vectors: Sequence[bytes]) -> Iterator[msgspec.Raw]:
    for vector in vectors:
        yield msgspec.Raw(msgspec.json.encode(unpack_vector(vector).tolist()))


def _tell(body: schemas.OllamaEmbeddingFields) -> None:
    told: dict[str, Any] = {"options": body.options, "keep_alive": body.keep_alive}
    for name in told:
        if told[name]:
            ignore(name)
