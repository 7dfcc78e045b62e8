"""Times of work on a device, without the time of Python and of launches: a captured graph is replayed.

Each call of the work should have buffers of its own, so many that together they do not fit into the device's cache
(`num_in_turn`): a step of a model does not find its weights and keys there either. On a CPU the calls are simply made.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.gpu.parts import DEVICE

Calls = Sequence[Callable[[], object]]
_CACHE_BYTES = 128 * 2**20
"""More than twice the cache of an H200 (50 MiB)."""
_IN_TURN_MAX = 32


def num_in_turn(num_bytes: int, *, tiny: bool) -> int:
    """Returns how many buffers of a size are used in turn."""
    return 1 if tiny else max(1, min(_IN_TURN_MAX, -(-_CACHE_BYTES // num_bytes)))


def graph_ms(calls: Calls, repeats: int = 10, least: int = 4) -> float:
    """Returns the median milliseconds of one of the calls, which follow each other in one graph.

    They are repeated in it until there are `least`, so that the time to start the graph counts little. They must not
    wait for the device.
    """
    calls = list(calls) * -(-least // len(calls))

    def run() -> None:
        for call in calls:
            call()

    if DEVICE.type != "cuda":
        started = time.perf_counter()
        calls[0]()
        return 1e3 * (time.perf_counter() - started)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) / len(calls)


def rounded(number: float) -> float:
    """Returns a measured number with four digits."""
    return float(f"{number:.4g}")


def moved(ms: float, num_bytes: int) -> dict[str, float]:
    """Returns the result of work that moves so many bytes."""
    return {"ms": rounded(ms), "tb_s": rounded(num_bytes / ms / 1e9)}


def computed(ms: float, operations: float) -> dict[str, float]:
    """Returns the result of work that computes so many operations."""
    return {"ms": rounded(ms), "tflop_s": rounded(operations / ms / 1e9)}
