"""Lets gateways follow the content of this engine's prefix cache: snapshots, and numbered events in batches.

A gateway that wants to follow sends `FollowBlocks` and renews it before the lease ends. Without a follower nothing is
collected. The first request, and one for events that are not kept any more, is answered with a snapshot in pieces.
Events go to all followers in one message, at most every BLOCK_BATCH_S; a renewal tells how far the gateway has got, so
that also a lost last message is sent again. Runs on the event loop; the step thread only fills the log.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from antiphon.services.engine.block_events.log import BlockLog, Snapshot
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.publisher import Publisher
from antiphon.services.engine.sequence_table import GatewayKey
from antiphon.shared import limits
from antiphon.shared.actors.actor import Envelope, handles
from antiphon.shared.actors.host import Host
from antiphon.shared.blocks import block_names, pack_block_events
from antiphon.shared.messages import BlockEvents, BlockSnapshot, FollowBlocks, Message
from antiphon.shared.observability.rare_logs import RareLog

log = logging.getLogger(__name__)
CallOnCore = Callable[[Callable[[Core], None]], None]
PIECE = limits.BLOCK_EVENTS_BATCH


class BlockFeed:
    """The followers of one engine. `soon` and `sweep` are called on the event loop."""

    def __init__(self, host: Host, call: CallOnCore, publisher: Publisher) -> None:
        """`call`: see `Engine.call`."""
        self._host, self._call, self._publisher = host, call, publisher
        self.log = BlockLog()
        self._event_loop = asyncio.get_running_loop()
        self.is_followed = False
        """Whether a gateway follows the engine. Read after each step, which is to cost nothing otherwise."""
        self._leases: dict[GatewayKey, float] = {}
        """When the lease of each follower ends, monotonic seconds."""
        self._wanting: dict[str, None] = {}
        """Subjects of the followers that wait for a snapshot, in order."""
        self._pieces: deque[tuple[str, Snapshot, int]] = deque()
        """Pieces of snapshots that are to be sent: subject, snapshot and number of the piece."""
        self._rare = RareLog(log)
        self._timer: asyncio.TimerHandle | None = None

    @handles(FollowBlocks)
    def on_follow(self, envelope: Envelope[FollowBlocks]) -> None:
        """Begins or renews a gateway's lease, and sends it what it lacks. Ignored if too many gateways follow."""
        wish = envelope.message
        key = wish.gateway_id, wish.gateway_instance_id
        if key not in self._leases and len(self._leases) >= limits.BLOCK_FOLLOWERS_MAX:
            told = "engine %s: more than %d gateways want to follow its blocks"
            self._rare.warning("followers", told, self._host.id, limits.BLOCK_FOLLOWERS_MAX)
            return
        if not self._leases:
            self.is_followed = True
            self._call(self._watch)
        self._leases[key] = self._host.clock.monotonic() + limits.BLOCK_LEASE_S
        kept = self.log.since(wish.position)
        if kept is None:
            if not any(subject == wish.reply_subject for subject, _, _ in self._pieces):
                self._wanting[wish.reply_subject] = None
                self._call(self._photograph)
            return
        for position, events in kept:
            self._send(wish.reply_subject, self._events(position, events))

    def soon(self) -> None:
        """Sends new events, if somebody follows, when BLOCK_BATCH_S have passed. Called after each step."""
        if self._leases and self._timer is None and (self.log.num_untaken or self._pieces):
            self._timer = self._event_loop.call_later(limits.BLOCK_BATCH_S, self._flush)

    def sweep(self) -> None:
        """Drops followers whose leases have ended. Called a few times a second."""
        now = self._host.clock.monotonic()
        for key in [key for key, ends in self._leases.items() if ends < now]:
            del self._leases[key]
            if not self._leases:
                self.forget()
                self._call(self._unwatch)
        self.soon()

    def forget(self) -> None:
        """Ends all leases. A gateway that asks again, for whatever position, gets a snapshot."""
        self._leases.clear()
        self.is_followed = False
        self.close()
        self.log.restart()

    def close(self) -> None:
        """Sends nothing more until a gateway follows again."""
        self._wanting.clear()
        self._pieces.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- on the step thread ---

    def _watch(self, core: Core) -> None:
        if self.log not in core.pool.watchers:
            core.pool.watchers = (*core.pool.watchers, self.log)

    def _unwatch(self, core: Core) -> None:
        if not self._leases:  # a gateway may have followed meanwhile
            core.pool.watchers = tuple(one for one in core.pool.watchers if one is not self.log)

    def _photograph(self, core: Core) -> None:
        self._watch(core)
        self.log.put_snapshot(core.pool.content())
        self._event_loop.call_soon_threadsafe(self._flush_now)

    # --- on the event loop ---

    def _flush_now(self) -> None:
        if self._leases:
            if self._timer is not None:
                self._timer.cancel()
            self._flush()

    def _flush(self) -> None:
        self._timer = None
        batches, snapshot = self.log.take()
        for position, events in batches:
            self._send(self._host.subjects.blocks(self._host.id), self._events(position, events))
        if snapshot is not None and self._wanting:
            self._queue_pieces(snapshot)
        for _ in range(min(len(self._pieces), limits.BLOCK_PIECES_AT_ONCE)):
            self._send_piece(*self._pieces.popleft())
        self.soon()

    def _queue_pieces(self, snapshot: Snapshot) -> None:
        num_parts = _num_parts(snapshot)
        for subject in self._wanting:
            self._pieces.extend((subject, snapshot, part) for part in range(num_parts))
        self._wanting.clear()

    def _send_piece(self, subject: str, snapshot: Snapshot, part: int) -> None:
        position, content = snapshot
        names = block_names(b"".join(content[part * PIECE : (part + 1) * PIECE]))
        piece = BlockSnapshot(
            engine_id=self._host.id,
            engine_instance_id=self._host.instance_id,
            position=position,
            part=part,
            num_parts=_num_parts(snapshot),
            names=pack_block_events(names),
        )
        self._send(subject, piece)

    def _events(self, position: int, events: bytes) -> BlockEvents:
        return BlockEvents(self._host.id, self._host.instance_id, position, events)

    def _send(self, subject: str, message: Message) -> None:
        self._publisher.in_parts(subject, lambda part: part[0], (message,))


def _num_parts(snapshot: Snapshot) -> int:
    return max(1, -(-len(snapshot[1]) // PIECE))
