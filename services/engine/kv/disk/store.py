"""The segments of a directory, written by this engine and by the others of this host, and what is in them.

Every engine appends to a segment of its own and reads those of all, also of engines that have ended. When the directory
would exceed its bound, the segments that were read longest ago are deleted, except those that living engines write.

    find       any thread
    read       the threads that read
    append, refresh, close    the one thread that writes
"""

import errno
import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from antiphon.services.engine.kv.disk.segment import INDEX, SYSTEM, Entry, Files, Segment, is_alive, remove
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
        self._own: Segment | None = None
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

    def append(self, name: bytes, data: Bytes, num_tokens: int, checksum: int) -> bool:
        """Writes a block, unless it is there. Returns False if it could not be written.

        After an error, such as a full disk, nothing is written for a while.
        """
        if name in self._places:
            return True
        if not self.writes:
            return False
        try:
            segment = self._segment_for(data.nbytes)
            if segment is None:
                return False
            self._take(segment, segment.append(name, data, num_tokens, checksum))
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            log.warning("KV is not written to %s for %g s: %s", self._directory, _RETRY_S, reason)
            self._stop_writing()
            return False
        return True

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
                _touch(self._directory / (name + INDEX))

    def close(self) -> None:
        """Closes all files. Nothing may be read or written afterwards."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._places.clear()

    # ------------------------------------------------------------------------------------------------------------------

    def _read_index(self, name: str) -> None:
        segment = self._segments.get(name)
        if segment is not None and (segment is self._own or not segment.grows):
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

    def _segment_for(self, num_bytes: int) -> Segment | None:
        """Returns the segment to append to, a new one if the last is full; None if the directory has no room."""
        if self._own is not None and self._own.num_bytes + num_bytes <= self._segment_bytes:
            return self._own
        self._finish()
        if num_bytes > self._segment_bytes or not self._make_room():
            log.warning(
                "KV is not written to %s for %g s: --kv-disk-gb leaves no room beside what other engines write",
                self._directory, _RETRY_S,
            )  # fmt: skip
            self._stop_writing()
            return None
        name = f"{time.time_ns():020d}-{os.getpid()}"
        self._own = self._segments[name] = Segment(self._directory / name, is_own=True, files=self._files)
        return self._own

    def _stop_writing(self) -> None:
        self._finish()
        self._not_before_s = time.monotonic() + _RETRY_S

    def _finish(self) -> None:
        if self._own is not None:
            self._own.finish()
            self._own = None

    def _make_room(self) -> bool:
        """Deletes the segments that were used longest ago until a further one fits. Returns whether it does."""
        sizes, used = dict[str, int](), dict[str, float]()
        for path in self._directory.iterdir():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            sizes[path.stem] = sizes.get(path.stem, 0) + found.st_size
            used[path.stem] = max(used.get(path.stem, 0.0), found.st_mtime)
        total, count = sum(sizes.values()) + self._segment_bytes, len(sizes) + 1
        for name in sorted(used, key=lambda name: used[name]):
            if total <= self._max_bytes and count <= _SEGMENTS_MAX:
                break
            if is_alive(self._directory / name):
                continue
            remove(self._directory / name)
            if name in self._segments:
                self._drop(name)
            total, count = total - sizes[name], count - 1
        return total <= self._max_bytes and count <= _SEGMENTS_MAX


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError as error:
        log.debug("%s is not marked as used: %s", path, error)
