"""The core's input and output types for a sequence: `SequenceSpec` and `Outcome`."""

from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from services.engine.core.plan import PlacedPicture, SampledLogprobs
from shared.messages import FinishReason, KvSource, PromptLogprobs
from shared.parameters.pooling import PoolingParams
from shared.parameters.sampling import SamplingParams


class Adapter(Protocol):
    """A LoRA adapter or a prompt adapter that is loaded. It stays loaded as long as anything refers to this object."""

    @property
    def num_virtual_tokens(self) -> int:
        """Of a prompt adapter: number of learned vectors that come before the prompt; 0 for a LoRA adapter."""
        ...

    @property
    def version(self) -> str:
        """Hash of the adapter's files, in hexadecimal digits. Equal versions have equal weights."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to run.

    `output_token_ids` were generated already, elsewhere, and count as output. `block_hashes` are the hashes of the full
    blocks of prompt and output; the list may be shorter or empty, and the core computes the missing ones. Lower
    `priority` runs first; within a priority, lower `arrival` runs first.
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    cache_salt: bytes = b""
    priority: int = 0
    arrival: int = 0
    sequence_group: str = ""
    """Sequences of one group and cache salt share the KV of their common prefix while they run. Empty: no group."""
    client: str = ""
    """Clients share the engine by their weights, see `waiting`; empty: no client. With clients `priority` is the order
    among the sequences of one client only."""
    client_weight: float = 1.0
    client_priority: int = 0
    pooling: PoolingParams | None = None
    """If set, the sequence generates no tokens: it ends with one outcome that has the vector of its prompt."""
    kv_source: KvSource | None = None
    """The engine that sends the KV of prompt and output; None: it is computed here."""
    kv_transfer_id: str = ""
    """If set, the KV of the prompt is sent to the engine that asks for the transfer with this name."""
    adapter: Adapter | None = None
    """The LoRA adapter with which the sequence is computed. `cache_salt` must then be that of `adapter_salt`."""
    prompt_adapter: Adapter | None = None
    """The prompt adapter whose virtual tokens come before the prompt; `cache_salt` likewise. The virtual tokens count
    towards the context and not as prompt tokens."""
    pictures: tuple[PlacedPicture, ...] = ()
    """The pictures of the prompt, in order. Not together with a prompt adapter."""
    hidden: bool = False
    """The engine's own test sequence (`canary`), see `scheduler`: always computed, never counted or reported."""
    idle_until_s: float = 0.0
    """Until this time of the caller's clock the sequence is idle work, which gives way to all other sequences
    (`idle_lane`); 0: it is an ordinary sequence."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the output, virtual tokens included."""
        virtual = 0 if self.prompt_adapter is None else self.prompt_adapter.num_virtual_tokens
        return virtual + len(self.prompt_token_ids)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters of the sequence, of both kinds."""
        return tuple(each for each in (self.adapter, self.prompt_adapter) if each is not None)


def with_adapter(spec: SequenceSpec, adapter: Adapter) -> SequenceSpec:
    """Returns the spec with an adapter of either kind."""
    if adapter.num_virtual_tokens:
        return replace(spec, prompt_adapter=adapter)
    return replace(spec, adapter=adapter)


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a step gave one sequence, at output positions [position, position + len(token_ids)).

    A pooling sequence has one outcome, without tokens: it has the `vector`, and its finish reason is `stop`.
    """

    sequence_id: str
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledLogprobs, ...] = ()
    """One entry for each token if the sequence asked for log probabilities, else empty."""
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    first_scheduled_step: int = 0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """With the first token, if the sequence asked for them: the log probabilities of the prompt, in order."""
    vector: bytes = b""
    """See `TokenEvent.vector`."""
