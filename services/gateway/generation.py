"""The seam between the HTTP edge and the request actors: what is asked, and what comes back.

The edge (`app`, `openai_api`, `sse`) knows HTTP and nothing of the bus; the actors (`actor`, `owner`, `placement`) know
the bus and nothing of HTTP. Both know this file.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.errors import ServiceError
from shared.messages import ChatMessage, FinishReason, PositionLogprobs
from shared.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One accepted HTTP request. Exactly one of `texts`, `token_ids` and `messages` is set.

    `params.max_tokens` 0 means as many as fit (chat's default); the actor replaces it when the prompt's length is
    known. `n` choices for each prompt: sequence index = prompt index * n + choice. Choice c > 0 samples with a seed
    derived from the request's, so that the choices differ.
    """

    request_id: str
    model: str
    params: SamplingParams
    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    cache_salt: bytes = b""
    priority: int = 0
    trace_headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one sequence gained since its last update. The one with a `finish_reason` is its last."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    text_offset: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0


class Generation(Protocol):
    """A request under way. Ends exactly once: the updates run out, or raise ServiceError."""

    @property
    def prompt_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """Each prompt's tokens; known once the first update is there."""
        ...

    def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Batches of updates, in order for each sequence. Raises ServiceError for the whole request."""
        ...

    async def cancel(self, reason: str) -> None:
        """Stops everything that is still running. Idempotent; safe after the end."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that live engines serve. `path` is where it was loaded from.

    `configuration` lists the different `EngineStatus.configuration` of its engines, sorted.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    created: int
    aliases: tuple[str, ...] = ()
    """Further names that requests may give."""
    configuration: tuple[str, ...] = ()


RETRY_AFTER_S = 1.0
"""What a client is told to wait before it asks a busy server again."""


def find_model(cards: Sequence[ModelCard], name: str | None) -> ModelCard:
    """The model a request means: by the name it is served under, the path it was loaded from, or an alias.

    None, '' and 'default' mean the only or first one. Raises ServiceError('model_not_found') or, without any model,
    ServiceError('no_engine').
    """
    if not cards:
        raise ServiceError("no_engine", "No engine is ready yet. Try again shortly.", retry_after_s=RETRY_AFTER_S)
    if name in (None, "", "default"):
        return cards[0]
    for card in cards:
        if name in (card.name, card.path):
            return card
    for card in cards:
        if name in card.aliases:
            return card
    known = ", ".join(repr(card.name) for card in cards)
    raise ServiceError("model_not_found", f"The model {name!r} does not exist. Served here: {known}.", param="model")


class Backend(Protocol):
    """What the HTTP edge asks of the gateway's actor."""

    def models(self) -> list[ModelCard]:
        """The models that engines announce now."""
        ...

    def resolve_model(self, name: str | None) -> ModelCard:
        """See `find_model`."""
        ...

    def generate(self, request: GenerationRequest) -> Generation:
        """Accepts a request and starts it. Raises ServiceError when it is refused (overload, draining)."""
        ...

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        """Token ids (and each token's text, when asked for) of the request's texts or conversation."""
        ...

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """The text of token ids."""
        ...

    def ready(self) -> str:
        """Empty when requests can be served; else what is missing, in a sentence."""
        ...
