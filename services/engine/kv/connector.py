"""Exchanges KV with other engines, for the step loop: runs the sender and the receivers on a separate thread.

`start_load` passes the commands of the scheduler's half (`core.kv.kv_transfer`) to the thread; `finished` returns the
events since the last call. The step thread never waits for a transfer. If the thread fails, all loads end, so that no
sequence waits forever.
"""

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from antiphon.services.engine.core.kv.kv_transfer import KvLoad, KvLoaded, KvMeta, KvReleased
from antiphon.services.engine.kv.channel import Channel
from antiphon.services.engine.kv.disk.tier import DiskTier
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.kv.peers.copies import Copies, Keeper
from antiphon.services.engine.kv.peers.keeper import CopyKeeper
from antiphon.services.engine.kv.receiver import load
from antiphon.services.engine.kv.sender import Sender
from antiphon.services.engine.kv.shared_memory import ReceiverPool, forget_stale
from antiphon.services.engine.kv.wire import Failed, Fetch, Offer
from antiphon.shared import limits
from antiphon.shared.flags import SettingsError

log = logging.getLogger(__name__)
JOIN_S = 5.0
EXPIRY_INTERVAL_S = 1.0
_BACKLOG = 128
Release = Callable[[tuple[int, ...]], None]


class KvConnector:
    """The transfers of one engine. `wake` is called, on another thread, when `finished` has something to return.

    `host` is the address at which other engines find this one, and `bind` the address to listen on; None: nothing is
    sent. `content` is this engine's `EngineFacts.content`: KV of other weights is neither sent nor accepted.
    `open_tier` opens the blocks on the disk, given what takes blocks back. With `copies`, this engine keeps copies of
    other engines' blocks there, and another one those of its own (`keep_copies_at`). Raises SettingsError if it cannot
    listen there, and what `open_tier` raises.
    """

    def __init__(
        self,
        memory: KvMemory,
        wake: Callable[[], None],
        *,
        host: str | None = None,
        bind: str = "",
        content: str = "",
        open_tier: Callable[[Release], DiskTier] | None = None,
        copies: bool = False,
    ) -> None:
        # First, because it may raise.
        self.tier = None if open_tier is None else open_tier(self._release)
        """The blocks on the disk; None if there are none."""
        self.keeper = CopyKeeper(self.tier) if copies and self.tier is not None else None
        """The copies that this engine keeps for others."""
        self.copies: Copies | None = None
        """The copies of this engine's blocks; None before the thread has started."""
        self.lost_keepers: deque[Keeper] = deque(maxlen=limits.KV_COPIES_FROM_MAX)
        """Engines that have stopped keeping copies, for `peers.actor`."""
        self._listener = None if host is None else _listening(bind or host)
        self.address = ""
        """`host:port` at which other engines reach this one; empty if it does not listen."""
        forget_stale()
        self._memory, self._content = memory, content
        self._wake = wake
        self._results: deque[KvLoaded | KvReleased] = deque()
        self._waiting: set[str] = set()
        """Loads that were started and have not ended. Protected by the lock."""
        self._lock = threading.Lock()
        self._failed = False
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._loads: dict[str, asyncio.Task[tuple[int, float]]] = {}
        self._slots = asyncio.Semaphore(limits.KV_LOADS_MAX)
        self._sender, self._pool = Sender(memory, self._release, content), ReceiverPool()
        self._fetches: set[asyncio.Task[None]] = set()
        if self._listener is not None:
            port = self._listener.getsockname()[1]
            self.address = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
        self._thread = threading.Thread(target=self._run, name="engine-kv", daemon=True)
        self._thread.start()

    # --- called on the step thread ---

    def start_load(self, meta: KvMeta) -> None:
        """Begins and stops transfers as commanded. Returns at once."""
        with self._lock:
            if not self._failed:
                self._waiting.update(order.transfer_id for order in meta.loads)
                self._loop.call_soon_threadsafe(self._take, meta)
                return
        self._results.extend(KvLoaded(order.transfer_id, 0) for order in meta.loads)
        self._results.extend(KvReleased(save.block_ids) for save in (*meta.saves, *meta.stores))
        self._wake()

    def finished(self) -> list[KvLoaded | KvReleased]:
        """Returns the loads that have ended and the saved blocks that are not read any more, since the last call."""
        found: list[KvLoaded | KvReleased] = []
        while self._results:
            found.append(self._results.popleft())
        return found

    # --- called on any thread ---

    def stand_still(self) -> None:
        """Ends all transfers from this engine, because its steps hang."""
        with self._lock:
            if not self._failed:
                self._loop.call_soon_threadsafe(self._sender.fail_all, "the engine stands still")

    def keep_copies_at(self, keeper: Keeper | None) -> None:
        """Has copies of this engine's stored blocks kept at another engine."""
        with self._lock:
            if not self._failed and self.copies is not None:
                self._loop.call_soon_threadsafe(self.copies.keep_at, keeper)

    def close(self) -> None:
        """Ends all transfers and the thread."""
        with self._lock:
            if not self._failed:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_S)
        if self.tier is not None:
            self.tier.close()

    # --- on the thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception:  # for any error, because no sequence may wait for a thread that has ended
            log.critical("transfers of KV have failed: every prompt is computed here from now on", exc_info=True)
        finally:
            self._fail()

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._expire())]
        if self._listener is not None:
            tasks.append(asyncio.create_task(self._accept(self._listener)))
        if self.keeper is not None and self.tier is not None:
            copies = self.copies = Copies(self.tier, self.lost_keepers.append)
            self.tier.on_written = lambda name: copies.offer((name,))
            tasks.append(asyncio.create_task(copies.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, *self._loads.values(), *self._fetches):
                task.cancel()
            await asyncio.gather(*tasks, *self._loads.values(), *self._fetches, return_exceptions=True)
            if self._listener is not None:
                self._listener.close()
            self._sender.close()
            self._pool.close()
            self._fail()  # while the loop can still be called

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # such as: too many open files
                log.warning("a receiver of KV could not connect: %s", error)
                await asyncio.sleep(limits.KV_ALIVE_S)
                continue
            if len(self._fetches) >= limits.KV_FETCHES_MAX:
                sock.close()
                continue
            task = asyncio.create_task(answer(Channel(sock), self._sender, self.keeper))
            self._fetches.add(task)
            task.add_done_callback(self._fetched)

    def _fetched(self, task: "asyncio.Task[None]") -> None:
        self._fetches.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a transfer of KV failed", exc_info=error)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self._sender.expire()
            self._pool.expire()

    def _take(self, meta: KvMeta) -> None:
        self._sender.take(meta)
        if self.tier is not None:
            for store in meta.stores:
                self.tier.take(store)
            for pin in meta.pins:
                self.tier.pin(pin)
        if self.copies is not None and meta.kept:
            self.copies.offer(meta.kept)
        for order in meta.loads:
            task = self._loop.create_task(self._load(order))
            self._loads[order.transfer_id] = task
            # A callback, because a task that is cancelled before it starts runs none of its own code.
            task.add_done_callback(partial(self._loaded, order.transfer_id))
        for transfer_id in meta.cancelled:
            if (task := self._loads.get(transfer_id)) is not None:
                task.cancel()

    async def _load(self, order: KvLoad) -> tuple[int, float]:
        """Returns the number of leading blocks, and the seconds that the disk took."""
        async with self._slots:
            if order.address:
                return await load(order, self._memory, self._content, self._pool), 0.0
            assert self.tier is not None, "a load from a disk without one"
            return await self.tier.load(order)

    def _loaded(self, transfer_id: str, task: "asyncio.Task[tuple[int, float]]") -> None:
        """Reports the end of a load, also after an error, so that the sequence does not wait for it."""
        del self._loads[transfer_id]
        found = 0, 0.0
        if not task.cancelled():
            error = task.exception()
            if error is None:
                found = task.result()
            else:
                log.error("a transfer of KV failed: the prompt is computed here", exc_info=error)
        self._ended(KvLoaded(transfer_id, *found))

    def _ended(self, loaded: KvLoaded) -> None:
        with self._lock:
            if loaded.transfer_id not in self._waiting:
                return
            self._waiting.discard(loaded.transfer_id)
        self._results.append(loaded)
        self._wake()

    def _release(self, block_ids: tuple[int, ...]) -> None:
        self._results.append(KvReleased(block_ids))
        self._wake()

    def _fail(self) -> None:
        """Ends all loads and refuses further ones."""
        with self._lock:
            self._failed = True
            waiting, self._waiting = self._waiting, set()
        self._results.extend(KvLoaded(transfer_id, 0) for transfer_id in waiting)
        self._wake()


async def answer(channel: Channel, sender: Sender, keeper: CopyKeeper | None) -> None:
    """Serves a receiver, or an engine that sends copies, and closes the connection. Errors of the connection end it."""
    try:
        async with asyncio.timeout(limits.KV_CONNECT_S):
            first = await channel.receive()
        if isinstance(first, Fetch):
            await sender.serve(channel, first)
        elif isinstance(first, Offer) and keeper is not None:
            await keeper.serve(channel, first)
        else:
            await channel.send(Failed("an unexpected message"))
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        log.info("a transfer of KV has ended early: %s", error or type(error).__name__)
    finally:
        channel.close()


def _listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"--kv-host: other engines cannot fetch KV at {host!r}: {error.strerror or error}. Give an address of this "
            "machine that they can reach."
        ) from error
    sock.setblocking(False)
    return sock
