"""What the machine allows in a load's own moments: the load stands still now and then, and a program measures instead.

    python -m bench.moments --bytes N [--threads N]

Probes just before and after a load catch the best of other moments. A machine that is not alone may give its cores
twice as much of the memory's bandwidth in one second as in the next, so a share of what it allows means something only
where both are of the same seconds. The program reads and multiplies in torch's fastest ways (`bench.probe`) whenever a
line comes in, and says how long it took; `Moments` is the handle of such a process. Called by `bench.measure`, for
`bench.peers` and `bench.run`.
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

from bench import processes
from bench.probe import GEMM_DTYPES, ROOT, TRIES, Call, Product, Reads, best, products
from bench.roofline import Limits

EVERY_S = 1.0
"""Of a load, between two of its stops."""
PRODUCT_S = 0.05
"""A multiplication that takes longer would stop the load for too long."""
CALLS = 2
"""Of which the shorter counts, after one that does not: a thread that was put aside says nothing about the machine."""
ENDED = "the measuring program ended; its output above says why"


@dataclass(frozen=True, slots=True)
class Moment:
    """One measurement: seconds for a byte read and for an operation multiplied."""

    byte_s: float
    operation_s: float


class Moments:
    """A handle; a context manager. `clock` is for what is timed: it stands still while the load does."""

    def __init__(self, model_bytes: int, threads: int, every_s: float = EVERY_S) -> None:
        command = [sys.executable, "-m", "bench.moments", f"--bytes={model_bytes}", f"--threads={threads}"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._every_s = every_s
        self._stands: tuple[float, float | None] = (0.0, None)
        """For how long loads stood still in all, and since when one does now."""
        self._found: list[Moment] = []
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def clock(self) -> float:
        """Seconds, without those in which a load stood still."""
        away_s, since = self._stands
        return (time.perf_counter() if since is None else since) - away_s

    def cpu_s(self) -> float:
        """CPU seconds of the process so far."""
        return processes.tree(self._process.pid)[0].cpu_s

    @contextlib.contextmanager
    def of(self, root: int) -> Iterator[None]:
        """Stops this process and its descendants, as they are now, every so often until the end; see `limits`."""
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
        """What the machine did in the moments of the last load: a byte on average, an operation mostly.

        Memory is fast or slow for seconds. Multiplying is at times half as fast for a tenth of a second, twice as often
        where the cores have just stood still as in the midst of work: that is not the load's.
        """
        byte_s = statistics.fmean(moment.byte_s for moment in self._found)
        return Limits(1 / byte_s, 1 / statistics.median(moment.operation_s for moment in self._found))

    def _interrupt(self, family: list[processes.Process], ended: threading.Event) -> None:
        # The first one comes after half of the time, and a load that is shorter still has one behind it.
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
    """Reads a buffer of `size` bytes in the way that is the fastest now."""
    reads = Reads(size)
    for _ in range(2 * TRIES):
        reads.once()
    return reads.best_way()


def fastest_product() -> Product:
    """The multiplication with the most operations a second now, of those that are short."""
    found = (each for dtype in GEMM_DTYPES for each in products(dtype, TRIES, PRODUCT_S))
    return max(found, key=lambda each: each.rate)


def main() -> None:
    """The process itself."""
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
