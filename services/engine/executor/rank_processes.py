"""The other ranks of an engine, as its first rank sees them, and a watch that detects their end.

A rank is a process that this process has started, or a process of another machine that has joined. `RankWatch` detects
the end of a rank even while no message is sent to it.
"""

import contextlib
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

from antiphon.services.engine.executor.channel import Channel
from antiphon.shared.actors.python_command import python_command
from antiphon.shared.config import EngineSettings
from antiphon.shared.flags import to_argv
from antiphon.shared.messages import DeviceMemory
from antiphon.shared.observability import resources

END_S = 5.0
"""Seconds that a rank has to end before it is killed."""
_POLL_MS = 500
_ENDED = select.POLLHUP | select.POLLERR | select.POLLRDHUP | select.POLLNVAL


class RankFailed(RuntimeError):
    """Raised if a rank has ended, or its result differs from the first rank's. The engine must end."""


class Rank:
    """One of the other ranks: a process that has joined from another machine. It exits when the connection ends."""

    blocks: socket.socket | None = None
    """Connection for reading and writing the rank's KV (`rank_memory`); None if the rank is on another machine."""

    def __init__(self, number: int, place: str, end: socket.socket) -> None:
        self.number, self.channel, self._place = number, Channel(end), place

    def uses(self, gpus: tuple[DeviceMemory, ...]) -> None:
        """Records what the rank has told of its GPUs. Those of other machines are not shown."""

    def ended(self) -> str:
        """Returns a sentence that says that this rank has ended, and how if that is known."""
        return f"rank {self.number} on {self._place} has ended, or its machine does not answer"

    def close(self) -> None:
        """Ends the rank, which has no plan in flight."""
        self.channel.close()

    def kill(self) -> None:
        """Ends the rank immediately."""
        self.close()


class LocalRank(Rank):
    """A process of this machine that this process has started."""

    def __init__(self, settings: EngineSettings, number: int) -> None:
        """Starts the process, which waits for the command `Start`: meet the other ranks and load the model."""
        (ours, theirs), (blocks, their_blocks) = socket.socketpair(), socket.socketpair()
        super().__init__(number, "this machine", ours)
        self.blocks = blocks
        passed = [theirs.fileno(), their_blocks.fileno()]
        command = python_command(
            "antiphon.services.engine.executor.rank", *to_argv(settings),
            f"--rank={number}", f"--channel={passed[0]}", f"--blocks={passed[1]}",
        )  # fmt: skip
        with theirs, their_blocks:
            self._process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
        resources.add_child(self._process.pid)

    def uses(self, gpus: tuple[DeviceMemory, ...]) -> None:
        """See Rank."""
        resources.set_gpus_of_child(self._process.pid, gpus)

    def ended(self) -> str:
        """See Rank."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        return f"rank {self.number} (process {self._process.pid}) has ended" + (
            "" if code is None else f" with code {code}"
        )

    def close(self) -> None:
        """See Rank."""
        self._hang_up()
        try:
            self._process.wait(END_S)
            resources.remove_child(self._process.pid)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """See Rank."""
        self._process.kill()
        self._process.wait()
        resources.remove_child(self._process.pid)
        self._hang_up()

    def _hang_up(self) -> None:
        self.channel.close()
        if self.blocks is not None:
            self.blocks.close()


class RankWatch:
    """Calls `on_end` with the sentence of `Rank.ended`, once and on a separate thread, when a rank has ended."""

    def __init__(self, ranks: Sequence[Rank], on_end: Callable[[str], None]) -> None:
        self._ranks = {rank.channel.socket.fileno(): rank for rank in ranks}
        self._on_end = on_end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching. To be called before the ranks are closed."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._ranks:
            poll.register(descriptor, select.POLLRDHUP)
        while not self._stop.is_set():
            for descriptor, events in poll.poll(_POLL_MS):
                if events & _ENDED and not self._stop.is_set():
                    self._on_end(self._ranks[descriptor].ended())
                    return
