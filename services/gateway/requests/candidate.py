"""A sequence that wants to be placed: what the dispatcher knows of it, and whom it tells what became of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.requests.messages import RequestMessages
from services.gateway.requests.placement_queue import Ticket
from services.gateway.requests.sequence_state import Address, Phase, SequenceState
from services.gateway.requests.service_clients import PeerUnavailableError
from shared.blocks import split_hashes
from shared.errors import ServiceError
from shared.messages import OpenStream, Submit

Failure = ServiceError | PeerUnavailableError
"""Why a message had no effect: a ServiceError is final, after PeerUnavailableError another member may be asked."""


class PlacementClient(Protocol):
    """The request of a candidate. The dispatcher calls it on the event loop; `index` is the sequence's."""

    def on_placed(self, index: int, open_failure: Failure | None) -> None:
        """The engine has it. If the stream could not be opened, it has to be rebuilt elsewhere."""
        ...

    def on_unplaced(self, index: int, engine: Address, detokenizer: Address, attempt: int) -> None:
        """The placement failed; both members may be told to forget it. The sequence has to be queued again."""
        ...

    def fail(self, error: ServiceError) -> None:
        """It cannot be served: the request ends."""
        ...


@dataclass(eq=False, slots=True)
class Candidate:
    """One sequence of a request."""

    client: PlacementClient
    orders: RequestMessages
    index: int
    sequence: SequenceState
    num_tokens: int
    hashes: Sequence[bytes]
    ticket: "Ticket[Candidate]" = field(init=False)
    avoid: set[Address] = field(default_factory=set[Address])
    """Members at which a placement of this sequence failed."""

    def near(self) -> set[Address]:
        """Engines where other choices of the same prompt run."""
        choices = self.orders.choices(self.index)
        return {one.engine for one in choices if one.engine is not None and one.phase is not Phase.DONE}

    def messages(self) -> tuple[Submit, OpenStream]:
        """What its engine and its detokenizer are told; both have been chosen."""
        return self.orders.submit(self.index), self.orders.open_stream(self.index)


def candidates_of(client: PlacementClient, orders: RequestMessages, number: int) -> list[Candidate]:
    """Every sequence of a request. `number`: the request's place in the order of arrival."""
    found: list[Candidate] = []
    for index, sequence in enumerate(orders.sequences):
        prompt = orders.prompt(index)
        hashes = split_hashes(prompt.block_hashes)
        candidate = Candidate(client, orders, index, sequence, prompt.num_tokens, hashes)
        candidate.ticket = Ticket(candidate, orders.card.name, orders.request.priority, (number, index))
        found.append(candidate)
    return found
