"""What the record of requests costs: output tokens/s and CPU time with it (`--record-requests`) and without it.

Two systems get the same requests, a given number at a time, in alternating order (A B B A …), so that a machine that
becomes slower affects both; the one that does not run is stopped with SIGSTOP. The figure is the median over the pairs
of the relative loss. On a machine that others use, tokens/s vary by more than the record costs: the CPU time of all
processes for each token, which does not count the others' work, then says more; it is told for each part, because the
engine's own varies with the sizes of its batches. The record's share is least for models that take long for a token.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.engine import bus_tax
from bench.limits_of_machine import processes
from bench.serving import ROOT, Serving

GOAL_PERCENT = 1.0
SIDES = {"on": "--record-requests=256", "off": "--record-requests=0"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load on one side. `foreign_cores`: cores that other programs used meanwhile."""

    tokens_per_s: float
    cpu_us: dict[str, float]
    """Microseconds for each token, by the part of the system."""
    foreign_cores: float

    @property
    def cpu_us_per_token(self) -> float:
        """Of all parts."""
        return sum(self.cpu_us.values())


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Measures the pairs, after one pair that is not counted. Returns the figures of `summary`."""
    vocab = json.loads((Path(options.model or ROOT / "antiphon" / "demo") / "config.json").read_text())["vocab_size"]
    common = [f"--threads={options.threads}", *([f"--model={options.model}"] if options.model else [])]
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    with Serving(SIDES["on"], *common) as on, Serving(SIDES["off"], *common) as off:
        servers = {"on": on, "off": off}
        off.pause()
        on.pause()
        for seed, name in order(options.pairs + 1):
            servers[name].resume()
            runs[name].append(_run(servers[name], options, seed, vocab))
            servers[name].pause()
        for server in servers.values():
            server.resume()
    return summary(options.streams, runs["on"][1:], runs["off"][1:])


def order(pairs: int) -> Iterator[tuple[int, str]]:
    """Yields (number of the pair, side): the side that runs first alternates."""
    for seed, name in itertools.product(range(pairs), SIDES):
        yield seed, name if seed % 2 == 0 else next(one for one in SIDES if one != name)


def summary(streams: int, on: list[Run], off: list[Run]) -> dict[str, object]:
    """Returns the medians of both sides, and median and quartiles of what the record costs in each pair, in percent.

    `cost_percent` is of tokens/s, `cpu_cost_percent` of CPU time for each token.
    """
    pairs = list(zip(on, off, strict=True))
    rates = sorted(100 * (1 - a.tokens_per_s / b.tokens_per_s) for a, b in pairs)
    cpu = sorted(100 * (a.cpu_us_per_token / b.cpu_us_per_token - 1) for a, b in pairs)
    return {
        "streams": streams,
        "pairs": len(pairs),
        "on_tokens_per_s": round(statistics.median(one.tokens_per_s for one in on), 1),
        "off_tokens_per_s": round(statistics.median(one.tokens_per_s for one in off), 1),
        "ratio": round(statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs), 4),
        "cost_percent": round(statistics.median(rates), 2),
        "cost_percent_quartiles": _quartiles(rates),
        "on_cpu_us_per_token": _profile(on),
        "off_cpu_us_per_token": _profile(off),
        "cpu_cost_percent": round(statistics.median(cpu), 2),
        "cpu_cost_percent_quartiles": _quartiles(cpu),
        "goal_percent": GOAL_PERCENT,
        "foreign_cores": round(statistics.median(one.foreign_cores for one in (*on, *off)), 2),
    }


def _profile(runs: list[Run]) -> dict[str, float]:
    """Returns the medians of the CPU time for each token, in microseconds: of each part, and of all of them."""
    names = sorted({name for one in runs for name in one.cpu_us})
    found = {name: round(statistics.median(one.cpu_us.get(name, 0.0) for one in runs), 1) for name in names}
    return {**found, "all": round(statistics.median(one.cpu_us_per_token for one in runs), 1)}


def _quartiles(values: list[float]) -> list[float]:
    return [round(values[len(values) // 4], 2), round(values[-1 - len(values) // 4], 2)]


def _run(serving: Serving, options: argparse.Namespace, seed: int, vocab: int) -> Run:
    busy, own, began = processes.machine_busy_s(), time.process_time(), time.monotonic()
    before = serving.cpu_seconds().total()
    rate, profile = bus_tax.through_the_bus(serving, options, seed, vocab)
    wall, used = time.monotonic() - began, serving.cpu_seconds().total() - before
    foreign = processes.machine_busy_s() - busy - used - (time.process_time() - own)
    return Run(rate, profile, max(0.0, foreign / wall))


if __name__ == "__main__":
    print(json.dumps(measure(bus_tax.parse()), indent=1))
