"""Every message that crosses the bus, and nothing else: no logic, no defaults that think.

A message is a frozen struct that `shared.codec` writes as one msgpack array, its type's name first. Fields are only
ever appended, with a default, so that an older reader skips what it does not know. The major version is part of the
subject (`shared.subjects`). Token lists of unbounded length travel as `bytes`: little-endian u32 (`codec.pack_ids`).

Names: a command is imperative (`Submit`), a fact is a noun (`TokenEvents`). `request_id` names one sequence on one
engine: a request with `n` choices or several prompts is several sequences, each with an id of its own. `epoch` counts
the placements of a sequence; the gateway's request actor alone moves it. A token's place in the output is its number.
"""

from typing import Literal

import msgspec

from shared.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
ServiceState = Literal["starting", "ready", "draining"]
ServiceName = Literal["gateway", "tokenizer", "engine", "detokenizer"]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that can stand alone on the bus."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of what only occurs inside a message."""


# --- any service ------------------------------------------------------------------------------------------------------


class ErrorReply(Message, frozen=True, array_like=True, tag=True):
    """The answer to a request that failed. `code` is a key of `shared.errors.CODES`; `message` is for the user."""

    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class Ack(Message, frozen=True, array_like=True, tag=True):
    """The answer to a command that was carried out and has nothing to return."""

    request_id: str


# --- tokenizer --------------------------------------------------------------------------------------------------------


class ChatMessage(Part, frozen=True, array_like=True):
    """One turn. `token_ids` (packed) replaces `content` for pre-tokenised turns."""

    role: str
    content: str
    name: str = ""
    token_ids: bytes = b""


class TokenizeRequest(Message, frozen=True, array_like=True, tag=True):
    """Text or a conversation to token ids, checked against the context length.

    Either `prompts` (one reply item each) or `messages` (one reply item: the rendered conversation) is set.
    """

    request_id: str
    model: str
    prompts: tuple[str, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    max_model_len: int = 0
    """Longest context, prompt and output together; 0: no check."""
    max_tokens: int = 0
    """Output tokens asked for; 0: as many as fit, at least one."""
    block_size: int = 0
    """Tokens per KV block to hash for placement and prefix caching; 0: no hashes."""
    cache_salt: bytes = b""
    return_tokens: bool = False
    """Also return each token's own text."""


class TokenizedPrompt(Part, frozen=True, array_like=True):
    """`block_hashes`: `shared.blocks.HASH_BYTES` for each full block, chained."""

    token_ids: bytes
    block_hashes: bytes = b""
    tokens: tuple[str, ...] = ()


class TokenizeReply(Message, frozen=True, array_like=True, tag=True):
    """One item for each prompt, or one for the conversation."""

    request_id: str
    prompts: tuple[TokenizedPrompt, ...]


class DetokenizeRequest(Message, frozen=True, array_like=True, tag=True):
    """Token ids to text, whole: the `/detokenize` endpoint, not the stream."""

    request_id: str
    model: str
    token_ids: bytes


class DetokenizeReply(Message, frozen=True, array_like=True, tag=True):
    """The text of a `DetokenizeRequest`."""

    request_id: str
    text: str


# --- engine: commands -------------------------------------------------------------------------------------------------


class Submit(Message, frozen=True, array_like=True, tag=True):
    """Run one sequence. Answered by `SubmitReply`; its tokens then go to `sink` as `TokenEvents`.

    `output_token_ids` are tokens that were already generated elsewhere: they count as output (penalties, min_tokens,
    positions), and generation goes on behind them. A `family` begins alike and is computed once: choices of a prompt.
    """

    request_id: str
    epoch: int
    gateway_id: str
    gateway_boot: str
    sink: str
    """The detokenizer's token subject."""
    prompt_token_ids: bytes
    params: SamplingParams
    output_token_ids: bytes = b""
    block_hashes: bytes = b""
    cache_salt: bytes = b""
    priority: int = 0
    family: str = ""


SubmitStatus = Literal["accepted", "duplicate", "stale_epoch", "tombstoned", "busy", "invalid"]


class SubmitReply(Message, frozen=True, array_like=True, tag=True):
    """What became of a `Submit`. `code` and `message` say why when it is `busy` or `invalid`."""

    request_id: str
    epoch: int
    status: SubmitStatus
    engine_id: str
    engine_boot: str
    code: str = ""
    message: str = ""
    retry_after_s: float = 0.0


class Cancel(Message, frozen=True, array_like=True, tag=True):
    """Stop a sequence at this epoch or below and refuse late submits of it. Idempotent.

    With the reason `stop` (a detokenizer found a stop string) the engine keeps the tokens until the owner says `Done`;
    with any other it forgets them. Apart from that the reason is for the trace.
    """

    request_id: str
    epoch: int
    reason: str = ""


class Done(Message, frozen=True, array_like=True, tag=True):
    """The owner has every token of a finished sequence: the engine may forget it."""

    request_id: str
    epoch: int


class Resend(Message, frozen=True, array_like=True, tag=True):
    """A gap was seen: publish the tokens from `position` on again, to the sequence's sink."""

    request_id: str
    epoch: int
    position: int


class Retarget(Message, frozen=True, array_like=True, tag=True):
    """Send a sequence's tokens to another detokenizer, from `position` on. Answered by `Ack`."""

    request_id: str
    epoch: int
    sink: str
    position: int


# --- engine: facts ----------------------------------------------------------------------------------------------------


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

    request_id: str
    epoch: int
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
    engine_boot: str
    step: int
    events: tuple[TokenEvent, ...]


# --- detokenizer ------------------------------------------------------------------------------------------------------


class OpenStream(Message, frozen=True, array_like=True, tag=True):
    """Turn a sequence's tokens into text and send it to `reply_subject` as `TextEvents`. Answered by `Ack`.

    Opening a stream that is open replaces it. `output_token_ids` are tokens that the owner has already: they are taken
    in first, and text is sent from character `text_offset` on, so that a stream can move to another detokenizer.
    """

    request_id: str
    epoch: int
    model: str
    reply_subject: str
    engine_subject: str
    """The engine's control subject, for `Resend` and for `Cancel` at a stop string."""
    prompt_token_ids: bytes = b""
    """The prompt's last few tokens: a byte-level tokenizer needs them to join the first output token."""
    output_token_ids: bytes = b""
    text_offset: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class CloseStream(Message, frozen=True, array_like=True, tag=True):
    """Forget a stream at this epoch or below. Idempotent."""

    request_id: str
    epoch: int


class TokenText(Part, frozen=True, array_like=True):
    """A token's log probability with its text; `token_bytes` are the exact bytes it stands for."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float


class PositionLogprobs(Part, frozen=True, array_like=True):
    """The chosen token at one position and the alternatives to it."""

    chosen: TokenText
    top: tuple[TokenText, ...] = ()


class TextEvent(Part, frozen=True, array_like=True):
    """What a sequence gained: tokens at [position, position + len(token_ids)), text from character `text_offset` on.

    Text may lag behind tokens (an unfinished character, a possible stop string); the last event has all of it.
    """

    request_id: str
    epoch: int
    position: int
    token_ids: tuple[int, ...]
    text_offset: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the sequence; None for the model's own end token."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    error_code: str = ""
    error_message: str = ""


class TextEvents(Message, frozen=True, array_like=True, tag=True):
    """The text of one `TokenEvents` message for one gateway. `step`: the engine step it came from."""

    detokenizer_id: str
    detokenizer_boot: str
    engine_id: str
    engine_boot: str
    step: int
    events: tuple[TextEvent, ...]


# --- presence ---------------------------------------------------------------------------------------------------------


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


class StreamStatus(Part, frozen=True, array_like=True, tag=True):
    """A detokenizer's load."""

    num_streams: int = 0
    text_events: int = 0
    resends: int = 0


class PoolStatus(Part, frozen=True, array_like=True, tag=True):
    """A tokenizer's load."""

    num_requests: int = 0
    num_tokens: int = 0


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
