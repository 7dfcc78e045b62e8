"""To an engine: commands. From it: tokens. See the package."""

from typing import Literal

from shared.messages.base import FinishReason, Message, Part, SequenceRef
from shared.sampling import SamplingParams

# --- commands ---------------------------------------------------------------------------------------------------------


class Submit(Message, frozen=True, array_like=True, tag=True):
    """Run one sequence. Answered by `SubmitReply`; its tokens then go to `sink` as `TokenEvents`.

    `output_token_ids` are tokens that were already generated elsewhere: they count as output (penalties, min_tokens,
    positions), and generation goes on behind them. A `family` begins alike and is computed once: choices of a prompt.
    """

    sequence_id: str
    attempt: int
    gateway_id: str
    gateway_instance_id: str
    sink: str
    """The detokenizer's token subject."""
    prompt_token_ids: bytes
    params: SamplingParams
    output_token_ids: bytes = b""
    block_hashes: bytes = b""
    cache_salt: bytes = b""
    priority: int = 0
    family: str = ""
    traceparent: str = ""
    """W3C trace context of the request, empty without tracing. In the message because a batch has many of them."""
    tracestate: str = ""


class SubmitBatch(Message, frozen=True, array_like=True, tag=True):
    """Run these sequences: what one gateway places on one engine at a time. Answered by `SubmitBatchReply`.

    At most `limits.SUBMIT_BATCH_MAX` sequences, and `limits.BATCH_BYTES_MAX` bytes unless it is one. Each sequence is
    admitted or refused by itself.
    """

    submits: tuple[Submit, ...]


SubmitStatus = Literal["accepted", "duplicate", "stale_attempt", "tombstoned", "busy", "invalid"]


class SubmitReply(Message, frozen=True, array_like=True, tag=True):
    """What became of a `Submit`. `code` and `message` say why when it is `busy` or `invalid`."""

    sequence_id: str
    attempt: int
    status: SubmitStatus
    engine_id: str
    engine_instance_id: str
    code: str = ""
    message: str = ""
    retry_after_s: float = 0.0


class SubmitBatchReply(Message, frozen=True, array_like=True, tag=True):
    """One reply for each sequence of a `SubmitBatch`, in its order."""

    replies: tuple[SubmitReply, ...]


class Cancel(Message, frozen=True, array_like=True, tag=True):
    """Stop a sequence at this attempt or below and refuse late submits of it. Idempotent.

    With the reason `stop` (a detokenizer found a stop string) the engine keeps the tokens until the owner says `Done`;
    with any other it forgets them. Apart from that the reason is for the trace.
    """

    sequence_id: str
    attempt: int
    reason: str = ""


class Done(Message, frozen=True, array_like=True, tag=True):
    """The owner has every token of a finished sequence: the engine may forget it."""

    sequence_id: str
    attempt: int


class Resend(Message, frozen=True, array_like=True, tag=True):
    """A gap was seen: publish the tokens from `position` on again, to the sequence's sink."""

    sequence_id: str
    attempt: int
    position: int


class Retarget(Message, frozen=True, array_like=True, tag=True):
    """Send a sequence's tokens to another detokenizer, from `position` on. Answered by `Ack`."""

    sequence_id: str
    attempt: int
    sink: str
    position: int


class ProgressQuery(Message, frozen=True, array_like=True, tag=True):
    """A gateway asks how far sequences are whose tokens it has not seen for a while. Answered by `ProgressReply`.

    The answer goes to `reply_subject`, the gateway's control subject; a lost one is asked for again. At most
    `limits.LIVENESS_BATCH_MAX` sequences. A query also confirms that the gateway owns them (see `OwnershipQuery`).
    """

    gateway_id: str
    gateway_instance_id: str
    reply_subject: str
    sequences: tuple[SequenceRef, ...]


# --- facts ------------------------------------------------------------------------------------------------------------


class SequenceMark(Part, frozen=True, array_like=True):
    """How far a sequence has come: `high_water` is the number of output tokens generated, carried ones included."""

    sequence_id: str
    attempt: int
    high_water: int
    finished: bool = False
    """It has ended and waits for its owner's `Done`."""


class ProgressReply(Message, frozen=True, array_like=True, tag=True):
    """The engine's answer to a `ProgressQuery`: a mark for each sequence that it holds, and those that it does not."""

    engine_id: str
    engine_instance_id: str
    marks: tuple[SequenceMark, ...] = ()
    missing: tuple[SequenceRef, ...] = ()


class TopLogprob(Part, frozen=True, array_like=True):
    """One candidate token and its log probability (natural log, of the raw distribution)."""

    token_id: int
    logprob: float


class TokenLogprobs(Part, frozen=True, array_like=True):
    """The chosen token's log probability and the most likely candidates, best first."""

    logprob: float
    top: tuple[TopLogprob, ...] = ()


class TokenEvent(Part, frozen=True, array_like=True):
    """The tokens that one step gave one sequence, at output positions [position, position + len(token_ids))."""

    sequence_id: str
    attempt: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the sequence, which is then the last of `token_ids`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    cumulative_logprob: float = 0.0
    """Sum over all output tokens up to and including these."""
    error_code: str = ""
    error_message: str = ""


class TokenEvents(Message, frozen=True, array_like=True, tag=True):
    """One engine step's tokens for one detokenizer."""

    engine_id: str
    engine_instance_id: str
    step: int
    events: tuple[TokenEvent, ...]
