"""Messages by which gateways follow the content of engines' prefix caches. See the package.

Blocks have short names (`antiphon.shared.blocks`): a wrong estimate of a cache's content costs only time.
"""

from antiphon.shared.messages.base import Message


class FollowBlocks(Message, frozen=True, array_like=True, tag=True):
    """Makes an engine tell a gateway which blocks its prefix cache has, for `limits.BLOCK_LEASE_S`; also renews that.

    The engine sends the events from `position` on again that this gateway has not got; if it does not have them any
    more, or if `position` is negative, a `BlockSnapshot` in pieces. They go to `reply_subject`; further events go to
    all gateways.
    """

    gateway_id: str
    gateway_instance_id: str
    reply_subject: str
    position: int = -1


class BlockEvents(Message, frozen=True, array_like=True, tag=True):
    """Consecutive events of an engine's prefix cache, the first of which has the number `position`.

    `events`: see `blocks.pack_block_events`.
    """

    engine_id: str
    engine_instance_id: str
    position: int
    events: bytes


class BlockSnapshot(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """A piece of the content of an engine's prefix cache when the event with the number `position` was the next one.

    `names`: the names of blocks, packed like events. All pieces of a snapshot have the same `position`.
    """

    engine_id: str
    engine_instance_id: str
    position: int
    part: int
    num_parts: int
    names: bytes
