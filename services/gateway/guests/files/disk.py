"""Work on the disk, which is done in threads, and what it does when the disk is full."""

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from antiphon.services.gateway.edge.access.call import new_id
from antiphon.shared.errors import ServiceError

P = ParamSpec("P")
T = TypeVar("T")
PIECE_S = 0.002
"""Long work on a file is done in pieces of this length, seconds: a thread that computes delays the event loop, which
gets its turn after each piece."""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FILE_MODE = 0o600


async def to_the_end(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Returns the result of a function that runs in a thread. If cancelled, waits until the function has returned."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **named))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


async def in_pieces(steps: Iterator[None]) -> None:
    """Runs an iterator to its end in threads, for `PIECE_S` seconds at a time."""
    while await to_the_end(_piece, steps):
        pass


@contextlib.contextmanager
def full_disk_refused() -> Iterator[None]:
    """Context manager that raises ServiceError('server_is_overloaded') if the disk has no room.

    The request is right and may succeed later, and deleting the client's own files may not help: so it is not
    'request_too_large', as it is for the limits of the directory.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ServiceError("server_is_overloaded", "The server's disk is full. Try again later.") from error


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file atomically: readers see the old or the new content, even after a crash of the machine.

    Raises ServiceError if the disk is full.
    """
    written = path.with_name(f".{path.name}.{new_id()}")
    try:
        with full_disk_refused(), open(written, "xb", opener=private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink(missing_ok=True)
        raise


def private(path: str | Path, flags: int) -> int:
    """Opens a file that only the user of this process may read. Returns its descriptor."""
    return os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)


def _piece(steps: Iterator[None]) -> bool:
    until = time.monotonic() + PIECE_S
    return any(time.monotonic() >= until for _ in steps)
