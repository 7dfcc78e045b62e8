"""One generation over HTTP: everything about the request that the shape of its answer depends on."""

import hashlib
import time
from dataclasses import dataclass
from typing import Literal

from services.gateway.generation import GenerationRequest, ModelCard

Kind = Literal["completion", "chat"]
ID_PREFIX: dict[Kind, str] = {"completion": "cmpl-", "chat": "chatcmpl-"}


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, in Unix seconds for people and monotonic seconds for measuring."""

    created: int
    started_s: float

    @classmethod
    def now(cls) -> "Arrival":
        """To be taken before anything else is done for the request."""
        return cls(int(time.time()), time.perf_counter())


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`echoes`: what stands before each prompt's answers; empty strings unless the request asked for an echo."""

    kind: Kind
    arrival: Arrival
    card: ModelCard
    request: GenerationRequest
    stream: bool
    include_usage: bool
    echoes: tuple[str, ...]
    return_token_ids: bool = False

    @property
    def id(self) -> str:
        """The response's id; its random part is the request's id."""
        return ID_PREFIX[self.kind] + self.request.request_id

    @property
    def num_sequences(self) -> int:
        """Choices of all prompts."""
        return len(self.echoes) * self.request.n

    def echo(self, index: int) -> str:
        """What stands before one choice's text."""
        return self.echoes[index // self.request.n]


def system_fingerprint(card: ModelCard) -> str:
    """Changes with everything that can change the tokens of a seeded request: the model, its limits, its engines.

    While engines of different configurations serve the model (during an update, say), it is that of their mixture.
    """
    told = f"{card.name}\0{card.path}\0{card.max_model_len}\0{card.vocab_size}\0{' '.join(card.configuration)}"
    return "fp_" + hashlib.sha256(told.encode()).hexdigest()[:12]
