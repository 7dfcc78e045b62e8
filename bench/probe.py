"""What this machine allows at this moment: read bandwidth and bf16 matrix multiplication, as JSON.

    python -m bench.probe --bytes N [--threads N] [--tries N]

A process of its own, started anew for each measurement, so that neither its memory nor its threads are there while
something else is measured. Bandwidth is read over a buffer of `--bytes` (a model's weights: what a step reads, and what
a shared cache may hold) and over one far larger than any cache. Each figure is the best of its tries, of several ways
to read and of several sizes: a limit is what can be reached, not what usually is.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGE_BYTES = 2 * 2**30
GEMM_SIDES = (1024, 2048, 4096)
TRIES = 3


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement."""

    read_model_gb_s: float
    """10^9 bytes a second, over a buffer of the model's size."""
    read_large_gb_s: float
    gemm_gflop_s: float


def measure(model_bytes: int, threads: int, tries: int = TRIES) -> Probe:
    """Runs this module in a process of its own."""
    numbers = [f"--bytes={model_bytes}", f"--threads={threads}", f"--tries={tries}"]
    command = [sys.executable, "-m", "bench.probe", *numbers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the probe of the machine failed: {done.stderr[-1000:]}")
    return Probe(**json.loads(done.stdout))


def read_rate(size: int, tries: int) -> float:
    """Bytes a second."""
    import numpy as np
    import torch

    # numpy's large arrays have huge pages where the system grants them on request.
    values = torch.from_numpy(np.ones(size // 4, dtype=np.float32))
    integers = values.view(torch.int32)
    return size / min(best(lambda: torch.dot(values, values), tries), best(integers.amax, tries))


def gemm_rate(tries: int) -> float:
    """Operations a second in bfloat16."""
    import torch

    def rate(side: int) -> float:
        a = torch.randn(side, side, dtype=torch.bfloat16)
        return 2 * side**3 / best(lambda: a @ a, tries)

    return max(rate(side) for side in GEMM_SIDES)


def best(call: Callable[[], object], tries: int) -> float:
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
    rates = (read_rate(options.bytes, options.tries), read_rate(LARGE_BYTES, options.tries), gemm_rate(options.tries))
    print(json.dumps(asdict(Probe(*(round(rate / 1e9, 2) for rate in rates)))))


if __name__ == "__main__":
    main()
