"""Compares with vLLM under more requests than the servers can serve: `make bench-open ARGS="--model DIR --vllm FILE"`.

Each server's capacity is measured in a closed loop. Then each server gets the same requests at the same random moments
(Poisson), whether or not it keeps up: `--factor` times as many a second as the slower server can serve. The servers run
in turn, in another order in each round, and a server is stopped (SIGSTOP) while another one runs. They are compared by
ratios within a round. `bench.peer_systems.peers` compares them in closed loops.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from antiphon.benchmark.load import arrivals, run, run_open
from bench.harness import measure
from bench.harness.loads import Load, Prompts
from bench.harness.output import save
from bench.harness.sample import latencies, rounded
from bench.harness.serving import ROOT, Server, Serving, end_in_order
from bench.limits_of_machine import machine
from bench.peer_systems.peer_servers import Vllm, vllm_version
from bench.peer_systems.peers import OURS

CLIENTS = 32
"""Requests at once while the capacity is measured."""
FIGURES = ("request_rate", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")


@dataclass(frozen=True, slots=True)
class Open:
    """The figures of one server in one round. Rates: requests a second, from the first arrival to the last answer."""

    round: int
    server: str
    arrival_rate: float
    request_rate: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float


class Comparison:
    """The servers, and what was measured so far."""

    def __init__(self, servers: list[Server], prompts: Prompts, load: Load, factor: float) -> None:
        self.found: list[Open] = []
        self.capacity: dict[str, float] = {}
        self._servers, self._prompts, self._load, self._factor = servers, prompts, load, factor
        self._seed = time.time_ns() // 10**9 * 1000

    def measure_capacity(self) -> None:
        """Measures how many requests a second each server serves with `CLIENTS` clients."""
        for server in self._servers:
            with _resumed(server):
                warmup, measured = self._bodies(server)
                measure.check(asyncio.run(run(server.host, server.port, warmup, CLIENTS)), self._load, len(warmup))
                found = asyncio.run(run(server.host, server.port, measured, CLIENTS))
            measure.check(found, self._load, len(measured))
            self.capacity[server.name] = len(measured) / found.wall_s
            print(f"capacity of {server.name}: {self.capacity[server.name]:.2f} requests/s", flush=True)

    def run_round(self, number: int) -> None:
        """Sends requests to each server in turn, at the same moments after the start."""
        rate = self._factor * min(self.capacity.values())
        moments = arrivals(self._load.requests, rate, number)
        first = number % len(self._servers)
        for server in self._servers[first:] + self._servers[:first]:
            with _resumed(server):
                _, bodies = self._bodies(server)
                result = asyncio.run(run_open(server.host, server.port, bodies, moments))
            measure.check(result, self._load, len(bodies))
            times = {name: value for name, value in latencies(result).items() if name in FIGURES}
            self.found.append(Open(number, server.name, rate, self._load.requests / result.wall_s, **times))
            print(f"round {number} {json.dumps(rounded(asdict(self.found[-1])))}", flush=True)

    def ratios(self) -> dict[str, dict[str, float]]:
        """Returns for each other server the medians, over the rounds, of our figures divided by its figures."""
        ours = {one.round: one for one in self.found if one.server == OURS}
        return {
            name: {
                figure: statistics.median(
                    getattr(ours[one.round], figure) / max(1e-9, getattr(one, figure))
                    for one in self.found
                    if one.server == name
                )
                for figure in FIGURES
            }
            for name in self.capacity
            if name != OURS
        }

    def _bodies(self, server: Server) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns bodies with new prompts: those for the warm-up, and those to measure."""
        self._seed += 1
        draw, model = self._prompts.draw(self._load, self._seed), server.model_name()
        return measure.bodies(model, self._load, draw.warmup), measure.bodies(model, self._load, draw.measured)


@contextlib.contextmanager
def _resumed(server: Server) -> Iterator[None]:
    server.resume()
    try:
        yield
    finally:
        server.pause()


def main() -> int:
    """Parses the command line, starts the servers, measures, and writes the results."""
    options = parse()
    model = options.model.resolve()
    load = Load("open", CLIENTS, options.prompt, options.output, options.requests, CLIENTS)
    versions = {OURS: machine.version("antiphon")}
    end_in_order()
    with contextlib.ExitStack() as stack:
        servers: list[Server] = [stack.enter_context(Serving(f"--model={model}"))]
        servers[0].pause()
        if options.vllm:
            servers.append(stack.enter_context(Vllm(options.vllm, model, options.vllm_dtype)))
            servers[1].pause()
            versions["vllm"] = f"{vllm_version(options.vllm)}, {options.vllm_dtype}"
        compared = Comparison(servers, Prompts(model), load, options.factor)
        compared.measure_capacity()
        for number in range(options.rounds):
            compared.run_round(number)
    record: dict[str, Any] = {
        "machine": machine.facts(),
        "model": model.name,
        "versions": versions,
        "load": {"prompt": load.prompt, "output": load.output, "requests": load.requests, "factor": options.factor},
        "capacity": rounded(compared.capacity),
        "ratios": rounded(compared.ratios()),
        "rounds": [rounded(asdict(one)) for one in compared.found],
    }
    path = options.results or ROOT / "bench" / "results" / f"open-{model.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save(record, path)
    print(f"{json.dumps(record['ratios'], indent=1)}\nwritten to {path}")
    return 0


def parse() -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(prog="open_loop", description="more requests than servers can serve, beside vLLM")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--vllm", type=Path, help="the command `vllm` of an environment with vLLM's CPU build")
    parser.add_argument("--vllm-dtype", default="bfloat16", help="float32 is vLLM's better one without AVX512-BF16")
    parser.add_argument(
        "--factor", type=float, default=1.5, help="arrivals a second over what the slower one can serve"
    )
    parser.add_argument("--prompt", type=int, default=400, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of an output")
    parser.add_argument("--requests", type=int, default=64, help="requests of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="default: bench/results/open-MODEL.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
