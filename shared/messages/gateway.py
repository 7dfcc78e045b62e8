"""To a gateway: the questions of those that work for it. See the package."""

from shared.messages.base import Message, SequenceRef


class OwnershipQuery(Message, frozen=True, array_like=True, tag=True):
    """An engine or a detokenizer asks which of the gateway's sequences it still has to keep. See `OwnershipReply`.

    Asked about sequences that the gateway has not confirmed for a while, because a `Done`, `Cancel` or `CloseStream`
    may have been lost. At most `limits.LIVENESS_BATCH_MAX` sequences.
    """

    service: str
    """`engine` or `detokenizer`."""
    member_id: str
    member_instance_id: str
    reply_subject: str
    """The asker's control subject."""
    sequences: tuple[SequenceRef, ...]


class OwnershipReply(Message, frozen=True, array_like=True, tag=True):
    """The sequences of an `OwnershipQuery` that the gateway does not have there: the asker drops them.

    Not sent when the gateway has all of them.
    """

    gateway_id: str
    gateway_instance_id: str
    released: tuple[SequenceRef, ...]
