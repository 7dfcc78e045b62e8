"""What one measured load gave, as a value, and the arithmetic from raw times to it. No input or output here."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from antiphon.benchmark.client import Result
from bench.books import Cpu


@dataclass(frozen=True, slots=True)
class Sample:
    """One load on one server, in one round. Times in milliseconds, CPU in cores."""

    round: int
    load: str
    server: str
    seed: int
    wall_s: float
    floor_s: float
    """The shortest time that the machine's limits, measured before and after it, allow for this load."""
    sum_floor_s: float
    """The same where the bandwidth is what a plain sum reads."""
    own_floor_s: float
    """The same by what the machine did in this load's own moments; see `bench.moments`."""
    prompt_tokens: int
    output_tokens: int
    cpu: Cpu
    ttft_ms_p50: float = 0.0
    ttft_ms_p99: float = 0.0
    itl_ms_p50: float = 0.0
    itl_ms_p99: float = 0.0
    tpot_ms_p50: float = 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.wall_s

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens a second."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s

    @property
    def share(self) -> float:
        """Of what the machine allows: 1 is the floor itself."""
        return self.floor_s / self.wall_s

    @property
    def sum_share(self) -> float:
        """The same of the floor by a plain sum; it can exceed 1."""
        return self.sum_floor_s / self.wall_s

    @property
    def own_share(self) -> float:
        """The same of the floor of its own moments."""
        return self.own_floor_s / self.wall_s

    def record(self) -> dict[str, Any]:
        """For a results file."""
        rates = {"output_tok_per_s": self.output_rate, "total_tok_per_s": self.total_rate}
        shares = {"share_of_floor": self.share, "share_of_sum_floor": self.sum_share}
        return rounded({**asdict(self), **rates, **shares, "share_of_own_floor": self.own_share})


def latencies(result: Result) -> dict[str, float]:
    """The times of a load by their names in `Sample`."""
    first, gaps = result.first_token_s, result.chunk_gaps_s
    seconds = {
        "ttft_ms_p50": percentile(first, 0.5),
        "ttft_ms_p99": percentile(first, 0.99),
        "itl_ms_p50": percentile(gaps, 0.5),
        "itl_ms_p99": percentile(gaps, 0.99),
        "tpot_ms_p50": percentile(result.token_s, 0.5),
    }
    return {name: 1e3 * value for name, value in seconds.items()}


def percentile(values: list[float], share: float) -> float:
    """By linear interpolation between the sorted values; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def spread(values: list[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def rounded(value: Any) -> Any:
    """The same with floating-point numbers that a person can read."""
    if isinstance(value, float):
        return round(value, 4)
    return {name: rounded(part) for name, part in value.items()} if isinstance(value, dict) else value
