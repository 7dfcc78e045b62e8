"""Writes computed blocks to a store and reads them into host blocks, beside the step loop and beside other transfers.

    write   a thread copies each block out of the KV cache, which it then gives back, and appends it to the store
    read    threads read blocks from the disk; the loop of `connector` writes them to host blocks and compares checksums
    keep    the writing thread appends a block of another machine's engine (`peers`)
    pin     the writing thread has blocks that are there kept for a time

If a block is missing or damaged, or if the disk is silent for `KV_SILENCE_S`, a load ends with the blocks before, and
the engine computes the rest. A thread that a disk keeps waiting holds only its own buffer, so nothing is written to a
host block after the end of a load. Blocks that the writer cannot keep up with are not written.
"""

import asyncio
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from antiphon.services.engine.core.kv.kv_transfer import KvLoad, KvPin, KvStore
from antiphon.services.engine.core.plan import EngineFacts
from antiphon.services.engine.kv.disk.segment import SYSTEM, Entry, Files
from antiphon.services.engine.kv.disk.store import Store, directory_id
from antiphon.services.engine.kv.layout import KvMemory
from antiphon.services.engine.kv.pieces import Bytes, checksum
from antiphon.shared import limits
from antiphon.shared.cache_dirs import user_directory
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import SettingsError

logger = logging.getLogger(__name__)
_REFRESH_S = 0.1
"""Seconds after which blocks that other engines have written are found."""
_READ_BYTES = 4 * 2**20
"""Bytes that a thread reads before the loop takes them, and at least one block."""
_READERS = 2
_USUAL_PATH = "~/.cache/antiphon/kv"
_GIB = 2**30


class StoredBlock(NamedTuple):
    """A block as it is in a store, with the checksum of its bytes."""

    name: bytes
    data: Bytes
    checksum: int


class _Keeping(NamedTuple):
    """A block to write, and what is told whether it has been written."""

    block: StoredBlock
    done: "Future[bool]"


def open_tier(
    settings: EngineSettings, memory: KvMemory, facts: EngineFacts, release: Callable[[tuple[int, ...]], None]
) -> "DiskTier":
    """Opens the blocks on the disk as the settings say. Raises SettingsError if the directory cannot be used."""
    path = user_directory(settings.cache.kv_disk_path, _USUAL_PATH)
    if path is None:
        raise SettingsError("--kv-disk-path: this user has no home directory; give a path")
    max_bytes = int(settings.cache.kv_disk_gb * _GIB)
    try:
        # Values of another configuration differ in their last bits, and tokens would depend on what was read.
        tier = DiskTier(memory, (facts.content, facts.configuration), path, max_bytes, release)
    except OSError as error:
        raise SettingsError(f"--kv-disk-path: {path} cannot be used: {error.strerror or error}") from error
    logger.info("KV on the disk: %d blocks of %.1f MiB in %s", len(tier.store), tier.block_bytes / 2**20, path)
    return tier


class DiskTier:
    """The blocks of one engine on a disk. `release` gives written blocks back; it is called on the writing thread."""

    def __init__(
        self,
        memory: KvMemory,
        identity: tuple[str, ...],
        path: Path,
        max_bytes: int,
        release: Callable[[tuple[int, ...]], None],
        files: Files = SYSTEM,
    ) -> None:
        """Opens the directory of blocks with this engine's `identity`, of all that determines their bytes.

        Raises OSError.
        """
        self._memory, self._release = memory, release
        own, layout = memory.own, memory.layout
        self.block_bytes = layout.num_bytes(layout.block_size) if own is None else own.cache.num_bytes
        key = msgspec.msgpack.encode((*identity, layout, "" if own is None else own.name))
        self.identity = hashlib.sha256(key).hexdigest()[:32]
        """What all that determines the bytes of blocks is hashed to."""
        self.store = Store(path / self.identity, max_bytes, files)
        self.directory_id = directory_id(path)
        self.on_written: Callable[[bytes], None] | None = None
        """Called on the writing thread with the name of each block of this engine that has been written."""
        self._orders: queue.SimpleQueue[KvStore | KvPin | _Keeping | None] = queue.SimpleQueue()
        self._num_held = 0
        """Blocks in the queue, and names of pins. Changed by both threads, under the lock."""
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="engine-kv-read")
        self._writer = threading.Thread(target=self._write_all, name="engine-kv-write", daemon=True)
        self._writer.start()

    def __contains__(self, name: bytes) -> bool:
        """Whether a block can be loaded. May be called on any thread."""
        return name in self.store

    # --- writing ------------------------------------------------------------------------------------------------------

    def take(self, order: KvStore) -> None:
        """Queues blocks to be written; they are given back at once if too many wait."""
        with self._lock:
            accepted = self._num_held + len(order.block_ids) <= limits.KV_STORES_MAX and self.store.writes
            if accepted:
                self._num_held += len(order.block_ids)
        if accepted:
            self._orders.put(order)
        else:
            self._release(order.block_ids)

    def pin(self, order: KvPin) -> None:
        """Queues blocks to be kept for a time, after those in the queue are written; not if too many wait."""
        with self._lock:
            accepted = self._num_held + len(order.hashes) <= limits.KV_STORES_MAX
            if accepted:
                self._num_held += len(order.hashes)
        if accepted:
            self._orders.put(order)
        else:
            logger.warning("the disk of --kv-disk-path is slow: a prompt is not pinned")

    def _write_all(self) -> None:
        data, refresh_at = np.empty(self.block_bytes, dtype=np.uint8), 0.0
        while True:
            if time.monotonic() >= refresh_at:
                self.store.refresh()
                refresh_at = time.monotonic() + _REFRESH_S
            try:
                order = self._orders.get(timeout=_REFRESH_S)
            except queue.Empty:
                continue
            if order is None:
                return
            match order:
                case _Keeping():
                    self._keep(order)
                case KvPin():
                    self.store.keep(order.hashes, order.keep_s)
                    self._taken(len(order.hashes))
                case KvStore():
                    for name, block in zip(order.hashes, order.block_ids, strict=True):
                        try:
                            self._write(name, block, data, order.keep_s)
                        except Exception:  # for any error, because the engine waits for blocks that are not given back
                            logger.exception("a block of KV is not written to the disk")
                    self._taken(len(order.block_ids))

    def _taken(self, count: int) -> None:
        with self._lock:
            self._num_held -= count

    def _write(self, name: bytes, block: int, data: Bytes, keep_s: float) -> None:
        wanted, found = name not in self.store, 0
        try:
            if wanted:
                found = self._copy_out(block, data)
        finally:
            self._release((block,))
        if wanted and not self._append(StoredBlock(name, data, found), keep_s):
            return
        if self.on_written is not None:
            self.on_written(name)

    def _append(self, block: StoredBlock, keep_s: float = 0.0) -> bool:
        return self.store.append(block.name, block.data, self._memory.layout.block_size, block.checksum, keep_s)

    def keep(self, block: StoredBlock) -> "Future[bool]":
        """Queues a block of another engine, whose `data` must not change until the result is there.

        The result is False if the block could not be written.
        """
        keeping = _Keeping(block, Future())
        self._orders.put(keeping)
        return keeping.done

    def _keep(self, keeping: _Keeping) -> None:
        try:
            keeping.done.set_result(self._append(keeping.block))
        except Exception as error:  # for any error, because the result is awaited
            keeping.done.set_exception(error)

    def _copy_out(self, block: int, data: Bytes) -> int:
        """Copies a block of the KV cache. Returns its checksum."""
        own, layout = self._memory.own, self._memory.layout
        if own is not None:
            return own.cache.read(block, data)
        return self._memory.read(block, data.reshape(layout.shape(layout.block_size)))

    # --- reading ------------------------------------------------------------------------------------------------------

    async def load(self, order: KvLoad) -> tuple[int, float]:
        """Reads blocks until all are there or one is missing. May be cancelled.

        Returns the number of leading blocks that are written, and the seconds that this took without waits for others.
        """
        at_once = max(1, _READ_BYTES // self.block_bytes)
        loop, done, took_s = asyncio.get_running_loop(), 0, 0.0
        while done < len(order.hashes):
            names = order.hashes[done : done + at_once]
            reading = loop.run_in_executor(self._readers, self._read, names)
            try:
                async with asyncio.timeout(limits.KV_SILENCE_S):
                    data, entries, read_s = await reading
            except TimeoutError:
                logger.warning("the disk of --kv-disk-path is silent: the rest of a prompt is computed")
                return done, took_s + limits.KV_SILENCE_S
            began_s = loop.time() - read_s
            for place, entry in enumerate(entries):
                block = data[place * self.block_bytes : place * self.block_bytes + entry.size]
                if self._copy_in(order.host_blocks[done], block) != entry.checksum:
                    logger.warning("a block of KV on the disk is damaged: the rest of a prompt is computed")
                    self.store.forget(entry.name)
                    return done, took_s
                done += 1
            took_s += loop.time() - began_s
            if len(entries) < len(names):
                return done, took_s
        return done, took_s

    def _read(self, names: tuple[bytes, ...]) -> tuple[Bytes, list[Entry], float]:
        """Reads leading blocks, in a buffer of its own. On a reading thread. Returns also the seconds that it took."""
        began_s = time.monotonic()
        data = np.empty(len(names) * self.block_bytes, dtype=np.uint8)
        entries: list[Entry] = []
        for place, name in enumerate(names):
            part = data[place * self.block_bytes : (place + 1) * self.block_bytes]
            entry = self.store.read(name, part.data)
            if entry is None or entry.size != self.block_bytes:
                break
            entries.append(entry)
        return data, entries, time.monotonic() - began_s

    async def read(self, names: tuple[bytes, ...]) -> list[StoredBlock]:
        """Returns those of the blocks that are there and undamaged. Awaits the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read_whole, names)

    def _read_whole(self, names: tuple[bytes, ...]) -> list[StoredBlock]:
        found = list[StoredBlock]()
        for name in names:
            data = np.empty(self.block_bytes, dtype=np.uint8)
            entry = self.store.read(name, data.data)
            if entry is None or entry.size != self.block_bytes:
                continue
            if checksum(data) != entry.checksum:
                self.store.forget(name)
                continue
            found.append(StoredBlock(name, data, entry.checksum))
        return found

    def _copy_in(self, host_block: int, data: Bytes) -> int:
        own, layout = self._memory.own, self._memory.layout
        if own is not None:
            return own.host.write(host_block, data)
        return self._memory.write(host_block, data.reshape(layout.shape(layout.block_size)))

    # ------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the threads, after the blocks in the queue are written, unless the disk keeps them waiting."""
        self._orders.put(None)
        self._writer.join(limits.KV_SILENCE_S)
        self._readers.shutdown(wait=False, cancel_futures=True)
        if not self._writer.is_alive():
            self.store.close()
