"""To a detokenizer: streams. From it: text. See the package."""

from shared.messages.base import FinishReason, Message, Part


class OpenStream(Message, frozen=True, array_like=True, tag=True):
    """Turn a sequence's tokens into text and send it to `reply_subject` as `TextEvents`. Answered by `Ack`.

    Opening a stream that is open replaces it. `output_token_ids` are tokens that the owner has already: they are taken
    in first, and text is sent from character `text_offset` on, so that a stream can move to another detokenizer.
    """

    sequence_id: str
    attempt: int
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
    traceparent: str = ""
    """W3C trace context of the request, empty without tracing."""
    tracestate: str = ""


class OpenBatch(Message, frozen=True, array_like=True, tag=True):
    """Open these streams: what one gateway places on one detokenizer at a time. Answered by `OpenBatchReply`.

    At most `limits.OPEN_BATCH_MAX` streams, and `limits.BATCH_BYTES_MAX` bytes unless it is one. It is sent together
    with the `SubmitBatch` of the same sequences, so tokens may arrive first: a detokenizer holds them for a moment.
    """

    streams: tuple[OpenStream, ...]


class OpenReply(Part, frozen=True, array_like=True):
    """What became of one stream of an `OpenBatch`: open when `code` is empty, else refused (see `ErrorReply`)."""

    sequence_id: str
    attempt: int
    code: str = ""
    message: str = ""
    param: str = ""
    retry_after_s: float = 0.0


class OpenBatchReply(Message, frozen=True, array_like=True, tag=True):
    """One reply for each stream of an `OpenBatch`, in its order."""

    replies: tuple[OpenReply, ...]


class CloseStream(Message, frozen=True, array_like=True, tag=True):
    """Forget a stream at this attempt or below. Idempotent."""

    sequence_id: str
    attempt: int


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

    sequence_id: str
    attempt: int
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
    detokenizer_instance_id: str
    engine_id: str
    engine_instance_id: str
    step: int
    events: tuple[TextEvent, ...]
