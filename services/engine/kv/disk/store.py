"""The segments of a directory, written by this engine and by the others of this host, and what is in them.

Every engine appends to a segment of its own and reads those of all, also of engines that have ended. When the directory
would exceed its bound, the segments that were read longest ago are deleted, except those that living engines write.
Blocks that are to be kept for a time (`pins`) are written to segments of their own, beside the others.

    find       any thread
    read       the threads that read
    append, keep, refresh, close    the one thread that writes
"""

import errno
import logging
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from antiphon.services.engine.kv.disk.pins import Pins, eviction_order, found_in, touch
from antiphon.services.engine.kv.disk.segment import ENTRY_BYTES, INDEX, SYSTEM, Entry, Files, Segment, is_alive, remove
from antiphon.services.engine.kv.pieces import Bytes

log = logging.getLogger(__name__)
_SEGMENTS = 32
"""A full directory has about so many segments, so that deleting one forgets little."""
_SEGMENTS_MAX = 128
"""A directory has at most so many, of which each open one takes two file descriptors."""
_RETRY_S = 30.0
"""Seconds until writing is tried again after an error, such as a full disk."""
_USED_S = 10.0
"""A segment that is read is marked as used at most this often."""


_ID = "id"


def directory_id(path: Path) -> str:
    """Returns the random id of a directory of stores, which is written with its first use. Raises OSError."""
    file = path / _ID
    with suppress(FileExistsError):
        drawn = secrets.token_hex(8)
        draft = path / f"{_ID}-{drawn}"
        draft.write_text(drawn)
        try:
            os.link(draft, file)  # so that the file is never seen empty
        finally:
            draft.unlink()
    return file.read_text()


class Place(NamedTuple):
    """Where a block is."""

    segment: Segment
    entry: Entry


class Store:
    """The blocks in a directory, which takes at most `max_bytes`, with what other engines write at the same time."""

    def __init__(self, directory: Path, max_bytes: int, files: Files = SYSTEM) -> None:
        """Creates the directory, for this user only, and reads the index. Raises OSError."""
        self._directory, self._max_bytes, self._files = directory, max_bytes, files
        self._segment_bytes = max_bytes // _SEGMENTS
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._places: dict[bytes, Place] = {}
        self._segments: dict[str, Segment] = {}
        self._pins = Pins(directory, max_bytes, self._segment_bytes)
        self._own: dict[bool, Segment] = {}
        """The segments that this engine appends to: one for blocks that are pinned, and one for the others."""
        self._not_before_s = 0.0
        self._used: dict[str, float] = {}
        """The segments that were read, and when they were last marked as used."""
        self.refresh()

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def writes(self) -> bool:
        """Whether blocks are written now: not for a while after an error."""
        return time.monotonic() >= self._not_before_s

    def read(self, name: bytes, buffer: memoryview) -> Entry | None:
        """Reads a block into the first bytes of a buffer. Returns its entry; None if it is missing or unreadable.

        The caller compares the checksum, and calls `forget` if it is wrong.
        """
        place = self._places.get(name)
        if place is None:
            return None
        try:
            if not place.segment.read(place.entry, buffer):
                self.forget(name)
                return None
        except OSError as error:
            log.warning("KV in %s cannot be read (%s): it is computed again", place.segment.path, error)
            self.forget(name)
            return None
        self._used.setdefault(place.segment.path.name, 0.0)
        return place.entry

    def forget(self, name: bytes) -> None:
        """Removes a block from the index, because it is damaged."""
        self._places.pop(name, None)

    def append(self, name: bytes, data: Bytes, num_tokens: int, checksum: int, keep_s: float = 0.0) -> bool:
        """Writes a block, unless it is there. Returns False if it could not be written.

        `keep_s`: how long it is to be kept, seconds, see `keep`; 0: as long as there is room. After an error, such as a
        full disk, nothing is written for a while.
        """
        if name in self._places:
            self.keep((name,), keep_s)
            return True
        if not self.writes:
            return False
        try:
            segment = self._segment_for(data.nbytes, is_kept=keep_s > 0 and self._can_pin())
            if segment is None:
                return False
            self._take(segment, segment.append(name, data, num_tokens, checksum))
            self._pins.renew(segment.path.name)
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            log.warning("KV is not written to %s for %g s: %s", self._directory, _RETRY_S, reason)
            self._stop_writing()
            return False
        self.keep((name,), keep_s)
        return True

    def keep(self, names: Iterable[bytes], keep_s: float) -> None:
        """Keeps those of the blocks that are there for at least `keep_s` seconds, with the others of their segments.

        Other segments are deleted first. Nothing is kept that is damaged, or beyond half of the directory.
        """
        if keep_s <= 0:
            return
        until_s = time.time() + keep_s
        for name in {place.segment.path.name for each in names if (place := self._places.get(each)) is not None}:
            self._pins.set(name, until_s)

    def refresh(self) -> None:
        """Takes what other engines have written, forgets what they have deleted, marks segments as used."""
        try:
            present = {path.stem for path in self._directory.glob(f"*{INDEX}")}
        except OSError as error:
            log.warning("KV in %s cannot be listed: %s", self._directory, error)
            return
        for name in self._segments.keys() - present:
            self._drop(name)
        for name in sorted(present):
            self._read_index(name)
        now_s = time.monotonic()
        for name, marked_s in list(self._used.items()):
            if name in self._segments and now_s - marked_s >= _USED_S:
                self._used[name] = now_s
                touch(self._directory / (name + INDEX))
        self._pins.refresh()

    def close(self) -> None:
        """Closes all files. Nothing may be read or written afterwards."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._places.clear()

    # ------------------------------------------------------------------------------------------------------------------

    def _read_index(self, name: str) -> None:
        segment = self._segments.get(name)
        if segment is not None and (segment in self._own.values() or not segment.grows):
            return
        try:
            if segment is None:
                segment = self._segments[name] = Segment(self._directory / name, is_own=False, files=self._files)
            for entry in segment.entries():
                self._take(segment, entry)
        except FileNotFoundError:
            # Another engine is about to create it, or has just deleted it.
            return
        except OSError as error:
            log.warning("the KV index %s cannot be read: %s", self._directory / name, error)

    def _take(self, segment: Segment, entry: Entry) -> None:
        if entry.name not in self._places:
            self._places[entry.name] = Place(segment, entry)
            segment.names.append(entry.name)

    def _drop(self, name: str) -> None:
        """Forgets a segment that was deleted."""
        segment = self._segments.pop(name)
        segment.close()
        for each in segment.names:
            if (place := self._places.get(each)) is not None and place.segment is segment:
                del self._places[each]
        self._used.pop(name, None)
        self._pins.forget(name)

    def _can_pin(self) -> bool:
        """Whether a block can be pinned: in the segment for such blocks, or in a new one."""
        own = self._own.get(True)
        return self._pins.has_room() if own is None else self._pins.has_room(own.path.name)

    def _segment_for(self, num_bytes: int, *, is_kept: bool) -> Segment | None:
        """Returns the segment to append to, a new one if the last is full; None if the directory has no room."""
        own = self._own.get(is_kept)
        if own is not None and own.size + num_bytes + ENTRY_BYTES <= self._segment_bytes:
            return own
        self._finish(is_kept)
        if num_bytes + ENTRY_BYTES > self._segment_bytes or not self._make_room():
            log.warning(
                "KV is not written to %s for %g s: --kv-disk-gb leaves no room beside what other engines write",
                self._directory, _RETRY_S,
            )  # fmt: skip
            self._stop_writing()
            return None
        name = f"{time.time_ns():020d}-{os.getpid()}"
        own = self._own[is_kept] = self._segments[name] = Segment(
            self._directory / name, is_own=True, files=self._files
        )
        return own

    def _stop_writing(self) -> None:
        self._finish(False)
        self._finish(True)
        self._not_before_s = time.monotonic() + _RETRY_S

    def _finish(self, is_kept: bool) -> None:
        if (own := self._own.pop(is_kept, None)) is not None:
            own.finish()

    def _make_room(self) -> bool:
        """Deletes segments until a further one fits. Returns whether it does."""
        found = found_in(self._directory)
        # Segments that grow will be as large as the new one.
        living = {name for name in found if is_alive(self._directory / name)}
        total = (1 + len(living)) * self._segment_bytes
        total, count = total + sum(found[name].size for name in found.keys() - living), len(found) + 1
        for name in eviction_order(found, self._max_bytes, time.time()):
            if total <= self._max_bytes and count <= _SEGMENTS_MAX:
                break
            if name in living:
                continue
            remove(self._directory / name)
            if name in self._segments:
                self._drop(name)
            total, count = total - found[name].size, count - 1
        return total <= self._max_bytes and count <= _SEGMENTS_MAX
