"""Measures the machine's current limits, read bandwidth and matrix multiplication rate, and prints them as JSON.

    python -m bench.limits_of_machine.probe --bytes N [--threads N] [--tries N]

The probe runs in a new process for each measurement, so that neither its memory nor its threads exist while something
else is measured. Bandwidth is measured with a buffer of `--bytes` (the size of a model's weights, which a step reads
and which a shared cache may hold) and with a buffer far larger than any cache. Each figure is the best of its tries, of
several ways to read and of several matrix sizes, because a limit is what can be reached, not the typical value. The
rate of one way to read, torch's sum of float32, is also reported separately, because it is a usual measure of a
machine; some machines read faster in other ways. Multiplication is measured in bfloat16 and in float32, to which
bfloat16 values are converted on processors that cannot multiply bfloat16.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGE_BYTES = 2 * 2**30
GEMM_DTYPES = ("bfloat16", "float32")
GEMM_SIDES = (256, 1024, 2048, 4096)
GEMM_CALL_MAX_S = 1.0
"""Longest multiplication in seconds. Larger matrices are left out if they would take longer."""
TRIES = 3
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement of the machine's limits. 1 GB is 10^9 bytes."""

    read_model_gb_s: float
    """Read bandwidth with a buffer of the model's size."""
    read_large_gb_s: float
    read_sum_gb_s: float
    """Read bandwidth of a plain float32 sum, for the faster of the two buffers."""
    gemm_gflop_s: float


def measure(model_bytes: int, threads: int, tries: int = TRIES) -> Probe:
    """Measures the limits by running this module in a new process."""
    return Probe(**in_own_process("bench.limits_of_machine.probe", bytes=model_bytes, threads=threads, tries=tries))


def in_own_process(module: str, **numbers: int) -> dict[str, float]:
    """Runs a module of this project with these options and returns the figures that it prints as JSON."""
    command = [sys.executable, "-m", module, *(f"--{name}={number}" for name, number in numbers.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module} failed: {done.stderr[-1000:]}")
    return json.loads(done.stdout)


class Reads:
    """A buffer, and the times of reading it in several ways. The first reading of each way counts too."""

    def __init__(self, size: int) -> None:
        import numpy as np
        import torch

        # Large numpy arrays get huge pages if the system grants them on request.
        values = torch.from_numpy(np.ones(size // 4, dtype=np.float32))
        self._size = size
        self._sum: Call = values.sum
        self._others: tuple[Call, ...] = (lambda: torch.dot(values, values), values.view(torch.int32).amax)
        self._seconds: dict[Call, list[float]] = {call: [] for call in (self._sum, *self._others)}

    def once(self) -> None:
        """Reads the buffer once in each way."""
        for call in (self._sum, *self._others):
            started = time.perf_counter()
            call()
            self._seconds[call].append(time.perf_counter() - started)

    def best_way(self) -> Call:
        """Returns the way with the smallest median time."""
        return min(self._seconds, key=lambda call: statistics.median(self._seconds[call]))

    def rates(self, choose: Callable[[list[float]], float] = min) -> tuple[float, float]:
        """Returns the bytes per second of a float32 sum, and of the best other way.

        `choose` selects the time that counts for each way, by default the shortest.
        """
        by_sum, *others = (choose(self._seconds[call]) for call in (self._sum, *self._others))
        return self._size / by_sum, self._size / min(others)


def read_rates(size: int, tries: int) -> tuple[float, float]:
    """Returns the best bytes per second of a float32 sum, and of the other ways."""
    reads = Reads(size)
    for _ in range(tries):
        reads.once()
    return reads.rates()


def read_rate(size: int, tries: int) -> float:
    """Returns the bytes per second of the best of all ways to read."""
    return max(read_rates(size, tries))


def gemm_rate(tries: int, dtypes: tuple[str, ...] = GEMM_DTYPES) -> float:
    """Returns the operations per second of a matrix multiplication, in the fastest of these types and of all sizes."""
    return max(gemm_rate_of(dtype, tries) for dtype in dtypes)


def gemm_rate_of(dtype: str, tries: int) -> float:
    """Returns the operations per second in one type, with the fastest of the sizes that do not take too long."""
    return max(product.rate for product in products(dtype, tries))


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix multiplication, with its number of operations and its best rate in operations per second."""

    call: Call
    operations: int
    rate: float


def products(dtype: str, tries: int, most_s: float = GEMM_CALL_MAX_S) -> Iterator[Product]:
    """Yields the multiplications of one type with growing sizes, as long as they take at most `most_s` seconds."""
    import torch

    rate = 0.0
    for side in GEMM_SIDES:
        operations = 2 * side**3
        if rate and operations / rate > most_s:
            break
        a = torch.randn(side, side).to(getattr(torch, dtype))
        call = partial(torch.matmul, a, a)
        product = Product(call, operations, operations / best(call, tries))
        rate = max(rate, product.rate)
        yield product


def best(call: Call, tries: int) -> float:
    """Returns the seconds of the shortest of `tries` calls, after one call that is not timed."""
    call()
    times: list[float] = []
    for _ in range(tries):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="What this machine allows at this moment.")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tries", type=int, default=TRIES)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    model, large = (read_rates(size, options.tries) for size in (options.bytes, LARGE_BYTES))
    rates = (max(model), max(large), max(model[0], large[0]), gemm_rate(options.tries))
    print(json.dumps(asdict(Probe(*(round(rate / 1e9, 2) for rate in rates)))))


if __name__ == "__main__":
    main()
