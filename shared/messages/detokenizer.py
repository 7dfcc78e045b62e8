"""Messages to a detokenizer (streams to open and close) and from a detokenizer (text). See the package."""

from antiphon.shared.messages.base import FinishReason, Message, Part


class OpenStream(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Opens a stream, which converts a sequence's tokens to text and sends the text to `reply_subject` as `TextEvents`.

    Answered by `Ack`. If the stream is already open, the new one replaces it. `output_token_ids` are output tokens that
    the owner already has; the detokenizer decodes them first and sends only the text from character `text_offset` on.
    This allows a stream to move to another detokenizer.
    """

    sequence_id: str
    attempt: int
    model: str
    reply_subject: str
    engine_subject: str
    """Control subject of the engine, to which the detokenizer sends `Resend`, and `Cancel` at a stop string."""
    prompt_token_ids: bytes = b""
    """The last tokens of the prompt: the context in which a byte-level tokenizer decodes the first output token."""
    output_token_ids: bytes = b""
    text_offset: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    traceparent: str = ""
    """W3C trace context of the request; empty without tracing."""
    tracestate: str = ""
    spaces_between_special_tokens: bool = True
    """Whether special tokens that follow each other may be separated by a space, if the tokenizer does so."""
    detokenize: bool = True
    """Whether the tokens are converted to text; if not, all text is empty."""
    shown_special_tokens: tuple[str, ...] = ()
    """Texts of special tokens that are shown although `skip_special_tokens` is set."""


class OpenBatch(Message, frozen=True, array_like=True, tag=True):
    """Opens the streams that one gateway places on one detokenizer at the same time. Answered by `OpenBatchReply`.

    A batch has at most `limits.OPEN_BATCH_MAX` streams, and at most `limits.BATCH_BYTES_MAX` bytes unless it has a
    single stream. It is sent at the same time as the `SubmitBatch` of the same sequences, so the first tokens may
    arrive before it; the detokenizer holds such tokens for `limits.EARLY_EVENT_S`.
    """

    streams: tuple[OpenStream, ...]


class OpenReply(Part, frozen=True, array_like=True, kw_only=True):
    """The result for one stream of an `OpenBatch`: open if `code` is empty, else refused (see `ErrorReply`)."""

    sequence_id: str
    attempt: int
    code: str = ""
    message: str = ""
    param: str = ""
    retry_after_s: float = 0.0


class OpenBatchReply(Message, frozen=True, array_like=True, tag=True):
    """One reply for each stream of an `OpenBatch`, in the order of the batch."""

    replies: tuple[OpenReply, ...]


class CloseStream(Message, frozen=True, array_like=True, tag=True):
    """Closes a stream whose attempt is at most `attempt`. Idempotent; not answered."""

    sequence_id: str
    attempt: int


class TokenText(Part, frozen=True, array_like=True):
    """A token with its text and log probability. `token_bytes` are the exact bytes of the token."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float


class PositionLogprobs(Part, frozen=True, array_like=True):
    """The chosen token at one position and the most likely candidates (`top`)."""

    chosen: TokenText
    top: tuple[TokenText, ...] = ()
    rank: int = 0
    """Place of a prompt's token among all tokens, the likeliest has 1; 0: unknown."""


class TextEvent(Part, frozen=True, array_like=True, kw_only=True):
    """New output of a sequence: tokens at [position, position + len(token_ids)), text from character `text_offset` on.

    Text may lag behind the tokens: an incomplete character, and text that may be the beginning of a stop string, are
    held back. The last event has all remaining text.
    """

    sequence_id: str
    attempt: int
    position: int
    token_ids: tuple[int, ...]
    text_offset: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the sequence; None for the model's own end-of-sequence token."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    error_code: str = ""
    error_message: str = ""
    prompt_start: int = 0
    """Position in the prompt of the first entry of `prompt_logprobs`."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """A part of the prompt's log probabilities. Such an event has neither tokens nor text. The first token of a prompt
    has the log probability NaN."""


class TextEvents(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """The text that results from one `TokenEvents` message, for one gateway. `step`: the engine step of the tokens."""

    detokenizer_id: str
    detokenizer_instance_id: str
    engine_id: str
    engine_instance_id: str
    step: int
    events: tuple[TextEvent, ...]
    work_us: int = 0
    """Microseconds that the detokenizer has spent on the `TokenEvents` before it sent this message."""
