"""Measures the machine's limits during a load: the load is paused at intervals, and a program measures in the pauses.

    python -m bench.limits_of_machine.moments --bytes N [--threads N]

Probes before and after a load measure the machine at other times. On a shared host, the memory bandwidth of one second
may be twice that of the next, so a share of the limit is meaningful only if load and limit are measured in the same
seconds. This program reads memory and multiplies matrices in torch's fastest ways (`bench.limits_of_machine.probe`)
whenever it gets a line on standard input, and prints the times. `Moments` controls such a process. Called by
`bench.harness.measure`, for `bench.peer_systems.peers` and `bench.run`.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from bench.limits_of_machine import processes
from bench.limits_of_machine.probe import GEMM_DTYPES, ROOT, TRIES, Call, Product, Reads, best, products
from bench.limits_of_machine.roofline import Limits

EVERY_S = 1.0
"""Seconds of a load between two pauses."""
PRODUCT_S = 0.05
"""Longest multiplication in seconds; a longer one would pause the load for too long."""
CALLS = 2
"""Timed calls of a measurement, after one that is not timed.

The shorter time counts, because a thread may be descheduled during a call.
"""
ENDED = "the measuring program ended; its output above says why"


@dataclass(frozen=True, slots=True)
class Moment:
    """One measurement: seconds per byte read and per operation of a matrix multiplication."""

    byte_s: float
    operation_s: float


class Moments:
    """Controls the measuring process, as a context manager. `clock` measures a load without its pauses."""

    def __init__(self, model_bytes: int, threads: int, every_s: float = EVERY_S) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.limits_of_machine.moments",
            f"--bytes={model_bytes}",
            f"--threads={threads}",
        ]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._every_s = every_s
        self._stands: tuple[float, float | None] = (0.0, None)
        """Total seconds of all pauses so far, and the start of the current pause (None outside a pause)."""
        self._found: list[Moment] = []
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def clock(self) -> float:
        """Returns the time in seconds, without the pauses of loads."""
        away_s, since = self._stands
        return (time.perf_counter() if since is None else since) - away_s

    def cpu_s(self) -> float:
        """Returns the CPU seconds of the measuring process so far."""
        return processes.tree(self._process.pid)[0].cpu_s

    @contextlib.contextmanager
    def of(self, root: int) -> Iterator[None]:
        """Context manager that measures during a load: pauses the process `root` and its descendants at intervals.

        The descendants are those at the start. `limits` returns the result.
        """
        family, ended = processes.tree(root), threading.Event()
        self._found = []
        with ThreadPoolExecutor(max_workers=1) as pool:
            interrupting = pool.submit(self._interrupt, family, ended)
            try:
                yield
            finally:
                ended.set()
                interrupting.result()

    def limits(self) -> Limits:
        """Returns the machine's limits during the last load: by the mean time per byte, the median time per operation.

        Memory is fast or slow for seconds at a time, so the mean counts. Multiplication sometimes runs at half speed
        for a tenth of a second, twice as often just after a pause as during work, so outliers do not describe the load
        and the median counts.
        """
        byte_s = statistics.fmean(moment.byte_s for moment in self._found)
        return Limits(1 / byte_s, 1 / statistics.median(moment.operation_s for moment in self._found))

    def _interrupt(self, family: list[processes.Process], ended: threading.Event) -> None:
        # The first measurement is made after half an interval. A load that ends earlier gets one after its end.
        wait_s = self._every_s / 2
        while not ended.wait(wait_s) or not self._found:
            wait_s = self._every_s
            with self._standing_still(family):
                self._found.append(Moment(**self._ask()))

    @contextlib.contextmanager
    def _standing_still(self, family: list[processes.Process]) -> Iterator[None]:
        processes.pause_all(family)
        since, (away_s, _) = time.perf_counter(), self._stands
        self._stands = (away_s, since)
        try:
            yield
        finally:
            processes.resume_all(family)
            self._stands = (away_s + time.perf_counter() - since, None)

    def _ask(self) -> dict[str, float]:
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            raise SystemExit(ENDED)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(ENDED)
        return json.loads(line)


def fastest_read(size: int) -> Call:
    """Returns the call that currently reads a buffer of `size` bytes fastest."""
    reads = Reads(size)
    for _ in range(2 * TRIES):
        reads.once()
    return reads.best_way()


def fastest_product() -> Product:
    """Returns the multiplication that currently has the highest rate, of those that take at most `PRODUCT_S`."""
    found = (each for dtype in GEMM_DTYPES for each in products(dtype, TRIES, PRODUCT_S))
    return max(found, key=lambda each: each.rate)


def main() -> None:
    """Runs in the measuring process: makes one measurement for each line on standard input."""
    parser = argparse.ArgumentParser(description="Reads and multiplies whenever a line comes in.")
    parser.add_argument("--bytes", type=int, required=True, help="of the buffer that is read")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    read, product = fastest_read(options.bytes), fastest_product()
    print(json.dumps({}), flush=True)
    for _ in sys.stdin:
        byte_s, operation_s = best(read, CALLS) / options.bytes, best(product.call, CALLS) / product.operations
        print(json.dumps({"byte_s": byte_s, "operation_s": operation_s}), flush=True)


if __name__ == "__main__":
    main()
