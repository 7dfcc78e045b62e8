"""Heartbeats, which show that a service process is alive and report its load. See the package.

The size of a heartbeat does not depend on the number of live sequences. The state of single sequences is exchanged
between the two services that hold them (`ProgressQuery`, `OwnershipQuery`).
"""

import msgspec

from antiphon.shared.messages.base import Message, Part, ServiceName, ServiceState
from antiphon.shared.messages.engine_counters import EngineCounters, EngineLoad


class HistogramCounts(Part, frozen=True, array_like=True):
    """A histogram with the bounds of `observability.histograms`: counts (the last is above all bounds) and sum."""

    counts: tuple[int, ...] = ()
    sum: float = 0.0


class EngineHistograms(Part, frozen=True, array_like=True, kw_only=True):
    """Histograms of an engine since its start: tokens of steps, seconds of phases and preemptions of its sequences."""

    step_tokens: HistogramCounts = HistogramCounts()
    queue_s: HistogramCounts = HistogramCounts()
    inference_s: HistogramCounts = HistogramCounts()
    prefill_s: HistogramCounts = HistogramCounts()
    decode_s: HistogramCounts = HistogramCounts()
    preemptions: HistogramCounts = HistogramCounts()


class ModelFacts(Part, frozen=True, array_like=True, kw_only=True):
    """What the files of a model say about it; 0 and "" for what they do not say."""

    architecture: str = ""
    """`model_type` of config.json, such as `llama`."""
    num_parameters: int = 0
    weight_bytes: int = 0
    """Size of all weight files."""
    file_format: str = ""
    """`safetensors`, `gguf` or `pytorch`."""
    quantization: str = ""
    """Type of most of a GGUF file's weights, method of a quantized checkpoint, or data type: `Q4_K`, `AWQ`, `BF16`."""
    on_device: bool = False
    """Whether the weights are in the memory of a GPU."""
    digest: str = ""
    """Hash of config.json and of samples of the weight files, whatever they are computed with."""


class SleepStatus(Part, frozen=True, array_like=True, kw_only=True):
    """Whether an engine sleeps, and how long it took to wake."""

    level: int = 0
    """0: awake, or still falling asleep; 1: without KV cache; 2: without weights too."""
    on_demand: bool = False
    """Whether a waiting sequence wakes it: it has fallen asleep by itself, or was told so."""
    num_wakes: int = 0
    """How often the engine has woken since its start; a counter."""
    wake_s: float = 0.0
    """Seconds that this took together; a counter."""
    last_wake_s: float = 0.0


class EngineStatus(Part, frozen=True, array_like=True, tag=True, kw_only=True):
    """The engine's model, capacity and load, by which gateways place sequences, and its counters."""

    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    load: EngineLoad = EngineLoad()
    counters: EngineCounters = msgspec.field(default_factory=EngineCounters)
    finished: tuple[tuple[str, int], ...] = ()
    """Number of sequences that have ended, by finish reason."""
    model_aliases: tuple[str, ...] = ()
    """Other names that requests may use for `model`."""
    configuration: str = ""
    """Hash of everything besides the weights that can change tokens: data types, backend, hardware, software."""
    credits: int = 0
    """Number of further sequences that the engine can accept: its batch slots, plus as many for its queue
    (`limits.ENGINE_QUEUE_AHEAD`), minus its unfinished sequences; those of the idle lane do not count. Negative if
    there are more unfinished sequences than places.
    """
    embedding_size: int = 0
    """Number of components of the vectors of pooling sequences; 0 if the engine cannot compute them."""
    histograms: EngineHistograms = EngineHistograms()
    role: str = "both"
    """`prefill`: computes prompts for decode engines; `decode`: gets the KV of prompts from prefill engines; `both`:
    computes whole requests.
    """
    kv_address: str = ""
    """`host:port` at which a prefill engine's KV can be fetched; empty for other engines."""
    adapters_revision: int = -1
    """Revision of the desired state of the adapters that the engine follows (`shared/deployment/adapter_state.py`);
    0: there is none, -1: the engine serves no adapters."""
    takes_images: bool = False
    """Whether prompts may contain images."""
    content: str = ""
    """Hash of the weights, their quantization and the compute data type. Only engines with equal hashes exchange KV."""
    golden_digest: str = ""
    """Hash of the result of the engine's canary, a test sequence that clients do not see (`services/engine/canary`). It
    is equal for engines with equal weights and `configuration`. Empty: the engine does not test itself.
    """
    canary_runs: int = 0
    """How often the canary has run since the start; a counter."""
    batch_invariant: bool = False
    """Whether a sequence's tokens cannot depend on other sequences of the batch, so that the tokens of two engines can
    be compared."""
    deterministic: bool = False
    """Whether the engine was started with `--deterministic` and has checked that it is batch invariant."""
    generates: bool = True
    """Whether the model can generate text. False for a model without a language model head."""
    labels: tuple[str, ...] = ()
    """Names of the labels of the model's classification head; empty: it has none."""
    idle_credits: int = 0
    """Number of further sequences of the idle lane that the engine can accept. `credits` does not count sequences of
    the lane, because others preempt them; `idle_credits` counts all sequences.
    """
    step_tokens: int = 0
    """Largest number of prompt tokens that the engine computes in one step; 0: not known."""
    facts: ModelFacts = ModelFacts()
    kv_store: str = ""
    """Id of the directory with the KV that this engine stores, and reads with others; empty: it stores none."""
    kv_copies_at: str = ""
    """Id of the engine that keeps copies of this one's KV; empty: none does."""
    sleep: SleepStatus = SleepStatus()
    numerics: str = ""
    """What decides the last bits of a result, in words: backend, instruction set, quantization and data types."""
    version: str = ""
    """Version of the engine's software."""


class StreamStatus(Part, frozen=True, array_like=True, tag=True):
    """Load and counters of a detokenizer."""

    num_streams: int = 0
    text_events: int = 0
    resends: int = 0
    model: str = ""
    """Served name of the model whose tokens the detokenizer converts to text."""


class PoolStatus(Part, frozen=True, array_like=True, tag=True, kw_only=True):
    """Counters of a tokenizer."""

    num_requests: int = 0
    num_tokens: int = 0
    model: str = ""
    """Served name of the model whose prompts the tokenizer converts."""
    tool_format: str = ""
    """Name of the model's tool-call format, recognised from its chat template; empty: unknown. See
    `antiphon.shared.text.templates.template_formats`.
    """
    reasoning_format: str = ""
    """Name of the model's reasoning format, recognised in the same way; empty: unknown."""
    tokenizer_digest: str = ""
    """SHA-256 of the tokenizer's files (`shared/text/digests.py`); empty: there is no tokenizer."""
    template_digest: str = ""
    """SHA-256 of the chat template's text; empty: there is none."""


class VisionStatus(Part, frozen=True, array_like=True, tag=True, kw_only=True):
    """Counters of an image service: requested images, hits in its cache of embeddings, and tokens of encoded images."""

    model: str = ""
    """Served name of the model for which the service works."""
    num_requests: int = 0
    num_hits: int = 0
    num_tokens: int = 0
    cached_bytes: int = 0
    """Bytes of embeddings that are kept."""


class GatewayStatus(Part, frozen=True, array_like=True, tag=True, kw_only=True):
    """Load of a gateway: its requests, and its sequences that wait for engine credit.

    `accepted_requests` and `ended_requests` are counters since its start; their difference is `num_requests`.
    """

    num_requests: int = 0
    num_waiting: int = 0
    accepted_requests: int = 0
    ended_requests: int = 0
    num_idle_waiting: int = 0
    """The sequences of the idle lane among `num_waiting`."""
    errors: int = 0
    """Answers with an error since its start; a counter."""


class DeviceMemory(Part, frozen=True, array_like=True, kw_only=True):
    """The memory of a GPU that a process computes on, including what other processes use of it."""

    index: int
    """Number of the device on its machine, as nvidia-smi counts."""
    name: str
    used_bytes: int
    total_bytes: int


class ProcessResources(Part, frozen=True, array_like=True, kw_only=True):
    """What a service process and the processes that it has started use of their machine."""

    cpu_s: float
    """Processor time since the start, seconds, also of children that have ended; a counter."""
    num_cores: int
    """Processors that the process may use."""
    rss_bytes: int
    """Resident memory of the process, and of its children the part that is not backed by files or shared memory, so
    that what several of them map counts once.
    """
    gpus: tuple[DeviceMemory, ...] = ()


class MemberEnded(Message, frozen=True, array_like=True, tag=True):
    """Sent by a launcher when a member's process has ended. Gateways then ask the bus whether it has really ended."""

    service: ServiceName
    member_id: str


class Heartbeat(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Shows that a service process is alive.

    `instance_id` is random for each process start, so a restarted process has a new address.
    """

    service: ServiceName
    id: str
    instance_id: str
    protocol: int
    state: ServiceState
    sequence: int
    interval_s: float
    status: EngineStatus | StreamStatus | PoolStatus | GatewayStatus | VisionStatus
    messages_received: int = 0
    """Bus messages since the start of the process; those of a separate connection for heartbeats may not be counted."""
    messages_sent: int = 0
    num_subscriptions: int = 0
    """Subscriptions of the process on the same connection."""
    resources: ProcessResources | None = None
    """None: not known, because the process is older or its system does not say."""
