"""A backend that enforces the rules of one API key: only the key's models, and generation within the key's limits.

All endpoints use this backend, so a new endpoint cannot bypass a key's rules. It reads the key of the current HTTP
request from `call`. When a generation ends, which happens exactly once, its reserved quota is replaced by the real use
and its usage is recorded.
"""

import time
from collections.abc import AsyncIterator, Sequence

from msgspec.structs import replace

from antiphon.services.gateway.edge.access.call import Call, Generated, current_call
from antiphon.services.gateway.edge.access.quotas import KeyQuota, Quotas
from antiphon.services.gateway.edge.access.reservation import QuotaReservation
from antiphon.services.gateway.edge.access.usage import UsageLedger
from antiphon.services.gateway.path.generation import (
    FLEX,
    Backend,
    Client,
    Generation,
    GenerationRequest,
    ModelCard,
    RequestTimes,
    Reservation,
    SequenceUpdate,
    TokenCounts,
)
from antiphon.services.gateway.path.record import BeginRecord, RequestFacts, not_recorded
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import UsageOutcome, UsageRecord
from antiphon.shared.security.api_keys import ANONYMOUS, ApiKey

CHARS_PER_TOKEN = 4
"""Characters per token, to estimate the number of a prompt's tokens before it is tokenized. When the request has ended,
the true number is counted in place of the estimate."""

_CONTINUED = ("stream_taken", "draining")
"""Causes of the end of a run for which another run may continue the request."""


class GuardedBackend:
    """Implements `generation.Backend` on top of another backend.

    `timeout_max_s`: maximum duration of a request, also the default timeout; 0: no limit. `begin_record`: the events
    of a request are added to what it returns; by default they are not stored.
    """

    def __init__(
        self,
        backend: Backend,
        quotas: Quotas,
        usage: UsageLedger,
        timeout_max_s: float = 0.0,
        begin_record: BeginRecord = not_recorded,
    ) -> None:
        self._backend = backend
        self._quotas = quotas
        self._usage = usage
        self._timeout_max_s = timeout_max_s
        self._begin_record = begin_record

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
                # The backend's message would list all models, including those that the key may not use.
                message = f"The model {name!r} does not exist. The API key {key.name!r} may use: {_names(key)}."
                raise ServiceError(error.code, message, param=error.param) from None
            raise
        if key.models is not None and not _allows(key, card):
            message = f"The API key {key.name!r} may not use the model {card.name!r}. Its models: {_names(key)}."
            raise ServiceError("permission_denied", message, param="model")
        return card

    def generate(self, request: GenerationRequest) -> Generation:
        """See Backend. The generation starts, or is refused, when its first update is awaited."""
        call, reservation = current_call(), request.origin.reservation
        try:
            if call.key.models is not None:
                self.resolve_model(request.model)
            # A request of a batch may wait as long as the batch runs.
            timeout_s = 0.0 if call.in_batch else self._timeout_max_s
            if request.timeout_s or call.timeout:
                timeout_s = self._asked_timeout_s(request, call)
            lockstep = _lockstep(call) if call.lockstep else None
            waits = call.lane or call.in_batch or request.service_tier == FLEX
            idle_s = _idle_s(timeout_s, call) if waits else 0.0
            facts = RequestFacts(
                request_id=request.request_id,
                model=request.model,
                key=call.key.name,
                client_request_id=call.client_request_id,
                max_tokens=request.params.max_tokens,
                turn_s=call.turn.began_s - call.received_s if call.turn is not None else 0.0,
                ignored=call.ignored.keys(),
            )
            record = self._begin_record(facts, call.received_s)
            request = replace(
                request,
                timeout_s=timeout_s,
                origin=replace(request.origin, client=client_of(call), caller=call, record=record),
                guests=replace(request.guests, lockstep=lockstep, idle_s=idle_s),
            )
            return GuardedGeneration(self._backend, request, call, self._quota_of(call), self._usage)
        except BaseException:
            if reservation is not None:
                reservation.withdraw()
            raise

    def _quota_of(self, call: Call) -> KeyQuota | None:
        return self._quotas.of(call.key) if call.key.is_limited and not call.was_admitted else None

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """See Backend. Only requests with images count towards the key's limits, because images must be encoded."""
        call = current_call()
        request = replace(request, origin=replace(request.origin, client=client_of(call), caller=call))
        quota = self._quota_of(call) if request.inputs.images else None
        if quota is None:
            return await self._backend.tokenize(request, return_tokens=return_tokens)
        reservation = await _reserve(quota, call, estimated_prompt_tokens(request))
        num_tokens = 0
        try:
            found = await self._backend.tokenize(request, return_tokens=return_tokens)
            num_tokens = sum(len(token_ids) for token_ids, _ in found)
            return found
        finally:
            reservation.finish(num_tokens)

    async def fetch_images(self, request: GenerationRequest) -> GenerationRequest:
        """See Backend. Also raises ServiceError('rate_limit_exceeded'), before anything is fetched."""
        call = current_call()
        quota = self._quota_of(call)
        if quota is None:
            return await self._backend.fetch_images(request)
        reservation = await _reserve(quota, call, estimated_tokens(request), num_sequences(request))
        try:
            request = await self._backend.fetch_images(request)
        except BaseException:
            reservation.finish(0)
            raise
        return replace(request, origin=replace(request.origin, reservation=reservation))

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """See Backend."""
        return await self._backend.detokenize(model, token_ids)

    async def token_texts(self, model: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """See Backend."""
        return await self._backend.token_texts(model, token_ids)

    def ready(self) -> str:
        """See Backend."""
        return self._backend.ready()

    def _asked_timeout_s(self, request: GenerationRequest, call: Call) -> float:
        """Returns the shorter of the timeouts of the body and of the header. Raises ServiceError."""
        given = [self._checked(request.timeout_s, "timeout")] if request.timeout_s else []
        if call.timeout:
            given.append(self._checked(_number(call.timeout), "X-Request-Timeout"))
        return min(given)

    def _checked(self, timeout_s: float, param: str) -> float:
        most = self._timeout_max_s
        if timeout_s > 0 and (not most or timeout_s <= most) and timeout_s != float("inf"):
            return timeout_s
        message = f"'{param}' must be a number of seconds above 0" + (f" and at most {most:g}" if most else "")
        raise ServiceError("invalid_value", f"{message}.", param=param)


class GuardedGeneration:
    """Implements `generation.Generation` on top of a generation of `backend`, which starts after the admission."""

    def __init__(
        self,
        backend: Backend,
        request: GenerationRequest,
        call: Call,
        quota: KeyQuota | None,
        usage: UsageLedger,
    ) -> None:
        self._backend, self._request, self._record = backend, request, request.origin.record
        self._call, self._quota, self._usage = call, quota, usage
        self._reservation: Reservation | None = request.origin.reservation
        self._inner: Generation | None = None
        self._ended = False
        self._received_at, self._started_s, self._first_token_s = time.time(), time.perf_counter(), 0.0
        self._num_shown = 0
        self._finish_reasons: list[str] = []

    @property
    def num_prompt_tokens(self) -> int:
        """See Generation."""
        return self._inner.num_prompt_tokens if self._inner is not None else 0

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """See Generation."""
        return self._inner.prompt_token_ids if self._inner is not None else []

    @property
    def times(self) -> RequestTimes:
        """See Generation."""
        return self._inner.times if self._inner is not None else RequestTimes()

    @property
    def prompt_tail(self) -> str:
        """See Generation."""
        return self._inner.prompt_tail if self._inner is not None else ""

    @property
    def token_counts(self) -> TokenCounts:
        """See Generation."""
        return self._inner.token_counts if self._inner is not None else TokenCounts()

    @property
    def outputs(self) -> Sequence[SequenceState]:
        """See Generation."""
        return self._inner.outputs if self._inner is not None else ()

    async def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """See Generation. Also raises ServiceError('rate_limit_exceeded'), before the first item."""
        try:
            if self._quota is not None and self._reservation is None:
                await self._admit(self._quota)
            if self._ended:
                return
            self._record.admitted()
            self._inner = self._backend.generate(self._request)
            # Nothing of the request has been sent yet: what an engine computes belongs to a request that was noted.
            self._usage.opened(self._usage_record(TokenCounts(), "lost", ""))
            async for batch in self._inner.updates():
                self._saw(batch)
                yield batch
        except ServiceError as error:
            self._end("failed", error.code)
            raise
        self._end("completed")

    async def cancel(self, reason: str, cause: str = "") -> None:
        """See Generation."""
        if self._inner is not None:
            await self._inner.cancel(reason, cause)
        self._end("cancelled", cause=cause)
        self._record.closed()

    async def _admit(self, quota: KeyQuota) -> None:
        request = self._request
        reservation = await _reserve(quota, self._call, estimated_tokens(request), num_sequences(request))
        if self._ended:  # cancelled meanwhile
            reservation.withdraw()
        else:
            self._reservation = reservation

    def _saw(self, batch: list[SequenceUpdate]) -> None:
        for update in batch:
            self._num_shown += len(update.token_ids) if not self._request.output.only_echoes else 0
            if update.finish_reason is not None:
                self._finish_reasons.append(update.finish_reason)
        if self._num_shown and not self._first_token_s:
            self._first_token_s = time.perf_counter() - self._started_s

    def _end(self, outcome: UsageOutcome, error_code: str = "", cause: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        counts, code = self.token_counts, error_code or cause
        self._call.generated = self._generated(counts, code)
        self._record.ended(outcome, code, counts.prompt, counts.cached, counts.generated, tuple(self._finish_reasons))
        if self._reservation is not None:
            if self._inner is None:
                self._reservation.withdraw()
            else:
                self._reservation.finish(counts.prompt + counts.generated)
        if self._inner is not None:
            record = self._usage_record(counts, outcome, error_code)
            (self._usage.left if cause in _CONTINUED else self._usage.record)(record)

    def _generated(self, counts: TokenCounts, error: str) -> Generated:
        return Generated(
            request_id=self._request.request_id,
            model=self._request.model,
            prompt_tokens=counts.prompt,
            output_tokens=self._num_shown,
            first_token_s=self._first_token_s,
            engines=tuple(dict.fromkeys(name for one in self.outputs for name in one.engines)),
            finish_reasons=tuple(self._finish_reasons),
            error=error,
        )

    def _usage_record(self, counts: TokenCounts, outcome: UsageOutcome, error_code: str) -> UsageRecord:
        """Returns the usage of the request. The tokens of a former run, which this one continues, belong to it."""
        resumed = self._request.guests.resumed
        num_former = 0 if resumed is None else resumed.num_tokens
        return UsageRecord(
            request_id=self._request.request_id,
            gateway_id=self._usage.gateway_id,
            key=self._call.key.name,
            model=self._request.model,
            outcome=outcome,
            error_code=error_code,
            finish_reasons=tuple(self._finish_reasons),
            prompt_tokens=counts.prompt,
            cached_tokens=counts.cached,
            computed_tokens=counts.computed + num_former,
            completion_tokens=self._num_shown + num_former,
            discarded_tokens=max(0, counts.generated - self._num_shown),
            received_at=self._received_at,
            time_to_first_token_s=self._first_token_s,
            duration_s=time.perf_counter() - self._started_s,
            client_request_id=self._call.client_request_id,
        )


async def _reserve(quota: KeyQuota, call: Call, tokens: int, count: int = 1) -> QuotaReservation:
    """Reserves an estimated number of tokens for a request, and a place for each of its `count` sequences.

    The request takes over what was reserved for `call` before its body was read. Raises
    ServiceError('rate_limit_exceeded'), or 'invalid_value' if the key may never have so many sequences at the same
    time. Whether the request is admitted or refused, the answer to `call` gets the headers with the remaining quota.
    """
    most = quota.key.concurrent_requests
    if most and count > most:
        message = (
            f"The request has {count} sequences (prompts times 'n'); the API key {quota.key.name!r} may have {most} "
            "at the same time. Ask for fewer in one request."
        )
        raise ServiceError("invalid_value", message, param="n")
    first = call.reservation
    try:
        if first is None:
            return QuotaReservation(quota, await quota.admit(tokens, places=count))
        further = await quota.admit(tokens, requests=0, places=count - 1)
        call.reservation = None
        return first.with_admission(further)
    finally:
        call.response_headers = quota.headers()


def _lockstep(call: Call) -> bool:
    if call.lockstep not in ("0", "1"):
        message = "'X-Antiphon-Lockstep' must be 1 (two engines compute the request) or 0 (one does)."
        raise ServiceError("invalid_value", message, param="X-Antiphon-Lockstep")
    return call.lockstep == "1"


def client_of(call: Call) -> Client:
    """Returns the client to which engines attribute a call's sequences. Without keys all calls belong to one client."""
    key = call.key
    return Client() if key is ANONYMOUS else Client(key.name, key.weight, key.priority)


def _idle_s(timeout_s: float, call: Call) -> float:
    """Returns the time for which a request runs in the idle lane, set by its batch, its service tier or a header.

    A request with a timeout that is not from a batch stays in the idle lane for at most half of the timeout.
    """
    if call.in_batch:
        return call.idle_s
    if call.lane not in ("", "idle"):
        message = "'X-Antiphon-Lane' must be 'idle': the request then gives way to others."
        raise ServiceError("invalid_value", message, param="X-Antiphon-Lane")
    return min(limits.IDLE_S, timeout_s / 2) if timeout_s else limits.IDLE_S


def _allows(key: ApiKey, card: ModelCard) -> bool:
    return key.models is None or key.allows_model(card.name, *card.aliases)


def _names(key: ApiKey) -> str:
    return ", ".join(map(repr, sorted(key.models or ())))


def _number(text: str) -> float:
    """Returns the number of seconds in a text; 0, which is no valid timeout, if the text has none."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if value > 0 else 0.0


def estimated_tokens(request: GenerationRequest) -> int:
    """Returns the number of tokens (prompts and output) that a request reserves until the true number is known."""
    prompt = estimated_prompt_tokens(request)
    if request.pooling is not None:
        return prompt
    return prompt + num_sequences(request) * (request.params.max_tokens or limits.OUTPUT_ESTIMATE_TOKENS)


def num_sequences(request: GenerationRequest) -> int:
    """Returns for how many requests a request counts among those that a key may have at the same time.

    A request that generates counts once for each sequence. Texts that are only read count as one request together.
    """
    return 1 if request.pooling is not None else request.inputs.num_prompts * request.num_sequences


def estimated_prompt_tokens(request: GenerationRequest) -> int:
    """Returns the part of `estimated_tokens` for the prompts."""
    num_texts = request.inputs.num_prompts - len(request.inputs.token_ids)
    converted = max(num_texts, -(-request.inputs.num_characters // CHARS_PER_TOKEN))
    return converted + request.inputs.num_given_tokens
