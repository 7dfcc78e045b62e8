"""The started ranks of an engine, and the first rank's listening socket at which ranks of several machines meet."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

from antiphon.services.engine.executor.rank_processes import Rank
from antiphon.services.engine.parallel.meeting import Meeting


@dataclass(frozen=True, slots=True)
class Started:
    """The other ranks, which are loading their parts of the model, and the first rank's communicator.

    `listener` must stay open until all ranks have met. `release` is to be called when all ranks have ended.
    """

    ranks: list[Rank]
    meeting: Meeting
    listener: socket.socket | None = None
    release: Callable[[], None] = lambda: None


def meeting_point(address: str) -> tuple[Meeting, socket.socket]:
    """Returns a meeting at a free port of this machine's `address`, for the first rank, and its listening socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return Meeting(host=address, port=port, listener=listener.fileno(), address=address), listener
