"""Measures times on a GPU with CUDA events, and the GPU's highest copy bandwidth and multiplication rate."""

import statistics
from collections.abc import Callable

import torch

COPY_BYTES = 4 * 2**30
GEMM_SIDE = 8192


def graph_ms(work: Callable[[], object], repeats: int = 20) -> float:
    """Like `median_ms`, without the time of Python and of the launches: `work` is captured and the graph is timed.

    `work` must not wait for the device. What it reads stays in the cache of the device if there is room.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return median_ms(graph.replay, repeats)


def median_ms(work: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """Returns the median milliseconds of one call of `work`."""
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def rooflines() -> dict[str, float]:
    """Returns the copy bandwidth (bytes read and written) and the rate of a large random bfloat16 product."""
    copy_ms = _copy_ms()
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm_ms = median_ms(lambda: a @ b, 10)
    return {
        "copy_tb_s": round(2 * COPY_BYTES / copy_ms / 1e9, 3),
        "gemm_tflop_s": round(2 * GEMM_SIDE**3 / gemm_ms / 1e9, 1),
    }


def _copy_ms() -> float:
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source), 10)
