"""The floor's work in fact: as many bytes read and operations multiplied as bound a load, and nothing around them.

    python -m bench.bare --bytes N --read N --operations N [--parts N] [--threads N]

The floor is made of the best moments just before and after a load. A machine that is not alone does not hold them for
as long as a load lasts; this says what a program that only reads and multiplies, in torch's fastest ways, makes of the
same minutes. A process of its own, as `bench.probe`, which finds the ways. Called by `bench.run`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable

from bench.probe import GEMM_DTYPES, TRIES, Call, Product, Reads, in_own_process, products
from bench.roofline import Work


def measure(work: Work, model_bytes: int, parts: int, threads: int) -> float:
    """Seconds of the work in a process of its own, reading and multiplying in turn, `parts` times each."""
    sizes = {"bytes": model_bytes, "read": work.bytes, "operations": work.operations}
    return in_own_process("bench.bare", **sizes, parts=parts, threads=threads)["seconds"]


def fastest_read(size: int) -> Call:
    """Reads a buffer of `size` bytes in the way that is the fastest now."""
    reads = Reads(size)
    for _ in range(TRIES):
        reads.once()
    return reads.best_way()


def fastest_product() -> Product:
    """The multiplication with the most operations a second now."""
    return max((each for dtype in GEMM_DTYPES for each in products(dtype, TRIES)), key=lambda each: each.rate)


def seconds_of(call: Call, amount: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of `amount` calls, which need not be whole: the whole ones nearest to it, at least one, are timed."""
    count = max(1, round(amount))
    started = clock()
    for _ in range(count):
        call()
    return (clock() - started) * amount / count


def main() -> None:
    parser = argparse.ArgumentParser(description="Reads and multiplies, and says how long it took.")
    parser.add_argument("--bytes", type=int, required=True, help="of the buffer that is read again and again")
    parser.add_argument("--read", type=int, required=True, help="bytes to read in all")
    parser.add_argument("--operations", type=int, required=True, help="to multiply in all")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    read, product = fastest_read(options.bytes), fastest_product()
    amounts = ((product.call, options.operations / product.operations), (read, options.read / options.bytes))
    seconds = sum(
        seconds_of(call, amount / options.parts) for _ in range(options.parts) for call, amount in amounts if amount
    )
    print(json.dumps({"seconds": round(seconds, 4)}))


if __name__ == "__main__":
    main()
