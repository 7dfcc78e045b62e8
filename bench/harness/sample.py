"""`Sample`: the result of one measured load, and its computation from raw times. Without input or output."""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from antiphon.benchmark.load import Result
from bench.limits_of_machine.cpu_accounting import Cpu


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of one load on one server in one round.

    The unit of a time is in its name (`_s`, `_ms`); CPU use is in cores. A load's floor is the shortest time in which
    the machine could do the work.
    """

    round: int
    load: str
    server: str
    seed: int
    wall_s: float
    floor_s: float
    """Shortest time that the machine's limits, measured before and after this load, allow for the load."""
    sum_floor_s: float
    """As `floor_s`, but with the read bandwidth of a plain sum as the memory limit."""
    own_floor_s: float
    """As `floor_s`, but with limits measured in short pauses of this load; see `bench.limits_of_machine.moments`."""
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
        """Output tokens per second."""
        return self.output_tokens / self.wall_s

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.wall_s

    @property
    def share(self) -> float:
        """The floor divided by the measured time: 1 means as fast as the machine allows."""
        return self.floor_s / self.wall_s

    @property
    def sum_share(self) -> float:
        """`sum_floor_s` divided by the measured time. It can exceed 1."""
        return self.sum_floor_s / self.wall_s

    @property
    def own_share(self) -> float:
        """`own_floor_s` divided by the measured time."""
        return self.own_floor_s / self.wall_s

    def record(self) -> dict[str, Any]:
        """Returns the record for a results file: all fields, tokens per second, and the shares of the three floors."""
        rates = {"output_tok_per_s": self.output_rate, "total_tok_per_s": self.total_rate}
        shares = {"share_of_floor": self.share, "share_of_sum_floor": self.sum_share}
        return rounded({**asdict(self), **rates, **shares, "share_of_own_floor": self.own_share})


def latencies(result: Result) -> dict[str, float]:
    """Returns the latency fields of `Sample` (milliseconds) for the result of a load."""
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
    """Returns a percentile (`share` from 0 to 1) with linear interpolation; 0 if there are no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def spread(values: list[float]) -> float:
    """Returns (largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def rounded(value: Any) -> Any:
    """Returns the value with floating-point numbers rounded to four decimals, in nested dicts too."""
    if isinstance(value, float):
        return round(value, 4)
    return {name: rounded(part) for name, part in value.items()} if isinstance(value, dict) else value
