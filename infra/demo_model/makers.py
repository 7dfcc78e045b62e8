"""Makes batches in processes of their own, ahead of the training that takes them.

The batch of a number is the same however many processes make it. Called by ``train.py``.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from infra.demo_model.batches import Batch, Maker
from infra.demo_model.tokenizer import load

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext, ForkProcess

    Made = multiprocessing.Queue[Batch]

#: Finished batches that wait for the training, for each process.
_AHEAD = 12
#: Interval of the check whether the other side still exists, in seconds.
_CHECK_S = 2.0


class MakerFailedError(Exception):
    """Raised if a process that makes batches has ended."""


def _make(made: Made, folder: Path, seed: int, positions: int, first: int, stride: int) -> None:
    """Puts the batches ``first``, ``first + stride``, … into a queue until the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.nice(5)  # the training itself must not wait for a core
    made.cancel_join_thread()
    parent = os.getppid()
    maker = Maker(load(folder), seed)
    number = first
    while True:
        batch = maker.batch(number, positions)
        number += stride
        while True:
            try:
                made.put(batch, timeout=_CHECK_S)
                break
            except queue.Full:
                if os.getppid() != parent:
                    return


class Batches:
    """The batches from number ``first`` on, in order; with ``makers`` 0 they are made when they are asked for.

    The processes are forked: create this before CUDA is used.
    """

    def __init__(self, tokenizer: Path, seed: int, positions: int, first: int = 0, makers: int = 0) -> None:
        self._positions, self._number = positions, first
        self._maker = None if makers else Maker(load(tokenizer), seed)
        self._queues: list[Made] = []
        self._processes: list[ForkProcess] = []
        #: Seconds spent waiting for batches.
        self.waited = 0.0
        context: ForkContext = multiprocessing.get_context("fork")
        for place in range(makers):
            made: Made = context.Queue(_AHEAD)
            work = (made, tokenizer, seed, positions, first + place, makers)
            process = context.Process(target=_make, args=work, daemon=True)
            process.start()
            self._queues.append(made)
            self._processes.append(process)
        self._first = first

    def next(self) -> Batch:
        """The next batch. Raises MakerFailedError if the process that would make it has ended."""
        began = time.monotonic()
        batch = self._maker.batch(self._number, self._positions) if self._maker else self._take()
        self._number += 1
        self.waited += time.monotonic() - began
        return batch

    def _take(self) -> Batch:
        place = (self._number - self._first) % len(self._queues)
        while True:
            try:
                return self._queues[place].get(timeout=_CHECK_S)
            except queue.Empty:
                if not self._processes[place].is_alive():
                    code = self._processes[place].exitcode
                    raise MakerFailedError(
                        f"The process that makes batch {self._number} has ended with exit code {code}. "
                        "Its error message is above; --makers 0 makes the batches in the training process."
                    ) from None

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
