"""Directories of this user's alone, for files that later starts trust: compiled code and packed weights.

Nothing is taken from a place where another user could have put something. Called by `compile`, `library` and `packed`.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "ramfs")


def user_directory(asked: str, usual: str) -> Path | None:
    """As asked, or the usual one in the user's home; None for a user without a home."""
    try:
        return Path(asked or usual).expanduser()
    except RuntimeError:
        return None


def make_directory(directory: Path) -> None:
    """Makes what is missing of a path such that nobody else can write there."""
    for path in reversed((directory, *directory.parents)):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def is_usable(directory: Path) -> bool:
    """Whether this process can write there and nobody else; makes it where it is missing."""
    try:
        make_directory(directory)
        return os.access(directory, os.W_OK) and is_private(directory)
    except OSError:
        return False


def is_private(path: Path) -> bool:
    """Nobody but this user and root can change what is there, neither itself nor a directory above it."""
    path = path.resolve()
    if not _is_ours(path.stat(), sticky_counts=False):
        return False
    return all(_is_ours(parent.stat(), sticky_counts=True) for parent in path.parents)


def is_in_memory(directory: Path) -> bool:
    """Whether what is written there takes main memory, as in a container's temporary directory."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # proc(5): the third field is the device, the type of file system comes behind a lonely dash.
    mounts = (line.split() for line in _MOUNTS.read_text().splitlines())
    return any(fields[2] == number and fields[fields.index("-") + 1] in _IN_MEMORY for fields in mounts)


@contextmanager
def alone_in(directory: Path, left_behind: str, *, wait: bool = True) -> Iterator[None]:
    """One process at a time; first goes what one that was killed has left, which has such names.

    Where another one is there already and nobody is to wait, this raises BlockingIOError.
    """
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in directory.glob(left_behind):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
        yield


def remove_oldest(directory: Path, pattern: str, keep: int) -> None:
    """Leaves the newest files; one that is in use stays so without its name."""
    made = sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in made[keep:]:
        path.unlink(missing_ok=True)


def _is_ours(status: os.stat_result, sticky_counts: bool) -> bool:
    # In a directory with the sticky bit others can make entries, but not replace ours.
    if status.st_uid not in (0, os.geteuid()):
        return False
    if sticky_counts and status.st_mode & stat.S_ISVTX:
        return True
    # Where every user has a group of his own it has his number, and his files may be open to it.
    own_group = status.st_gid == status.st_uid
    return not status.st_mode & (stat.S_IWOTH if own_group else stat.S_IWOTH | stat.S_IWGRP)
