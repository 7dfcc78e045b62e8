"""Temporary directories for files.

Each is removed when its process ends, or, after a kill, when the next process starts.

A process holds a lock on its directory as long as it lives; the kernel releases the lock even if the process is killed.
The file `.owned` marks directories with such a lock. Directories without it are not removed, because their process may
be of a version without locks, or may be about to take its lock.
"""

import atexit
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

from antiphon.shared import limits

log = logging.getLogger(__name__)
_PREFIX = "antiphon-files-"
_OWNED = ".owned"


def make() -> Path:
    """Makes a directory that is removed at the end of the process. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    fcntl.flock(_opened(path), fcntl.LOCK_EX)  # The descriptor stays open until the process ends.
    (path / _OWNED).touch(0o600)
    return path


def remove_leftovers() -> int:
    """Removes directories whose processes have ended, at most `TEMPORARY_LEFTOVERS_MAX`. Returns how many. Blocks."""
    num_removed = 0
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        if num_removed >= limits.TEMPORARY_LEFTOVERS_MAX:
            break
        # OSError: the directory's process is alive and has the lock, or another starting gateway has just removed the
        # directory.
        with contextlib.suppress(OSError):
            num_removed += _remove(path)
    if num_removed:
        log.info("removed %d temporary directories of gateways that were killed", num_removed)
    return num_removed


def _remove(path: Path) -> bool:
    """Removes a directory if its process has ended. Returns whether the directory was removed."""
    if path.stat(follow_symlinks=False).st_uid != os.getuid():
        return False
    descriptor = _opened(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (path / _OWNED).is_file():
            return False
        shutil.rmtree(path)
        return True
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
