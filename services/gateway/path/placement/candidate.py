"""A sequence that waits for a placement, as the dispatcher sees it, and the callbacks for the result."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from antiphon.services.gateway.path.guest import RequestGuest
from antiphon.services.gateway.path.messages import RequestMessages
from antiphon.services.gateway.path.placement.placement_queue import Ticket
from antiphon.services.gateway.path.router import configuration_of, ready_members
from antiphon.services.gateway.path.sequence_state import Address, Phase, Prefill, SequenceState
from antiphon.services.gateway.path.service_clients import PeerUnavailableError
from antiphon.shared import limits
from antiphon.shared.blocks import block_names
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import EngineStatus, Heartbeat

Failure = ServiceError | PeerUnavailableError
"""Failure of a message to a member. ServiceError: the request fails. PeerUnavailableError: another member may be tried.
"""


class PlacementClient(Protocol):
    """What the dispatcher calls when a waiting sequence is placed or cannot be; the request implements it.

    Called on the event loop. `index` is the index of the sequence in its request.
    """

    def on_placed(self, index: int, open_failure: Failure | None) -> None:
        """The engine has accepted the sequence. If the stream was not opened (`open_failure`), it must be rebuilt."""
        ...

    def on_unplaced(self, index: int, engine: Address, detokenizer: Address | None, attempt: int) -> None:
        """The placement failed. The client tells the members to drop the sequence and queues the sequence again."""
        ...

    def fail(self, error: ServiceError) -> None:
        """The sequence cannot be served: the client ends the request with `error`."""
        ...


class StoredKv(NamedTuple):
    """What a lost engine has stored: the directory that it wrote, and the engine that has copies."""

    directory: str
    copies_at: Address | None

    def is_read_by(self, engine: Heartbeat) -> bool:
        """Whether an engine can read it."""
        shares = isinstance(engine.status, EngineStatus) and engine.status.kv_store == self.directory
        return shares or Address(engine.id, engine.instance_id) == self.copies_at


@dataclass(eq=False, slots=True, kw_only=True)
class Candidate(Ticket):
    """One sequence of a request, whose placements `owner` has. `num_tokens` is that of its prompt."""

    owner: PlacementClient
    messages: RequestMessages
    index: int
    sequence: SequenceState
    num_tokens: int
    blocks: Sequence[int]
    """The names of the prompt's full blocks."""
    has_text: bool
    """Whether the sequence needs a detokenizer."""
    searches: bool
    """Whether it is one of a beam search, which needs no further memory where the others of its prompt are."""
    preferred: Address | None = None
    """The engine that the next placement prefers, if it has a free row."""
    returns: bool = False
    """Whether the engine `preferred` ran the sequence for a gateway that is dead or has lost the sequence. The engine
    has the sequence's KV, and the earlier attempt of the sequence ends when this one begins, so the sequence needs
    neither a prefill nor a place of its own.
    """
    stored: "StoredKv | None" = None
    """Where the KV is stored that the sequence had at a lost engine."""
    numerics: str = ""
    """Configuration that the engine of a further placement must have; empty: any. Set by the first placement on an
    engine with `--deterministic`.
    """
    guests: Sequence[RequestGuest] = ()
    """The guests of the request."""
    avoid: set[Address] = field(default_factory=set[Address])
    """Engines on which a placement of this sequence failed since it was last placed."""

    @property
    def recovers(self) -> bool:
        """Whether the sequence has output of an earlier placement, which an engine must compute again."""
        return bool(self.sequence.token_ids) and not self.idle

    @property
    def exact(self) -> bool:
        """Whether a prefill needs an engine of the same configuration: the tokens are compared, or must be the same."""
        return bool(self.numerics) or any(guest.exact for guest in self.guests)

    def affinity(self) -> Collection[Address]:
        """Returns the engines on which other choices of the same prompt run, and those that have the sequence's KV."""
        copies_at = self.stored.copies_at if self.stored is not None else None
        wanted = [one for one in (self.preferred, copies_at) if one is not None]
        if self.returns or len(self.messages.sequences) == 1:
            return wanted
        choices = self.messages.choices(self.index)
        return {*wanted, *(one.engine for one in choices if one.engine is not None and one.phase is not Phase.DONE)}

    def readers(self, engines: Sequence[Heartbeat]) -> Collection[Address]:
        """Returns the engines that read the KV of the sequence instead of computing it."""
        stored = self.stored
        if stored is None or self.num_tokens + len(self.sequence.token_ids) <= limits.KV_TIER_TOKENS_MIN:
            return ()
        return {Address(engine.id, engine.instance_id) for engine in engines if stored.is_read_by(engine)}

    def fitting(self, engines: Sequence[Heartbeat]) -> list[Heartbeat]:
        """Returns the engines on which the sequence may run.

        Raises ServiceError if the model has ready engines but none with the configuration of the earlier output, or if
        the only engine that may run the request accepts no sequences.
        """
        found = list(engines)
        if self.numerics:
            ready = ready_members(engines, self.model)
            found = [engine for engine in ready if configuration_of(engine) == self.numerics]
            if ready and not found:
                text = "No engine with the numerics that this output began with is left, and no other may continue it."
                raise ServiceError("engine_failure", f"{text} Send the request again.")
        for guest in self.guests:
            found = list(guest.eligible(found, self.model))
        if wanted := self.messages.request.guests.engine:
            found = [engine for engine in found if engine.id == wanted]
            if not ready_members(found, self.model):
                text = f"No engine {wanted!r} of the model {self.model!r} takes requests."
                raise ServiceError("no_engine", text, param="engine")
        return found

    def placed_on(self, engine: Heartbeat) -> None:
        """Records the engine of a placement."""
        self.preferred, self.stored, self.returns = None, None, False
        if isinstance(engine.status, EngineStatus) and engine.status.deterministic:
            self.numerics = engine.status.configuration

    def returns_to(self, engine: Address) -> None:
        """Has the next placement return to an engine that was silent, if it is ready again by then."""
        self.preferred, self.returns = engine, True

    def prefill_of_sibling(self, engine: Address) -> Prefill | None:
        """Returns the prefill for which another choice of the prompt waits on the engine; None if there is none."""
        for one in self.messages.choices(self.index):
            if one is not self.sequence and one.engine == engine and one.prefill is not None:
                return one.prefill._replace(leads=False)
        return None

    @property
    def takes_kv(self) -> bool:
        """Whether another engine may compute the prompt: not with log probabilities of the prompt, nor for beams."""
        return self.has_text and not self.searches and not self.sequence.needs_prompt_logprobs


def candidates_of(
    owner: PlacementClient, messages: RequestMessages, number: int, guests: Sequence[RequestGuest] = ()
) -> list[Candidate]:
    """Returns a candidate for each sequence of a request. `number`: the request's number in the order of arrival."""
    request, found = messages.request, list[Candidate]()
    former = () if request.guests.resumed is None else request.guests.resumed.engines
    max_tokens = request.params.max_tokens or limits.OUTPUT_ESTIMATE_TOKENS
    for index, sequence in enumerate(messages.sequences):
        prompt = messages.prompt(index)
        num_tokens = prompt.num_tokens
        candidate = Candidate(
            model=messages.card.served_by,
            priority=request.priority,
            arrival=(number, index),
            client=request.origin.client,
            cost=num_tokens + min(max_tokens, limits.OUTPUT_ESTIMATE_TOKENS),
            idle_until=messages.idle_until,
            owner=owner,
            messages=messages,
            index=index,
            sequence=sequence,
            num_tokens=num_tokens,
            blocks=block_names(prompt.block_hashes),
            has_text=request.pooling is None,
            searches=request.params.beam is not None,
            guests=guests,
        )
        if index < len(former) and (engine := former[index]) is not None:
            candidate.returns_to(Address(*engine))
        found.append(candidate)
    return found
