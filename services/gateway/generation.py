"""The seam between the HTTP edge and the request actors: what is asked, and what comes back.

The edge (`app`, `openai_api`, `sse`) knows HTTP and nothing of the bus; the actors (`actor`, `request_actor`) know
the bus and nothing of HTTP. Both know this file.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

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
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together; known once the first update is there."""
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


class Backend(Protocol):
    """What the HTTP edge asks of the gateway's actor."""

    def models(self) -> list[ModelCard]:
        """The models that can be used now, the default one first."""
        ...

    def resolve_model(self, name: str | None) -> ModelCard:
        """The model a request means; None, '' and 'default' mean the default model or, without one, the first by name.

        Raises ServiceError: 'model_not_found', or 'no_engine', 'no_tokenizer', 'no_detokenizer' for what it lacks now.
        """
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
