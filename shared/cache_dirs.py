"""Private directories of this user for files that later starts reuse: compiled code, packed weights, converted models.

A file is used only if no other user could have written it. Called by the CPU backend and by `antiphon.shared.models`.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "ramfs")
_SCRATCH = ".writing-"


def user_directory(asked: str, usual: str) -> Path | None:
    """Returns the requested directory, or the usual one in the user's home; None for a user without a home."""
    try:
        return Path(asked or usual).expanduser()
    except RuntimeError:
        return None


def models_cache(usual: str, name: str) -> Path:
    """Returns the directory of converted models: `usual` in the home, or `name` in the temporary directory.

    Raises OSError, with a message for the user, if neither is writable by this user only.
    """
    home = user_directory("", usual)
    if home is not None and is_usable(home):
        return home
    temporary = Path(tempfile.gettempdir()) / f"antiphon-{name}-{os.geteuid()}"
    if is_usable(temporary):
        return temporary
    raise OSError(f"neither {home} nor {temporary} is a private directory that can be written: set HOME to one")


@contextmanager
def made_whole(directory: Path, mark: str, keep: int) -> Generator[Path]:
    """Yields an empty directory, which is renamed to `directory` at the end. Several processes may do this at once.

    `mark` is a file that every complete directory has. Afterwards, of the directories beside it whose
    names begin with a hexadecimal digit, all but the newest `keep` are deleted.
    """
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=directory.parent))
    try:
        yield scratch
        try:
            scratch.rename(directory)
        except OSError:
            if not (directory / mark).is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    remove_oldest_directories(directory.parent, "[0-9a-f]*", keep)


def make_directory(directory: Path) -> None:
    """Creates a directory and its missing parents such that nobody else can write there."""
    for path in reversed((directory, *directory.parents)):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def is_usable(directory: Path) -> bool:
    """Whether only this process's user (and root) can write to the directory. Creates it if it is missing."""
    try:
        make_directory(directory)
        return os.access(directory, os.W_OK) and is_private(directory)
    except OSError:
        return False


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root can change the path, neither the file itself nor a directory above it."""
    path = path.resolve()
    if not _is_ours(path.stat(), sticky_counts=False):
        return False
    return all(_is_ours(parent.stat(), sticky_counts=True) for parent in path.parents)


def is_in_memory(directory: Path) -> bool:
    """Whether the directory is on a file system in main memory, as a container's temporary directory may be."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # proc(5): the third field is the device; the type of file system follows a field that is a single dash.
    mounts = (line.split() for line in _MOUNTS.read_text().splitlines())
    return any(fields[2] == number and fields[fields.index("-") + 1] in _IN_MEMORY for fields in mounts)


@contextmanager
def alone_in(directory: Path, left_behind: str, *, wait: bool = True) -> Generator[None]:
    """Holds a lock on the directory, so that one process at a time works in it.

    First deletes files left over by killed processes: those that match the pattern `left_behind`. If another process
    holds the lock and `wait` is false, raises BlockingIOError.
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
    """Deletes all but the newest `keep` files that match. Processes that have a deleted file open can still use it."""
    made = sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in made[keep:]:
        path.unlink(missing_ok=True)


def remove_oldest_directories(directory: Path, pattern: str, keep: int) -> None:
    """Deletes all but the newest `keep` directories that match."""
    made = sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in made[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def _is_ours(status: os.stat_result, sticky_counts: bool) -> bool:
    # In a directory with the sticky bit, other users can create entries but cannot replace ours.
    if status.st_uid not in (0, os.geteuid()):
        return False
    if sticky_counts and status.st_mode & stat.S_ISVTX:
        return True
    # A group with the user's own number is the user's private group, so files that it can write are still private.
    own_group = status.st_gid == status.st_uid
    return not status.st_mode & (stat.S_IWOTH if own_group else stat.S_IWOTH | stat.S_IWGRP)
