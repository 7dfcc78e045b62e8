"""The kernels of some steps of an engine, by torch's profiler: what each takes, and the time in which none runs."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from bench.gpu.parts import DEVICE, Found
from bench.gpu.timing import rounded

STEPS = 5
_KERNELS = 30
_NAME_CHARS = 100

Interval = tuple[float, float]


def profiled(run: Callable[[Callable[[Any, Any], None]], Any], is_time: Callable[[Any], bool]) -> Found:
    """Returns the table of `STEPS` steps. `run` calls its argument after each step with the engine and the run so far.

    The profile begins after the first step for which `is_time` says so.
    """
    on_device = DEVICE.type == "cuda"
    profiler = torch_profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU])
    taken: list[int] = []

    def after(engine: Any, so_far: Any) -> None:
        if not taken and is_time(so_far):
            profiler.start()
            taken.append(0)
        elif taken and taken[0] < STEPS:
            taken[0] += 1
            if taken[0] == STEPS:
                profiler.stop()

    run(after)
    if not taken:
        return {"failed": "no step was profiled"}
    if taken[0] < STEPS:
        profiler.stop()
    kind = "CUDA" if on_device else "CPU"
    events = [event for event in profiler.events() or () if event.device_type.name == kind]
    return table([(event.name, event.time_range.start, event.time_range.end) for event in events], max(1, taken[0]))


def table(kernels: Iterable[tuple[str, float, float]], num_steps: int) -> Found:
    """Returns milliseconds and launches of a step by kernel, the longest first, and the busy and the idle time.

    `kernels`: name, start and end in microseconds. Idle: the share of the time from the first start to the last end in
    which no kernel runs.
    """
    times, counts = defaultdict[str, float](float), Counter[str]()
    intervals: list[Interval] = []
    for name, start, end in kernels:
        times[name[:_NAME_CHARS]] += end - start
        counts[name[:_NAME_CHARS]] += 1
        intervals.append((start, end))
    if not intervals:
        return {"kernels": {}, "idle_percent": None}
    whole, busy = max(end for _, end in intervals) - min(start for start, _ in intervals), covered(intervals)
    return {
        "ms_a_step": rounded(whole / num_steps / 1e3),
        "busy_ms_a_step": rounded(busy / num_steps / 1e3),
        "idle_percent": rounded(100 * (1 - busy / whole)) if whole else 0.0,
        "launches_a_step": rounded(counts.total() / num_steps),
        "kernels": {
            name: {"ms": rounded(time / num_steps / 1e3), "launches": rounded(counts[name] / num_steps)}
            for name, time in sorted(times.items(), key=lambda item: -item[1])[:_KERNELS]
        },
    }


def covered(intervals: list[Interval]) -> float:
    """Returns the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
