"""The backend as one API key sees it: only the key's models, and generation within the key's limits.

All endpoints use this backend, so that a new endpoint cannot bypass a key's rules. It reads the key of the current HTTP
request from `call`. `guarded_generation` runs each generation.
"""

from dataclasses import replace

from services.gateway.access.call import Call, current_call
from services.gateway.access.guarded_generation import GuardedGeneration
from services.gateway.access.quotas import Quotas
from services.gateway.access.usage import UsageLedger
from services.gateway.generation import FLEX, Backend, Client, Generation, GenerationRequest, ModelCard
from services.gateway.record import Recorder, RequestFacts
from shared import limits
from shared.errors import ServiceError
from shared.security.api_keys import ANONYMOUS, ApiKey


class GuardedBackend:
    """Implements `generation.Backend` on top of another backend.

    `timeout_max_s`: longest time of a request, also of those that name no timeout; 0: no limit. `recorder` keeps the
    events of the requests; by default nobody does.
    """

    def __init__(
        self,
        backend: Backend,
        quotas: Quotas,
        usage: UsageLedger,
        timeout_max_s: float = 0.0,
        recorder: Recorder | None = None,
    ) -> None:
        self._backend = backend
        self._quotas = quotas
        self._usage = usage
        self._timeout_max_s = timeout_max_s
        self._recorder = recorder or Recorder(0)

    def models(self) -> list[ModelCard]:
        """See Backend. Returns only the models that the key may use."""
        key = current_call().key
        return [card for card in self._backend.models() if _allows(key, card)]

    def resolve_model(self, name: str | None) -> ModelCard:
        """See Backend. Also raises ServiceError('permission_denied') for a model that the key may not use."""
        key = current_call().key
        try:
            card = self._backend.resolve_model(name)
        except ServiceError as error:
            if error.code == "model_not_found" and key.models is not None:
                # The backend's message lists all models, also those that the key may not know of.
                told = f"The model {name!r} does not exist. The API key {key.name!r} may use: {_names(key)}."
                raise ServiceError(error.code, told, param=error.param) from None
            raise
        if not _allows(key, card):
            told = f"The API key {key.name!r} may not use the model {card.name!r}. Its models: {_names(key)}."
            raise ServiceError("permission_denied", told, param="model")
        return card

    def generate(self, request: GenerationRequest) -> Generation:
        """See Backend. The generation starts, or is refused, when its first update is awaited."""
        call = current_call()
        if call.key.models is not None:
            self.resolve_model(request.model)
        request = replace(
            request, client=client_of(call), timeout_s=self._timeout_s(request, call), lockstep=_lockstep(call)
        )
        request = replace(request, idle_s=_idle_s(request, call))
        facts = RequestFacts(
            request.request_id, request.model, call.key.name, call.client_request_id, request.params.max_tokens
        )
        request = replace(request, record=self._recorder.begin(facts, call.received_s))
        quota = self._quotas.of(call.key) if call.key.is_limited and not call.was_admitted else None
        return GuardedGeneration(self._backend, request, call, quota, self._usage)

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """See Backend."""
        return await self._backend.tokenize(request, return_tokens=return_tokens)

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """See Backend."""
        return await self._backend.detokenize(model, token_ids)

    async def token_texts(self, model: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """See Backend."""
        return await self._backend.token_texts(model, token_ids)

    async def load_adapter(self, name: str, path: str, base_model: str | None, *, in_place: bool) -> None:
        """See Backend."""
        await self._backend.load_adapter(name, path, self.resolve_model(base_model).name, in_place=in_place)

    async def unload_adapter(self, name: str) -> None:
        """See Backend."""
        await self._backend.unload_adapter(name)

    def ready(self) -> str:
        """See Backend."""
        return self._backend.ready()

    def _timeout_s(self, request: GenerationRequest, call: Call) -> float:
        """Returns the shortest of the timeouts of the body, of the header and of the server; 0: none.

        The server's does not hold for a request of a batch, which may wait as long as the batch runs.
        """
        given = [self._checked(request.timeout_s, "timeout")] if request.timeout_s else []
        if call.timeout:
            given.append(self._checked(_number(call.timeout), "X-Request-Timeout"))
        return min(given, default=0.0 if call.in_batch else self._timeout_max_s)

    def _checked(self, timeout_s: float, param: str) -> float:
        most = self._timeout_max_s
        if timeout_s > 0 and (not most or timeout_s <= most) and timeout_s != float("inf"):
            return timeout_s
        told = f"'{param}' must be a number of seconds above 0" + (f" and at most {most:g}" if most else "")
        raise ServiceError("invalid_value", f"{told}.", param=param)


def _lockstep(call: Call) -> bool | None:
    if call.lockstep not in ("", "0", "1"):
        told = "'X-Antiphon-Lockstep' must be 1 (two engines compute the request) or 0 (one does)."
        raise ServiceError("invalid_value", told, param="X-Antiphon-Lockstep")
    return call.lockstep == "1" if call.lockstep else None


def client_of(call: Call) -> Client:
    """Returns on whose behalf engines work for a call. Without keys there is one client."""
    key = call.key
    return Client() if key is ANONYMOUS else Client(key.name, key.weight, key.priority)


def _idle_s(request: GenerationRequest, call: Call) -> float:
    """Returns for how long a request runs in the idle lane: as its batch says, or as the tier or header asks for.

    A request with a timeout gives way for at most half of it.
    """
    if call.in_batch:
        return call.idle_s
    if call.lane not in ("", "idle"):
        told = "'X-Antiphon-Lane' must be 'idle': the request then gives way to others."
        raise ServiceError("invalid_value", told, param="X-Antiphon-Lane")
    if not call.lane and request.service_tier != FLEX:
        return 0.0
    return min(limits.IDLE_S, request.timeout_s / 2) if request.timeout_s else limits.IDLE_S


def _allows(key: ApiKey, card: ModelCard) -> bool:
    return key.allows_model(card.name, *card.aliases)


def _names(key: ApiKey) -> str:
    return ", ".join(map(repr, sorted(key.models or ())))


def _number(text: str) -> float:
    """Returns the number of seconds; 0, which is no valid timeout, for anything else."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if value > 0 else 0.0
