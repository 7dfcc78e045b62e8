"""That a service is alive, and how much it has to do. See the package."""

from shared.messages.base import Message, Part, ServiceName, ServiceState


class SequenceMark(Part, frozen=True, array_like=True):
    """How far a sequence has come: `high_water` is the number of output tokens generated."""

    request_id: str
    epoch: int
    high_water: int
    finished: bool = False
    """It has ended and waits for its owner's `Done`."""


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
    sequences: tuple[SequenceMark, ...] = ()
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


class LiveRequest(Part, frozen=True, array_like=True):
    """A sequence that a gateway still owns: an engine frees what no live gateway lists."""

    request_id: str
    epoch: int


class GatewayStatus(Part, frozen=True, array_like=True, tag=True):
    """A gateway's load and the sequences it owns."""

    num_requests: int = 0
    live: tuple[LiveRequest, ...] = ()


class Heartbeat(Message, frozen=True, array_like=True, tag=True):
    """A service is alive. `boot` is drawn anew at each process start, so that a restart is a new address."""

    service: ServiceName
    id: str
    boot: str
    protocol: int
    state: ServiceState
    sequence: int
    interval_s: float
    status: EngineStatus | StreamStatus | PoolStatus | GatewayStatus
