"""What the HTTP edge calls: accepts requests, starts them, and has the table of those that run."""

import asyncio

from antiphon.services.gateway.path.gateway_parts import GatewayParts
from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.models.catalog import RETRY_AFTER_S, ModelCatalog
from antiphon.services.gateway.path.requests.preparation import prepare, tokenize_only
from antiphon.services.gateway.path.requests.request_actor import RequestActor
from antiphon.shared import limits
from antiphon.shared.codec import pack_ids, unpack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import DetokenizeReply, DetokenizeRequest, GatewayStatus
from antiphon.shared.parameters.pooling import generates_nothing


class GatewayBackend:
    """The requests of one gateway. Implements `generation.Backend`.

    `max_queue_wait`: requests are refused if their expected wait is longer, seconds; 0: never.
    """

    def __init__(self, parts: GatewayParts, catalog: ModelCatalog, max_queue_wait: float = 0.0) -> None:
        self.parts, self.catalog = parts, catalog
        self.requests: dict[str, RequestActor] = {}
        self._max_queue_wait_s = max_queue_wait
        self._num_requests = self._num_ended = self._num_sequences = self._num_idle = 0
        """`_num_idle`: number of the sequences whose requests began in the idle lane (`idle_s` above 0)."""
        self._draining = False
        self._quiet = asyncio.Event()

    def models(self) -> list[ModelCard]:
        """See Backend."""
        return self.catalog.cards()

    def resolve_model(self, name: str | None) -> ModelCard:
        """See Backend."""
        return self.catalog.resolve(name)

    def generate(self, request: GenerationRequest) -> RequestActor:
        """See Backend."""
        if self._draining:
            raise ServiceError("draining", "The server is shutting down.", retry_after_s=RETRY_AFTER_S)
        count = request.inputs.num_prompts * request.num_sequences
        too_many = self._num_sequences + count > limits.GATEWAY_SEQUENCES_MAX
        too_many |= request.guests.idle_s > 0 and self._num_idle + count > limits.GATEWAY_IDLE_SEQUENCES_MAX
        if too_many or len(self.requests) >= limits.GATEWAY_REQUESTS_MAX:
            raise ServiceError(
                "server_is_overloaded",
                "The server has too many requests. Try again later.",
                retry_after_s=self.parts.dispatcher.waits.retry_after_s(),
            )
        if not self.parts.host.transport.connected:
            self.parts.bus.check()
        card = self.resolve_model(request.model)
        if request.pooling is None and not card.generates:
            raise generates_nothing(len(card.labels))
        if self._max_queue_wait_s:
            self._check_wait(request, card.served_by)
        # What a model serves besides itself is a guest's.
        return self._start(self.parts.guests.admit(request, card) if card.base else request, card, count)

    def _check_wait(self, request: GenerationRequest, model: str) -> None:
        """Raises ServiceError if a request that is not idle would wait for an engine longer than `--max-queue-wait`."""
        most, waits = self._max_queue_wait_s, self.parts.dispatcher.waits
        if not request.guests.idle_s and waits.waits_longer(model, most):
            message = f"A new request would wait longer than {most:g} s. Try again later."
            raise ServiceError("server_is_overloaded", message, retry_after_s=waits.retry_after_s())

    def start_alone(self, request: GenerationRequest, card: ModelCard) -> RequestActor:
        """Starts a request of a guest, which has no guests itself and no client."""
        return self._start(request, card, request.inputs.num_prompts * request.num_sequences, with_guests=False)

    def _start(
        self, request: GenerationRequest, card: ModelCard, count: int, *, with_guests: bool = True
    ) -> RequestActor:
        num_idle = count if request.guests.idle_s > 0 else 0

        def end() -> None:
            self._num_sequences -= count
            self._num_idle -= num_idle
            self._num_ended += 1
            self.requests.pop(request.request_id, None)
            for guest in self.parts.guests if with_guests else ():
                guest.served(actor)

        actor = RequestActor(self.parts, request, card, self._num_requests + 1, end, with_guests=with_guests)
        self._num_requests += 1
        self._num_sequences += count
        self._num_idle += num_idle
        self.requests[request.request_id] = actor
        actor.start(prepare(actor, self.parts), count)
        return actor

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """See Backend."""
        card = self.resolve_model(request.model)
        prompts = await tokenize_only(self.parts, request, card, return_tokens=return_tokens)
        return [(unpack_ids(prompt.token_ids), list(prompt.tokens)) for prompt in prompts]

    async def fetch_images(self, request: GenerationRequest) -> GenerationRequest:
        """See Backend."""
        for guest in self.parts.guests:
            request = await guest.fetched(request)
        return request

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """See Backend."""
        return (await self._detokenized(model, token_ids, return_tokens=False)).text

    async def token_texts(self, model: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        """See Backend."""
        return (await self._detokenized(model, token_ids, return_tokens=True)).tokens

    async def _detokenized(self, model: str, token_ids: tuple[int, ...], *, return_tokens: bool) -> DetokenizeReply:
        card = self.resolve_model(model)
        message = DetokenizeRequest("detokenize", card.served_by, pack_ids(token_ids), return_tokens)
        reply = await self.parts.clients.tokenizer(message, len(token_ids), None)
        assert isinstance(reply, DetokenizeReply)
        return reply

    def ready(self) -> str:
        """See Backend."""
        if self._draining:
            return "The gateway is shutting down."
        if not self.parts.host.transport.connected:
            return "The bus cannot be reached."
        return self.catalog.waiting_for()

    def find(self, name: str) -> tuple[RequestActor, int] | None:
        """Returns the request with a sequence of this id, and the index of the sequence; None if it has ended."""
        request_id, _, number = name.rpartition("-")
        actor = self.requests.get(request_id)
        try:
            index = int(number)
        except ValueError:
            return None
        return (actor, index) if actor is not None and not actor.over and index < len(actor.sequences) else None

    def status(self) -> GatewayStatus:
        """Returns this gateway's load, for heartbeats."""
        queue = self.parts.dispatcher.queue
        idle = len(queue) - queue.num_ordinary
        return GatewayStatus(
            num_requests=len(self.requests),
            num_waiting=len(queue),
            accepted_requests=self._num_requests,
            ended_requests=self._num_ended,
            num_idle_waiting=idle,
        )

    async def drain(self) -> None:
        """Refuses new requests and returns when the running ones have ended."""
        self._draining = True
        self._quiet.clear()
        await self._quiet.wait()

    def note_quiet(self) -> None:
        """Ends `drain` if no request runs any more. Called with each liveness check."""
        if not self.requests:
            self._quiet.set()

    def fail_all(self, error: ServiceError) -> None:
        """Ends every request with an error."""
        for actor in list(self.requests.values()):
            actor.fail(error)
