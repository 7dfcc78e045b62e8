"""Messages to an engine (commands) and from an engine (tokens). See the package."""

from typing import Literal, get_args

from antiphon.shared.messages.base import FinishReason, Message, Part, SequenceRef
from antiphon.shared.messages.vision import PromptImage
from antiphon.shared.parameters.pooling import PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams

# --- commands ---------------------------------------------------------------------------------------------------------


class KvSource(Part, frozen=True, array_like=True):
    """The engine that computes the prompt of a sequence for another engine, and the name of the transfer.

    `address` is the `kv_address` of that engine's `EngineStatus`. The name `transfer_id` is random and secret: any
    process that knows it may fetch the blocks.
    """

    transfer_id: str
    address: str


class Submit(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Makes an engine run a sequence. Answered by `SubmitReply`; the tokens go to `reply_subject` as `TokenEvents`.

    `output_token_ids` are carried tokens: output that an earlier attempt generated. They count as output (penalties,
    min_tokens, positions), and generation continues after them. `sequence_group` is the id of the first choice of the
    same prompt (empty for a single choice): the engine computes the common prefix of a group's sequences once.
    """

    sequence_id: str
    attempt: int
    gateway_id: str
    gateway_instance_id: str
    reply_subject: str
    """Token subject of the detokenizer, or of the gateway for a pooling sequence, which has no text."""
    prompt_token_ids: bytes
    params: SamplingParams
    output_token_ids: bytes = b""
    block_hashes: bytes = b""
    cache_salt: bytes = b""
    priority: int = 0
    sequence_group: str = ""
    traceparent: str = ""
    """W3C trace context of the request; empty without tracing. A field, not a header: a batch has one per sequence."""
    tracestate: str = ""
    client: str = ""
    """Name of the API key, empty without keys. Clients share an engine in proportion to their weights. `priority` is
    then the order among the sequences of one client, `client_priority` the order among clients; sequences with lower
    numbers run first."""
    client_weight: float = 1.0
    client_priority: int = 0
    pooling: PoolingParams | None = None
    """If set, the sequence generates no tokens: its only event has the vector of the prompt. `params` has no effect."""
    recorded: bool = False
    """Whether the gateway keeps a record of the request: the engine then sends `StepEvents` for it."""
    kv_source: KvSource | None = None
    """The engine from which this one fetches the KV of prompt and output. If the transfer fails, this engine computes
    the KV itself."""
    kv_transfer_id: str = ""
    """If set, the engine computes the prompt for another engine, which fetches the KV under this name. Only one output
    token is generated, and no event is published: `reply_subject` is empty.
    """
    adapter: str = ""
    """Name of the LoRA adapter that the sequence is computed with; empty: none."""
    adapter_version: str = ""
    """Hash of the adapter's files. `cache_salt` is then the result of `blocks.adapter_salt`. An engine that does not
    have this version answers `busy` while it reads the desired state of the model's adapters.
    """
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, in order. The engine reads their embeddings before it queues the sequence."""
    idle_s: float = 0.0
    """Seconds for which the sequence is in the idle lane, in which sequences outside the lane preempt it. 0: it is not
    in the lane."""
    kv_keep_s: float = 0.0
    """Seconds for which the KV of the prompt is to be kept on the engine's disk, if it has one; at most
    `limits.KV_KEEP_S_MAX`. 0: as long as there is room."""


class SubmitBatch(Message, frozen=True, array_like=True, tag=True):
    """Runs the sequences that one gateway places on one engine at the same time. Answered by `SubmitBatchReply`.

    A batch has at most `limits.SUBMIT_BATCH_MAX` sequences, and at most `limits.BATCH_BYTES_MAX` bytes unless it has a
    single sequence. The engine admits or refuses each sequence separately.
    """

    submits: tuple[Submit, ...]


SubmitStatus = Literal["accepted", "duplicate", "stale_attempt", "tombstoned", "busy", "invalid"]


class SubmitReply(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """The result of a `Submit`. `code` and `message` give the reason if `status` is `busy` or `invalid`."""

    sequence_id: str
    attempt: int
    status: SubmitStatus
    engine_id: str
    engine_instance_id: str
    code: str = ""
    message: str = ""
    retry_after_s: float = 0.0


class SubmitBatchReply(Message, frozen=True, array_like=True, tag=True):
    """One reply for each sequence of a `SubmitBatch`, in the order of the batch."""

    replies: tuple[SubmitReply, ...]


class Cancel(Message, frozen=True, array_like=True, tag=True):
    """Ends a sequence whose attempt is at most `attempt`; later submits up to this attempt are refused. Idempotent.

    With the reason `stop` (a detokenizer found a stop string) the engine ends the sequence at exactly this attempt and
    keeps its tokens until the owner sends `Done`. With any other reason the engine forgets the tokens; the other
    reasons have no effect of their own.
    """

    sequence_id: str
    attempt: int
    reason: str = ""


class Done(Message, frozen=True, array_like=True, tag=True):
    """Tells the engine that the owner has all tokens of a finished sequence; the engine drops its state."""

    sequence_id: str
    attempt: int


class Resend(Message, frozen=True, array_like=True, tag=True):
    """Makes an engine publish a sequence's tokens from `position` on again. Sent when tokens are missing.

    The tokens go to the sequence's reply subject.
    """

    sequence_id: str
    attempt: int
    position: int


class SelfTest(Message, frozen=True, array_like=True, tag=True):
    """Makes an engine run its canary (a test sequence no client sees) and check all weights. Answer: `SelfTestReply`.

    `ends`: the engine has lost a comparison with another one, and must exit after the test in any case.
    """

    test_id: str
    reply_subject: str
    ends: bool = False


class SelfTestReply(Message, frozen=True, array_like=True, tag=True):
    """The answer to a `SelfTest`. `fault`: the fault that the engine found; empty: none."""

    test_id: str
    engine_id: str
    engine_instance_id: str
    fault: str = ""


class Retarget(Message, frozen=True, array_like=True, tag=True):
    """Makes an engine send a sequence's tokens to another detokenizer, from `position` on. Answered by `Ack`.

    A pooling sequence has no detokenizer: its reply subject remains that of the gateway, and the engine sends the
    vector again if it has been computed.
    """

    sequence_id: str
    attempt: int
    reply_subject: str
    position: int


class Withdraw(Message, frozen=True, array_like=True, tag=True):
    """Starts or ends the draining of an engine by an operator. Answered by `Ack` without a sequence.

    While it is withdrawn, the engine accepts no sequences and its heartbeats say `draining`; gateways move its
    sequences to other engines.
    """

    withdrawn: bool


SleepMode = Literal["wait", "keep", "abort"]


class Sleep(Message, frozen=True, array_like=True, tag=True):
    """Has an engine fall asleep: it frees its KV cache and, with `level` 2, its weights. Answered by `Ack`.

    `level` is 1 or 2; an engine that cannot free the KV cache alone sleeps at level 2. The engine accepts no more
    sequences, and its heartbeats say `sleeping`. `mode` says what happens to its sequences: `wait`: they move to other
    engines or end there first; `keep`: they go back to their gateways and wait; `abort`: they end with an error. The
    answer comes at once; `EngineStatus.sleep` tells when the engine sleeps.
    """

    level: int = 1
    mode: SleepMode = "wait"
    on_demand: bool = False
    """Whether a sequence that waits for the model wakes the engine."""


class Wake(Message, frozen=True, array_like=True, tag=True):
    """Wakes an engine, or keeps it from falling asleep. Answered by `Ack`, at once. Idempotent.

    `on_demand`: sent for a sequence that waits; without effect on an engine that an operator has put to sleep.
    """

    on_demand: bool = False


class ProgressQuery(Message, frozen=True, array_like=True, tag=True):
    """Asks an engine how many output tokens some sequences have: those whose text has not arrived for `limits.STALL_S`.

    A gateway sends the query. The engine answers with `ProgressReply` to `reply_subject`, the gateway's control
    subject; if the answer is lost, the gateway asks again. A query has at most `limits.LIVENESS_BATCH_MAX` sequences.
    The query also confirms that the gateway owns these sequences (see `OwnershipQuery`).
    """

    gateway_id: str
    gateway_instance_id: str
    reply_subject: str
    sequences: tuple[SequenceRef, ...]


# --- facts ------------------------------------------------------------------------------------------------------------


class SequenceMark(Part, frozen=True, array_like=True):
    """Progress of a sequence. `num_output_tokens` is the number of its output tokens, carried tokens included."""

    sequence_id: str
    attempt: int
    num_output_tokens: int
    finished: bool = False
    """The sequence has ended; the engine keeps its tokens until the owner sends `Done`."""


class ProgressReply(Message, frozen=True, array_like=True, tag=True):
    """The answer to a `ProgressQuery`: a mark for each sequence that the engine has; `missing` lists the others."""

    engine_id: str
    engine_instance_id: str
    marks: tuple[SequenceMark, ...] = ()
    missing: tuple[SequenceRef, ...] = ()


class TopLogprob(Part, frozen=True, array_like=True):
    """One candidate token and its log probability (natural log, of the raw distribution)."""

    token_id: int
    logprob: float


class TokenLogprobs(Part, frozen=True, array_like=True):
    """The chosen token's log probability and the most likely candidates, most likely first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class PromptLogprobs(Part, frozen=True, array_like=True, kw_only=True):
    """Log probabilities of consecutive tokens of a prompt, each given the tokens before it, with `num_top` candidates.

    The lists are packed: token ids as little-endian u32 (`codec.pack_ids`), log probabilities as little-endian float32.
    """

    start: int
    """Position of the first of the tokens in the prompt. The first token of a prompt has no probability: its entry, the
    only one with start 0, has NaN and no candidates."""
    token_ids: bytes
    logprobs: bytes
    num_top: int = 0
    top_token_ids: bytes = b""
    """`num_top` candidates for each token, most likely first."""
    top_logprobs: bytes = b""
    ranks: bytes = b""
    """For each token the number of tokens that are likelier, plus one (`codec.pack_ids`); 0 for the first of a prompt.
    Empty: not known."""


class TokenEvent(Part, frozen=True, array_like=True, kw_only=True):
    """The tokens of one sequence from one step, at output positions [position, position + len(token_ids))."""

    sequence_id: str
    attempt: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the sequence; it is the last of `token_ids`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    cumulative_logprob: float = 0.0
    """Sum of the log probabilities of the tokens generated at this attempt, up to the end of this event. Carried tokens
    do not count."""
    error_code: str = ""
    error_message: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    """A part of the prompt's log probabilities. An event with such a part has no tokens. The parts are sent in the
    order of the prompt, before the event with the first output token."""
    vector: bytes = b""
    """For a pooling sequence: the components of its vector, little-endian float32."""


KvMiss = Literal["last", "new", "short", "no_room", "failed", "no_state", "results", "no_cache", "slow"]
KV_MISSES: tuple[KvMiss, ...] = get_args(KvMiss)
"""Why tokens of a prompt are computed. `last`: those of its last block, which are always. `new`: nobody that was asked
has their KV. `short`: so few are computed sooner than read. `no_room`: host memory for reading was full. `failed`: they
could not be read. `no_state`: the recurrent state, or the columns of windows, at that place were not kept. `results`:
the request needs results for each of them. `no_cache`: the engine has no prefix cache. `slow`: the
disk takes longer than computing."""


class KvOrigin(Part, frozen=True, array_like=True, gc=False, kw_only=True):
    """Where the KV of a prompt, with carried tokens, came from when it first ran on an engine, in tokens."""

    num_cached: int = 0
    """From the engine's KV cache."""
    num_stored: int = 0
    """From the disk."""
    num_received: int = 0
    """From a prefill engine."""
    num_computed: int = 0
    why: KvMiss = "last"
    """Why those of `num_computed` were computed."""


class SequenceSteps(Part, frozen=True, array_like=True, gc=False):
    """What the steps of a `StepEvents` message did for one sequence: rows as in `observability.step_rows`."""

    sequence_id: str
    attempt: int
    rows: bytes
    origin: KvOrigin | None = None
    """Set once, when the sequence has its first token."""


class StepEvent(Part, frozen=True, array_like=True, kw_only=True):
    """What one step did, and the load of the engine at the end of the step. Durations are by the engine's own clock."""

    step: int
    duration_us: int
    num_tokens: int
    """Tokens computed for all sequences of the step."""
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_sequences: int
    """Sequences in the step, including those that are not recorded."""
    preempted: tuple[SequenceRef, ...] = ()
    """Sequences that were preempted since the previous step and wait again."""


class StepEvents(Message, frozen=True, array_like=True, tag=True):
    """The steps that an engine has run since its last `StepEvents`, for gateways that record requests. Not answered.

    An engine sends them only for recorded sequences (`Submit.recorded`), at the latest after `limits.STEP_EVENTS_S`.
    They contain no prompts, tokens or text. If the events are too large for one message, `sequences` is divided among
    several messages, each of which has all `steps`.
    """

    engine_id: str
    engine_instance_id: str
    steps: tuple[StepEvent, ...]
    sequences: tuple[SequenceSteps, ...] = ()
    """The recorded sequences of these steps."""


class TokenEvents(Message, frozen=True, array_like=True, tag=True):
    """The tokens of one engine step for one detokenizer, or the vectors of pooling sequences for one gateway."""

    engine_id: str
    engine_instance_id: str
    step: int
    events: tuple[TokenEvent, ...]
