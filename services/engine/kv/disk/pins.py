"""Segments that are to be kept for a time: pins, and the order in which segments are deleted.

A pin is the time of a segment's last use, moved into the future. So it needs no file of its own, every engine of the
host sees it, and it outlives the engine. Pinned segments are deleted after all others, and at most half of a
directory's bytes are pinned, so that there is room for what is not. Used by the writing thread of `store`.
"""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from antiphon.services.engine.kv.disk.segment import INDEX

log = logging.getLogger(__name__)
_PINNED_SHARE = 2
"""One part of so many of a directory's bytes can be pinned."""
_REFUSED_S = 1.0
"""When there is no room for a further pin, it is looked for again after this time, seconds."""
_TOLD_S = 600.0
"""That there is no room is logged at most this often, seconds."""
_EARLIER_S = 1.0
"""A pin that ends so little later than the present one is not written again, seconds."""


class Found(NamedTuple):
    """A segment on the disk: the bytes of its files, and when it was last used, Unix seconds; in the future: a pin."""

    size: int
    used_s: float


def found_in(directory: Path) -> dict[str, Found]:
    """Returns the segments of a directory by name. Raises OSError."""
    found: dict[str, Found] = {}
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            there = path.stat()
            size, used_s = found.get(path.stem, Found(0, 0.0))
            found[path.stem] = Found(size + there.st_size, max(used_s, there.st_mtime))
    return found


def eviction_order(found: Mapping[str, Found], max_bytes: int, now_s: float) -> list[str]:
    """Returns the names of segments in the order in which they are deleted.

    First go pinned ones beyond the bound, those first whose pins end first; then those without a pin, used longest ago
    first; then pinned ones, again by the ends of their pins.
    """
    by_use = sorted(found, key=lambda name: found[name].used_s)
    room, pinned = max_bytes // _PINNED_SHARE, set[str]()
    for name in reversed(by_use):
        room -= found[name].size
        if found[name].used_s <= now_s or room < 0:
            break
        pinned.add(name)
    surplus = [name for name in by_use if found[name].used_s > now_s and name not in pinned]
    others = [name for name in by_use if found[name].used_s <= now_s]
    return [*surplus, *others, *(name for name in by_use if name in pinned)]


def touch(path: Path) -> None:
    """Marks a file as used now, unless it is pinned."""
    now_s = time.time()
    _move(path, now_s)


class Pins:
    """The pins that this engine has set in a directory of at most `max_bytes`."""

    def __init__(self, directory: Path, max_bytes: int, segment_bytes: int) -> None:
        self._directory, self._max_bytes, self._segment_bytes = directory, max_bytes, segment_bytes
        self._until_s: dict[str, float] = {}
        """When the pins end, Unix seconds, by the names of segments."""
        self._not_before_s = self._told_before_s = 0.0

    def until(self, name: str) -> float:
        """Returns when the pin of a segment ends, Unix seconds; 0: this engine has set none."""
        return self._until_s.get(name, 0.0)

    def set(self, name: str, until_s: float) -> bool:
        """Keeps a segment until a time, or longer if it is kept already. Returns False if too much is kept."""
        if until_s - self.until(name) >= _EARLIER_S:
            if not self.has_room(name):
                return False
            self._until_s[name] = until_s
            self.renew(name)
        return True

    def has_room(self, name: str = "") -> bool:
        """Whether a segment can be pinned: `name`, or a new one."""
        if self.until(name) > time.time():
            return True
        if time.monotonic() < self._not_before_s:
            return False
        now_s, pinned = time.time(), self._segment_bytes
        try:
            for other, found in found_in(self._directory).items():
                if max(found.used_s, self.until(other)) > now_s and other != name:
                    # One that still grows counts as a full one.
                    pinned += max(found.size, self._segment_bytes)
        except OSError as error:
            log.warning("KV in %s is not pinned: %s", self._directory, error)
            pinned = self._max_bytes
        if pinned <= self._max_bytes // _PINNED_SHARE:
            return True
        self._not_before_s = time.monotonic() + _REFUSED_S
        if time.monotonic() >= self._told_before_s:
            self._told_before_s = time.monotonic() + _TOLD_S
            log.warning("half of --kv-disk-gb in %s is pinned: further prompts are not", self._directory)
        return False

    def renew(self, name: str) -> None:
        """Sets the pin of a segment again, if it has one, because a write to its files has ended it."""
        if until_s := self.until(name):
            _move(self._directory / (name + INDEX), until_s)

    def refresh(self) -> None:
        """Forgets pins that have ended, and sets those again that writes of other engines have ended."""
        now_s = time.time()
        for name, until_s in list(self._until_s.items()):
            if until_s <= now_s:
                del self._until_s[name]
            else:
                self.renew(name)

    def forget(self, name: str) -> None:
        """A segment was deleted."""
        self._until_s.pop(name, None)


def _move(path: Path, used_s: float) -> None:
    """Moves the time of a file's last use, never back."""
    try:
        if path.stat().st_mtime < used_s:
            os.utime(path, (used_s, used_s))
    except OSError as error:
        log.debug("%s is not marked as used: %s", path, error)
