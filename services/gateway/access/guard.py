"""The backend as one API key sees it: only the key's models, and generation within the key's limits.

All endpoints use this backend, so that a new endpoint cannot bypass a key's rules. It reads the key of the current HTTP
request from `call`.
"""

from services.gateway.access.call import current_call
from services.gateway.access.keys import ApiKey
from services.gateway.generation import Backend, Generation, GenerationRequest, ModelCard
from shared.errors import ServiceError


class GuardedBackend:
    """Implements `generation.Backend` on top of another backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def models(self) -> list[ModelCard]:
        """See Backend. Returns only the models that the key may use."""
        key = current_call().key
        return [card for card in self._backend.models() if _allows(key, card)]

    def resolve_model(self, name: str | None) -> ModelCard:
        """See Backend. Also raises ServiceError('permission_denied') for a model that the key may not use."""
        card, key = self._backend.resolve_model(name), current_call().key
        if not _allows(key, card):
            told = f"The API key {key.name!r} may not use the model {card.name!r}. Its models: {_names(key)}."
            raise ServiceError("permission_denied", told, param="model")
        return card

    def generate(self, request: GenerationRequest) -> Generation:
        """See Backend."""
        return self._backend.generate(request)

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """See Backend."""
        return await self._backend.tokenize(request, return_tokens=return_tokens)

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """See Backend."""
        return await self._backend.detokenize(model, token_ids)

    def ready(self) -> str:
        """See Backend."""
        return self._backend.ready()


def _allows(key: ApiKey, card: ModelCard) -> bool:
    return key.allows_model(card.name, *card.aliases)


def _names(key: ApiKey) -> str:
    return ", ".join(map(repr, sorted(key.models or ())))
