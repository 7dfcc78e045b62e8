"""That a service is alive, and how much it has to do. See the package.

A heartbeat's size does not depend on the number of live sequences: what concerns single ones is asked for between the
two services that hold them (`ProgressQuery`, `OwnershipQuery`).
"""

from shared.messages.base import Message, Part, ServiceName, ServiceState


class EngineStatus(Part, frozen=True, array_like=True, tag=True):
    """What a gateway needs to place requests on an engine, and counts from its start (cached tokens: not computed)."""

    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    max_num_seqs: int
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    step: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    finished: tuple[tuple[str, int], ...] = ()
    """Requests ended, by finish reason."""
    cached_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    model_aliases: tuple[str, ...] = ()
    """Further names that requests may give for `model`."""
    configuration: str = ""
    """Hash of what can change tokens beside the weights: types, computing backend, hardware, software."""
    credits: int = 0
    """Sequences that the engine wants now: its rows and as many ahead, minus what it holds. Negative: too many came."""


class StreamStatus(Part, frozen=True, array_like=True, tag=True):
    """A detokenizer's load."""

    num_streams: int = 0
    text_events: int = 0
    resends: int = 0
    model: str = ""
    """Served name of the model whose tokens it turns into text."""


class PoolStatus(Part, frozen=True, array_like=True, tag=True):
    """A tokenizer's load."""

    num_requests: int = 0
    num_tokens: int = 0
    model: str = ""
    """Served name of the model that it tokenizes for."""


class GatewayStatus(Part, frozen=True, array_like=True, tag=True):
    """A gateway's load: requests, and sequences that wait in it for an engine's credit."""

    num_requests: int = 0
    num_waiting: int = 0


class Heartbeat(Message, frozen=True, array_like=True, tag=True):
    """A service is alive. `instance_id` is drawn anew at each process start, so that a restart is a new address."""

    service: ServiceName
    id: str
    instance_id: str
    protocol: int
    state: ServiceState
    sequence: int
    interval_s: float
    status: EngineStatus | StreamStatus | PoolStatus | GatewayStatus
