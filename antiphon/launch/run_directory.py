"""A private directory for the files that a launcher needs while it runs: the bus's configuration and credentials."""

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NAME = "antiphon-{pid}-"
_PATTERN = re.compile(r"antiphon-(\d+)-\w+")


@contextlib.contextmanager
def run_directory(parent: Path | None = None) -> Iterator[Path]:
    """Context manager that gives a new directory which only this user can read, and removes the directory at the end.

    Directories of launchers that were killed are removed at the start.
    """
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=_NAME.format(pid=os.getpid()), dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for path in parent.glob("antiphon-*"):
        match = _PATTERN.fullmatch(path.name)
        if match and not _alive(int(match[1])) and is_own_directory(path):
            shutil.rmtree(path, ignore_errors=True)


def is_own_directory(path: Path) -> bool:
    """Whether a path is a directory, not a link to one, that belongs to this user: everybody may make such names."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        # Another launcher removed the directory at the same time.
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
