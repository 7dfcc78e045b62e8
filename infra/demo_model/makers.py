"""Makes batches in processes of their own, ahead of the training that takes them.

The batch of a number is the same however many processes make it. Called by ``train.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from infra.demo_model.batches import Batch, Maker
from infra.demo_model.tokenizer import load

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

#: Finished batches of each process that wait for the training.
_AHEAD = 12


class MakerFailedError(Exception):
    """Raised if a process that makes batches has ended."""


def _send(made: queue.Queue[Batch], connection: Connection) -> None:
    """Sends batches until the training has ended; then ends this process too."""
    try:
        while True:
            connection.send(made.get())
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _make(
    connection: Connection, readers: list[Connection], folder: Path, seed: int, positions: int, first: int, stride: int
) -> None:
    """Makes the batches ``first``, ``first + stride``, … and sends them in this order.

    ``readers`` are the reading ends of pipes that the fork has copied. If they stayed open in this process, the makers
    would not notice that the training has ended.
    """
    for reader in readers:
        reader.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training ends this process
    os.nice(5)  # the training itself must not wait for a core
    made: queue.Queue[Batch] = queue.Queue(_AHEAD)
    threading.Thread(target=_send, args=(made, connection), daemon=True).start()
    maker = Maker(load(folder), seed)
    number = first
    while True:
        made.put(maker.batch(number, positions))
        number += stride


class Batches:
    """The batches from number ``first`` on, in order; with ``makers`` 0 they are made when they are asked for.

    The processes are forked: create this before CUDA is used.
    """

    def __init__(self, tokenizer: Path, seed: int, positions: int, first: int = 0, makers: int = 0) -> None:
        self._positions, self._first, self._number = positions, first, first
        self._maker = None if makers else Maker(load(tokenizer), seed)
        self._connections: list[Connection] = []
        self._processes: list[ForkProcess] = []
        #: Seconds spent waiting for batches.
        self.waited = 0.0
        context = multiprocessing.get_context("fork")
        for place in range(makers):
            reader, writer = context.Pipe(duplex=False)
            self._connections.append(reader)
            work = (writer, self._connections, tokenizer, seed, positions, first + place, makers)
            process = context.Process(target=_make, args=work, daemon=True)
            process.start()
            # Only the maker keeps the writing end, so that the pipe ends when the maker ends.
            writer.close()
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that make batches."""
        return [process.pid or 0 for process in self._processes]

    def next(self) -> Batch:
        """The next batch. Raises MakerFailedError if the process that would make it has ended."""
        began = time.monotonic()
        batch = self._maker.batch(self._number, self._positions) if self._maker else self._take()
        self._number += 1
        self.waited += time.monotonic() - began
        return batch

    def _take(self) -> Batch:
        place = (self._number - self._first) % len(self._connections)
        try:
            batch: Batch = self._connections[place].recv()
        except (EOFError, OSError):
            self._processes[place].join()
            raise MakerFailedError(
                f"The process that makes batch {self._number} has ended with exit code "
                f"{self._processes[place].exitcode}. Its error message is above; --makers 0 makes the batches in the "
                "process that trains."
            ) from None
        return batch

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
