"""Queries of engines and detokenizers to a gateway about the sequences that they hold. See the package."""

from shared.messages.base import Message, SequenceRef


class OwnershipQuery(Message, frozen=True, array_like=True, tag=True):
    """Asks a gateway which of its sequences an engine or a detokenizer still has to keep. See `OwnershipReply`.

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
    """The sequences of an `OwnershipQuery` that the gateway does not own at that member; the member drops them.

    Not sent if the gateway owns all sequences of the query.
    """

    gateway_id: str
    gateway_instance_id: str
    released: tuple[SequenceRef, ...]
