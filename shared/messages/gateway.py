"""Queries to a gateway about its sequences and its recorded requests, and usage records. See the package."""

from typing import Any, Literal

from antiphon.shared.messages.base import Message, SequenceRef


class OwnershipQuery(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Sent by an engine or a detokenizer to ask a gateway which of these sequences it must keep. See `OwnershipReply`.

    Sent for sequences that the gateway has not confirmed for `limits.OWNERSHIP_CHECK_S` (engine) and for streams
    without tokens for `limits.ORPHAN_S` (detokenizer), because a `Done`, `Cancel` or `CloseStream` may have been lost.
    A query has at most `limits.LIVENESS_BATCH_MAX` sequences.
    """

    service: str
    """`engine` or `detokenizer`."""
    member_id: str
    member_instance_id: str
    reply_subject: str
    """Control subject of the engine or detokenizer that asks."""
    sequences: tuple[SequenceRef, ...]


class OwnershipReply(Message, frozen=True, array_like=True, tag=True):
    """The sequences of an `OwnershipQuery` that the gateway does not own at the asking member, which then drops them.

    Not sent if the gateway owns all sequences of the query.
    """

    gateway_id: str
    gateway_instance_id: str
    released: tuple[SequenceRef, ...]


class StreamTaken(Message, frozen=True, array_like=True, tag=True):
    """Tells a gateway that another gateway has taken over a stream, so that it ends its own run of the request.

    Sent once. A gateway that misses it sees the change in the record of the stream.
    """

    request_id: str
    fence: int
    """Fencing token of the new run; runs with a lower one end."""


UsageOutcome = Literal["completed", "cancelled", "failed", "lost"]


class UsageRecord(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """The usage of one generation request. Sent once, when the request ends for any reason. Not answered.

    A request that is refused before it starts has no record. Tokens that an engine has computed but that have not
    reached the gateway (because the engine died) are not known, nor those of a run that another gateway has continued.
    """

    request_id: str
    """The server's own id, which is also in the answer's `id`. Unique, so a receiver can detect duplicate records."""
    gateway_id: str
    """The gateway on which the request has ended."""
    key: str
    """Name of the API key; `anonymous` without keys."""
    model: str
    outcome: UsageOutcome
    """`cancelled`: the client has disconnected. `lost`: its gateway has ended before it, and nobody has continued it.
    Then tokens are those that were recorded (docs/guides/streams.md), 0 if none were."""
    error_code: str = ""
    """Code of `antiphon.shared.errors` if the request has failed."""
    finish_reasons: tuple[str, ...] = ()
    """Finish reasons of the ended sequences, in the order in which they ended."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    computed_tokens: int = 0
    """Tokens that engines have computed: prompt tokens that were not cached, output tokens, and tokens computed again.
    """
    completion_tokens: int = 0
    """Output tokens that were passed to the client, or to the selection among `best_of` sequences."""
    discarded_tokens: int = 0
    """Output tokens that were computed but not passed on, because the client had disconnected or the request failed."""
    received_at: float = 0.0
    """Unix time in seconds."""
    time_to_first_token_s: float = 0.0
    """Seconds from the acceptance of the request to its first token; 0 if it had none."""
    duration_s: float = 0.0
    client_request_id: str = ""
    """`X-Request-Id` of the client, empty if it gave none."""


RequestState = Literal["running", "completed", "failed", "cancelled"]
RecordOrder = Literal["newest", "slowest"]


class RecordListQuery(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Asks a gateway for the requests that it has recorded. Answered by `RecordList`."""

    key: str
    """Name of the API key whose requests are listed; empty for all keys."""
    state: RequestState | None = None
    words: tuple[str, ...] = ()
    """Words in lower case that a request's fields must all contain."""
    order: RecordOrder = "newest"
    slow: bool = False
    """Whether only slow requests are wanted (`antiphon.services.gateway.ops.timeline.slowness`)."""
    during: tuple[float, float] | None = None
    """Unix times: only requests that were in progress at some time between them."""


class RecordList(Message, frozen=True, array_like=True, tag=True):
    """Requests of one gateway in the requested order, at most `limits.RECORD_LIST_MAX`."""

    gateway_id: str
    requests: tuple[dict[str, Any], ...]
    """Summaries, in the form of the elements in the answer to `GET /v1/requests`."""


class RecordQuery(Message, frozen=True, array_like=True, tag=True):
    """Asks a gateway for one recorded request. Answered by `RecordReply`."""

    name: str
    """The server's request id, the id of the answer, or the client's own id."""
    key: str
    """Name of the API key that the request must have; empty for any."""
    form: Literal["summary", "timeline", "content", "snapshot"]
    """`snapshot`: the content, also of a request that has not ended."""


class RecordReply(Message, frozen=True, array_like=True, tag=True):
    """The answer to `RecordQuery`. `found`: None if the gateway has no such request."""

    found: dict[str, Any] | None
