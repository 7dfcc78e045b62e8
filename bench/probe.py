"""What this machine allows at this moment: read bandwidth and matrix multiplication, as JSON.

    python -m bench.probe --bytes N [--threads N] [--tries N]

A process of its own, started anew for each measurement, so that neither its memory nor its threads are there while
something else is measured. Bandwidth is read over a buffer of `--bytes` (a model's weights: what a step reads, and what
a shared cache may hold) and over one far larger than any cache. Each figure is the best of its tries, of several ways
to read and of several sizes: a limit is what can be reached, not what usually is. One of these ways, torch's sum of
float32, is a figure of its own: others measure a machine by it, and some machines read faster in other ways.
Multiplication is of bfloat16, and of float32, which numbers of bfloat16 become where a processor multiplies no others.
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

ROOT = Path(__file__).resolve().parents[1]
LARGE_BYTES = 2 * 2**30
GEMM_DTYPES = ("bfloat16", "float32")
GEMM_SIDES = (256, 1024, 2048, 4096)
GEMM_CALL_MAX_S = 1.0
"""A larger multiplication is left out where it would take longer."""
TRIES = 3
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement."""

    read_model_gb_s: float
    """10^9 bytes a second, over a buffer of the model's size."""
    read_large_gb_s: float
    read_sum_gb_s: float
    """The faster of the two buffers, by a plain sum of float32."""
    gemm_gflop_s: float


def measure(model_bytes: int, threads: int, tries: int = TRIES) -> Probe:
    """Runs this module in a process of its own."""
    return Probe(**in_own_process("bench.probe", bytes=model_bytes, threads=threads, tries=tries))


def in_own_process(module: str, **numbers: int) -> dict[str, float]:
    """The figures that a module of ours prints when it is run with these options."""
    command = [sys.executable, "-m", module, *(f"--{name}={number}" for name, number in numbers.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module} failed: {done.stderr[-1000:]}")
    return json.loads(done.stdout)


class Reads:
    """A buffer, and how long each reading of it took, in each of several ways; the first one is among them."""

    def __init__(self, size: int) -> None:
        import numpy as np
        import torch

        # numpy's large arrays have huge pages where the system grants them on request.
        values = torch.from_numpy(np.ones(size // 4, dtype=np.float32))
        self._size = size
        self._sum: Call = values.sum
        self._others: tuple[Call, ...] = (lambda: torch.dot(values, values), values.view(torch.int32).amax)
        self._seconds: dict[Call, list[float]] = {call: [] for call in (self._sum, *self._others)}

    def once(self) -> None:
        """Reads it once in each way."""
        for call in (self._sum, *self._others):
            started = time.perf_counter()
            call()
            self._seconds[call].append(time.perf_counter() - started)

    def best_way(self) -> Call:
        """The way that mostly took the least time."""
        return min(self._seconds, key=lambda call: statistics.median(self._seconds[call]))

    def rates(self, choose: Callable[[list[float]], float] = min) -> tuple[float, float]:
        """Bytes a second by a sum of float32, and in the best of the other ways; `choose` says which time counts."""
        by_sum, *others = (choose(self._seconds[call]) for call in (self._sum, *self._others))
        return self._size / by_sum, self._size / min(others)


def read_rates(size: int, tries: int) -> tuple[float, float]:
    """Bytes a second at best: by a sum of float32, and in other ways."""
    reads = Reads(size)
    for _ in range(tries):
        reads.once()
    return reads.rates()


def read_rate(size: int, tries: int) -> float:
    """Bytes a second, in the best of all ways."""
    return max(read_rates(size, tries))


def gemm_rate(tries: int, dtypes: tuple[str, ...] = GEMM_DTYPES) -> float:
    """Operations a second, in the fastest of these types and sizes."""
    return max(gemm_rate_of(dtype, tries) for dtype in dtypes)


def gemm_rate_of(dtype: str, tries: int) -> float:
    """In one type, the fastest of the sizes that do not take too long."""
    return max(product.rate for product in products(dtype, tries))


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix multiplication, and its operations a second at best."""

    call: Call
    operations: int
    rate: float


def products(dtype: str, tries: int, most_s: float = GEMM_CALL_MAX_S) -> Iterator[Product]:
    """Those of one type, as far as they take no longer than `most_s`."""
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
    """Seconds of the shortest call, after one that is not counted."""
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
