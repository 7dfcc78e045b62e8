"""Faults of the disk that keeps KV: damaged blocks, cut files, a disk that takes no more, a slow one. Linux only.

The files are found by the flags of the engines' processes. A limit of the size of an engine's files stands for a full
disk: each write that would make a file larger fails. A disk is slow because something else writes to it without pause,
and because it must be read: what memory has of the files is dropped again and again.
"""

import asyncio
import contextlib
import os
import random
import resource
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from antiphon.shared.cache_dirs import user_directory

DATA, INDEX = ".kv", ".idx"
USUAL_PATH = "~/.cache/antiphon/kv"
NUM_FLIPS = 64
BUSY_BYTES = 8 * 2**20
"""Bytes that are written to a slow disk at a time."""
_FLAG, _PATH = "--kv-disk-gb=", "--kv-disk-path="


def directory_of(pid: int) -> Path | None:
    """Returns the directory in which an engine keeps KV; None if it keeps none or has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if not any(word.startswith(_FLAG) and float(word.removeprefix(_FLAG)) > 0 for word in words):
        return None
    given = next((word.removeprefix(_PATH) for word in words if word.startswith(_PATH)), "")
    return user_directory(given, USUAL_PATH)


def have_disks(pids: Mapping[str, int]) -> list[str]:
    """Returns the names of the processes that keep KV on a disk."""
    return sorted(name for name, pid in pids.items() if directory_of(pid) is not None)


def has_blocks(directory: Path) -> bool:
    """Whether there is something to damage."""
    return bool(_files(directory, DATA))


def flip(directory: Path, seed: float) -> str:
    """Flips bits in random places of the blocks and of the index. Returns what did not happen; empty if all did."""
    chance, files = random.Random(seed), _files(directory, DATA, INDEX)
    if not files:
        return f"there is no KV in {directory}"
    for _ in range(NUM_FLIPS):
        path = chance.choice(files)
        with path.open("r+b") as file:
            place = chance.randrange(path.stat().st_size)
            file.seek(place)
            before = file.read(1)
            file.seek(place)
            file.write(bytes([before[0] ^ (1 << chance.randrange(8))]))
    return ""


def cut(directory: Path, seed: float) -> str:
    """Cuts off the end of a random file of blocks or of an index. Returns what did not happen."""
    chance, files = random.Random(seed), _files(directory, DATA, INDEX)
    if not files:
        return f"there is no KV in {directory}"
    path = chance.choice(files)
    with path.open("r+b") as file:
        file.truncate(chance.randrange(path.stat().st_size))
    return ""


async def fill(pid: int, duration_s: float) -> str:
    """Lets no file of a process grow for some seconds. Returns what did not happen."""
    try:
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    except OSError as error:
        return f"process {pid} has no limit: {error}"
    try:
        await asyncio.sleep(duration_s)
    finally:
        try:
            found = resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        except ProcessLookupError:
            found = (0, 0)  # another fault has ended it
    return "" if not found[0] else f"the limit of process {pid} was changed"


def slow_down(directory: Path, duration_s: float) -> str:
    """Keeps the disk busy for some seconds, and its files out of memory. Blocks. Returns what did not happen."""
    end, data = time.monotonic() + duration_s, os.urandom(BUSY_BYTES)
    with tempfile.TemporaryFile(dir=directory) as file:
        while time.monotonic() < end:
            try:
                os.pwrite(file.fileno(), data, 0)
                os.fsync(file.fileno())
            except OSError as error:
                return f"{directory} takes nothing: {error}"
            for path in _files(directory, DATA, INDEX):
                with contextlib.suppress(FileNotFoundError), path.open("rb") as found:
                    os.fdatasync(found.fileno())
                    os.posix_fadvise(found.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ""


def _files(directory: Path, *kinds: str) -> list[Path]:
    found: list[Path] = []
    for path in sorted(directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # engines delete the oldest
            if path.suffix in kinds and path.stat().st_size:
                found.append(path)
    return found
