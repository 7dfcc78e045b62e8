"""What records cost: output tokens/s and CPU time with a kind of record and without it.

    python -m bench.reliability.record_cost [--of requests streams streams-in-files] [--pairs 9] [--model DIRECTORY]

    requests            the record of requests with every step (`--record-requests`)
    streams             the records from which streams can be resumed, in the memory of the bus
    streams-in-files    the same in files, which survive a restart of the bus

Both sides get requests of the same lengths, a given number at a time, in alternating order (A B B A …), so that a
machine that becomes slower affects both. The record of requests is a setting of a server, so it needs two systems, of
which the one that does not run is stopped with SIGSTOP. The records of streams are written if a client asks for them
with a header, so one system serves both sides: two processes of the same code differ by a few percent all their life,
which is more than a record costs. The figure is the median over the pairs of the relative loss of tokens/s. On a
machine that others use, tokens/s vary by more than a record costs. Then the CPU time of all processes for each token
says more, because it does not include the work of others. It is reported for each part of the system, because the
engine's CPU time also varies with the sizes of its batches. The slower the model, the smaller is the relative cost of
a record.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.engine import bus_tax
from bench.harness.output import print_and_save
from bench.harness.serving import ROOT, Serving, end_in_order
from bench.limits_of_machine import processes

GOALS_PERCENT = {"requests": 1.0, "streams": 1.0, "streams-in-files": 2.0}
SIDES = "on", "off"
REQUESTS = 256
"""Requests of a run, by default: a run of the demo model takes some seconds."""
ASKING = {"X-Antiphon-Resumable": "1"}
"""The header by which a client asks for a stream that can be resumed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load on one side. `foreign_cores`: cores that other programs used during the run."""

    tokens_per_s: float
    cpu_us: dict[str, float]
    """Microseconds for each token, by the part of the system."""
    foreign_cores: float

    @property
    def cpu_us_per_token(self) -> float:
        """Microseconds for each token, of all parts together."""
        return sum(self.cpu_us.values())


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison: its name, its server, and the headers of its requests."""

    name: str
    serving: Serving
    headers: Mapping[str, str]


def main() -> int:
    """Measures the kinds that the command line names and prints their figures."""
    options = parse()
    end_in_order()
    print_and_save({kind: measure(options, kind) for kind in options.of}, options.json)
    return 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command-line options."""
    parser = bus_tax.parser()
    parser.set_defaults(requests=REQUESTS)
    parser.add_argument("--of", nargs="+", choices=[*GOALS_PERCENT], default=[*GOALS_PERCENT], help="kinds of records")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, kind: str) -> dict[str, object]:
    """Measures the pairs of one kind, after one pair that is not counted. Returns the figures of `summary`."""
    vocab = json.loads((Path(options.model or ROOT / "antiphon" / "demo") / "config.json").read_text())["vocab_size"]
    common = [f"--threads={options.threads}", *([f"--model={options.model}"] if options.model else [])]
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as files, contextlib.ExitStack() as stack:
        sides = _sides(stack, kind, files, common)
        for side in sides.values():
            side.serving.pause()
        for seed, name in order(options.pairs + 1):
            sides[name].serving.resume()
            runs[name].append(_run(sides[name], options, seed, vocab))
            sides[name].serving.pause()
        for side in sides.values():
            side.serving.resume()
    return summary(options.streams, runs["on"][1:], runs["off"][1:]) | {"goal_percent": GOALS_PERCENT[kind]}


def flags(kind: str, directory: str) -> list[str]:
    """Returns the flags of the system with a kind of record."""
    if kind == "requests":
        return ["--record-requests=256"]
    if kind == "streams":
        return ["--stream-store=memory"]
    return ["--stream-store=file", f"--bus-directory={directory}"]


def _sides(stack: contextlib.ExitStack, kind: str, directory: str, common: list[str]) -> dict[str, Side]:
    on = stack.enter_context(Serving(*flags(kind, directory), *common))
    if kind != "requests":
        return {"on": Side("on", on, ASKING), "off": Side("off", on, {})}
    off = stack.enter_context(Serving("--record-requests=0", *common))
    return {"on": Side("on", on, {}), "off": Side("off", off, {})}


def order(pairs: int) -> Iterator[tuple[int, str]]:
    """Yields (number of the pair, side): the side that runs first alternates."""
    for seed, name in itertools.product(range(pairs), SIDES):
        yield seed, name if seed % 2 == 0 else next(one for one in SIDES if one != name)


def summary(streams: int, on: list[Run], off: list[Run]) -> dict[str, object]:
    """Returns the medians of both sides, and median and quartiles of what a record costs in each pair, in percent.

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
        "foreign_cores": round(statistics.median(one.foreign_cores for one in (*on, *off)), 2),
    }


def _profile(runs: list[Run]) -> dict[str, float]:
    """Returns the CPU time for each token, in µs, of each service and of the whole system: medians of the runs."""
    names = sorted({name for one in runs for name in one.cpu_us})
    found = {name: round(statistics.median(one.cpu_us.get(name, 0.0) for one in runs), 1) for name in names}
    return {**found, "all": round(statistics.median(one.cpu_us_per_token for one in runs), 1)}


def _quartiles(values: list[float]) -> list[float]:
    return [round(values[len(values) // 4], 2), round(values[-1 - len(values) // 4], 2)]


def _run(side: Side, options: argparse.Namespace, seed: int, vocab: int) -> Run:
    serving = side.serving
    busy, own, began = processes.machine_busy_s(), time.process_time(), time.monotonic()
    before = serving.cpu_seconds().total()
    rate, profile = bus_tax.through_the_bus(serving, options, seed, vocab, side=side.name, headers=side.headers)
    wall, used = time.monotonic() - began, serving.cpu_seconds().total() - before
    foreign = processes.machine_busy_s() - busy - used - (time.process_time() - own)
    return Run(rate, profile, max(0.0, foreign / wall))


if __name__ == "__main__":
    sys.exit(main())
