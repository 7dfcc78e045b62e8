"""The seam between the path, which every request takes, and its guests: features that a request may use or not.

A guest is a folder in `services/gateway/guests` with a module `guest`, whose function `make` returns a `Guest`. The
path calls the methods below and does not know which guests there are; a method that a guest leaves as it is costs a
request nothing. A request that uses no guest has no `RequestGuest`. Routes of guests are APIs (`apis.openai.base`).
"""

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from prometheus_client.registry import Collector

from antiphon.services.gateway.path.generation import GenerationRequest, ModelCard
from antiphon.services.gateway.path.messages import Prompt, RequestMessages
from antiphon.services.gateway.path.sequence_state import Address, SequenceState
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import (
    Heartbeat,
    ImageTokens,
    PromptImage,
    SequenceMark,
    SequenceRef,
    TextEvent,
    TokenEvent,
)

T = TypeVar("T")


class Running(Protocol):
    """A running request as its guests and its placements see it (`request_actor.RequestActor`)."""

    request: GenerationRequest
    card: ModelCard
    prompts: list[Prompt]
    sequences: list[SequenceState]
    messages: RequestMessages
    """Has the request with its parameters as they are sent to engines. Valid when there are prompts."""
    error: ServiceError | None

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        ...

    def apply_text(self, index: int, event: TextEvent, engine: Address) -> None:
        """Applies a text event that a guest has held back."""
        ...

    def fail(self, error: ServiceError) -> None:
        """Ends the request with an error."""
        ...

    def prefer(self, index: int, engine: Address) -> None:
        """Makes the next placement of a sequence prefer this engine."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine as a task of the request: if it raises, the request fails."""
        ...


class Attachment(Protocol):
    """Something in a conversation besides text that takes tokens of the prompt: an image."""

    @property
    def tokens(self) -> ImageTokens:
        """Its description for tokenizers."""
        ...

    def placed(self, start: int) -> PromptImage:
        """Returns its description for engines. `start`: position of its first token in the prompt."""
        ...


class RequestGuest:
    """A guest in one request. The base class does nothing."""

    exact = False
    """Whether the sequences need engines that compute the same tokens to the last bit, also for a prefill."""

    async def attachments(self) -> Sequence[Attachment]:
        """Returns what the conversation has besides text, in order. Awaited before the prompts are tokenized."""
        return ()

    def tokenized(self, messages: RequestMessages) -> None:
        """The prompts are tokenized; the sequences are queued next."""

    def eligible(self, engines: Sequence[Heartbeat], model: str) -> Sequence[Heartbeat]:
        """Returns those of the engines on which a sequence of the request may run."""
        return engines

    def placed(self) -> None:
        """A sequence was accepted by its engine."""

    def on_text(self, index: int, event: TextEvent, engine: Address) -> bool:
        """Returns whether the guest takes the event, and passes it to `Running.apply_text` itself when it may."""
        return False

    def holds(self, index: int) -> bool:
        """Whether text of a sequence is held back. Then a pause does not mean that text was lost."""
        return False

    def ended(self) -> None:
        """The request has ended, with or without an error. Called once."""


class Lifetime:
    """The moments in the life of a gateway at which guests and APIs do something. The base class does nothing."""

    def work(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Returns what runs from the start until the gateway ends. If one of them ends, the gateway does."""
        return ()

    async def answering(self) -> None:
        """The gateway can answer requests. Awaited before it takes the first one from a client."""

    async def leave(self) -> None:
        """The gateway begins to shut down. Requests on open connections are still answered."""

    def hand_over(self) -> None:
        """Ends what other gateways can continue: the requests take longer than the shutdown may take."""

    async def finish(self) -> None:
        """The last request has ended. The bus still answers."""


class Guest(Lifetime):
    """A guest in one gateway. The base class does nothing. Its handlers of messages are marked with `handles`."""

    asked_by: Callable[[GenerationRequest], object] | None = None
    """What of a request asks for the guest: `joins` is called only if this is true of the request. None: for all."""

    async def listen(self) -> None:
        """Subscribes to the guest's subjects, with `GatewayActor.bind`."""

    def close(self) -> None:
        """Ends what the guest has started, when the gateway stops."""

    def collectors(self) -> Iterable[Collector]:
        """Returns the guest's metrics."""
        return ()

    # --- requests ---

    def admit(self, request: GenerationRequest, card: ModelCard) -> GenerationRequest:
        """Returns a new request for one of `cards`, changed if the guest has to. Raises ServiceError to refuse it."""
        return request

    async def fetched(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with the files that it gives by their address. Raises ServiceError."""
        return request

    def joins(self, request: GenerationRequest, card: ModelCard, running: Running | None) -> RequestGuest | None:
        """Returns the guest's part in a request that begins; None if it has none. Raises ServiceError to refuse it.

        `running` is None for a request that is only tokenized. Otherwise `request` and `card` are its own.
        """
        return None

    def served(self, running: Running) -> None:
        """A client's request has ended. Not called for requests that a guest has started."""

    # --- models and engines ---

    def cards(self, model: ModelCard) -> Sequence[ModelCard]:
        """Returns what requests can name besides this model and what it serves: its adapters."""
        return ()

    def find_card(self, model: ModelCard, name: str) -> ModelCard | None:
        """Returns the one of `cards` with this name; None if there is none."""
        return None

    def version_facts(self, model: str, number: int) -> dict[str, Any] | None:
        """Returns what `GET /admin/models` tells of a version besides its state; None for nothing."""
        return None

    def is_settled(self) -> bool:
        """Whether the guest knows what it has to know before the gateway is ready."""
        return True

    def eligible(self, engines: Sequence[Heartbeat]) -> Sequence[Heartbeat]:
        """Returns the engines that may get work: `engines` itself if all may."""
        return engines

    def on_waiting(self, model: str) -> None:
        """Sequences of a model wait, and no engine takes them now. Called often; must be cheap."""

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """A member of another service has sent a heartbeat."""

    def on_lost(self, member: Address) -> None:
        """A member is lost, or gets no more work."""

    def tick(self) -> None:
        """Called with each liveness check while the gateway is connected to the bus."""

    # --- sequences of the guest's own, which belong to no request ---

    def on_tokens(self, event: TokenEvent, engine: Address) -> bool:
        """Handles tokens of one of its sequences. Returns False if it is none of its own."""
        return False

    def on_progress(self, marks: Iterable[SequenceMark], missing: Iterable[SequenceRef], engine: Address) -> None:
        """Handles an engine's report of the progress of sequences, and of those that it does not have."""

    def reference(self, name: str) -> SequenceRef | None:
        """Returns the reference of one of its running sequences for a query; None if there is none of this name."""
        return None

    def owns(self, ref: SequenceRef, member: Address) -> bool:
        """Whether an engine has to keep one of its sequences."""
        return False


class Guests:
    """The guests of one gateway, each of whose hooks calls those that have it, and what they offer each other."""

    def __init__(self) -> None:
        self.all: tuple[Guest, ...] = ()
        self._offers: list[object] = []
        self._admitting: tuple[Guest, ...] = ()
        self._joining: tuple[Guest, ...] = ()
        self._judging: tuple[Guest, ...] = ()
        self._supplying: tuple[Guest, ...] = ()

    def add(self, guests: Iterable[Guest]) -> None:
        """Adds guests. Called before the gateway listens."""
        self.all = (*self.all, *guests)
        self._admitting = self._with(Guest.admit)
        self._joining = self._with(Guest.joins)
        self._judging = self._with(Guest.eligible)
        self._supplying = self._with(Guest.on_waiting)

    def offer(self, *things: object) -> None:
        """Lets other guests and APIs find something by its type, so that none needs to know who makes it."""
        self._offers += things

    def offered(self, kind: type[T]) -> T | None:
        """Returns the guest or what was offered of a type. None: there is none, for example without its folder."""
        return next((one for one in (*self.all, *self._offers) if isinstance(one, kind)), None)

    def _with(self, hook: Callable[..., Any]) -> tuple[Guest, ...]:
        return tuple(one for one in self.all if getattr(type(one), hook.__name__) is not hook)

    def __iter__(self) -> Iterator[Guest]:
        return iter(self.all)

    def admit(self, request: GenerationRequest, card: ModelCard) -> GenerationRequest:
        """See Guest."""
        for guest in self._admitting:
            request = guest.admit(request, card)
        return request

    def joining(self, request: GenerationRequest, card: ModelCard, running: Running | None) -> tuple[RequestGuest, ...]:
        """Returns the parts that guests have in a request that begins, see `Guest.joins`."""
        parts = list[RequestGuest]()
        for guest in self._joining:
            asked = guest.asked_by is None or guest.asked_by(request)
            if asked and (part := guest.joins(request, card, running)) is not None:
                parts.append(part)
        return tuple(parts)

    def eligible(self, engines: Sequence[Heartbeat]) -> Sequence[Heartbeat]:
        """See Guest."""
        for guest in self._judging:
            engines = guest.eligible(engines)
        return engines

    def on_waiting(self, models: Iterable[str]) -> None:
        """See Guest."""
        for guest in self._supplying:
            for model in models:
                guest.on_waiting(model)

    def cards(self, model: ModelCard) -> list[ModelCard]:
        """See Guest."""
        return [card for guest in self.all for card in guest.cards(model)]

    def find_card(self, model: ModelCard, name: str) -> ModelCard | None:
        """See Guest."""
        return next((card for guest in self.all if (card := guest.find_card(model, name)) is not None), None)

    def version_facts(self, model: str, number: int) -> dict[str, Any] | None:
        """See Guest."""
        return next((told for guest in self.all if (told := guest.version_facts(model, number)) is not None), None)

    def is_settled(self) -> bool:
        """See Guest."""
        return all(guest.is_settled() for guest in self.all)

    def on_tokens(self, event: TokenEvent, engine: Address) -> bool:
        """See Guest."""
        return any(guest.on_tokens(event, engine) for guest in self.all)

    def reference(self, name: str) -> SequenceRef | None:
        """See Guest."""
        return next((ref for guest in self.all if (ref := guest.reference(name)) is not None), None)

    def owns(self, ref: SequenceRef, member: Address) -> bool:
        """See Guest."""
        return any(guest.owns(ref, member) for guest in self.all)
