"""Measures a server's highest rate of answers, and then what it answers and how it refuses under more load.

    make overload ARGS="--seconds 20 --factors 1,2,10"

The peak is measured first: answers per second in a closed loop with twice as many clients as batch slots. Then requests
arrive at random moments (Poisson), `factor` times the peak in each load, whatever the server does. For each load the
table has: arrivals, answers and their rate compared with the peak, times of the answers; refusals (429 and 503), and
the time until they came. The column `told/true` compares the time after which a refusal asks the client to come back
(`retry-after-ms`) with the wait of the accepted requests that were sent within half a second of the refused one: 1 is
exact, and the server adds up to a quarter at random. Client and server share the machine, so the times of refusals
include time of the client.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.async_client import connected
from antiphon.benchmark.load import poisson
from bench.harness.serving import HOST, Serving, end_in_order

PATH = "/v1/completions"
REFUSED = (429, 503)
NEAR_S = 0.5


@dataclass(frozen=True)
class Answer:
    """One request: when it was sent (seconds after the load began), how long it took, its status, `retry-after-ms`."""

    sent_s: float
    took_s: float
    status: int
    retry_after_ms: int = 0


@dataclass
class Load:
    """What happened in one load of `seconds`."""

    seconds: float
    answers: list[Answer] = field(default_factory=list[Answer])

    @property
    def good(self) -> list[Answer]:
        """The answers with content, also those that came after the load."""
        return [one for one in self.answers if one.status == 200]

    @property
    def refused(self) -> list[Answer]:
        """The refusals."""
        return [one for one in self.answers if one.status in REFUSED]

    @property
    def goodput(self) -> float:
        """Answers per second that came during the load."""
        return sum(one.sent_s + one.took_s <= self.seconds for one in self.good) / self.seconds

    def told_over_true(self) -> list[float]:
        """Returns for each refusal its `retry-after-ms` divided by the median wait of the accepted requests near it.

        Near are requests sent within `NEAR_S` of the refused one. The wait of a request is its duration minus that of
        the fastest answer. Refusals without a near accepted request are left out.
        """
        good = self.good
        least = min((one.took_s for one in good), default=0.0)
        found: list[float] = []
        for refusal in self.refused:
            near = [one.took_s - least for one in good if abs(one.sent_s - refusal.sent_s) <= NEAR_S]
            if near and statistics.median(near) > 0:
                found.append(refusal.retry_after_ms / 1000 / statistics.median(near))
        return found


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile by the nearest rank; NaN without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


async def ask(port: int, body: bytes, began: float) -> Answer:
    """Sends one request on a connection of its own. The time to connect is part of the measured time."""
    sent = time.perf_counter()
    status, retry_after_ms = 0, 0
    try:
        async with connected(HOST, port) as connection:
            response = await connection.ask("POST", PATH, body)
            await response.read()
            status, retry_after_ms = response.status, int(response.headers.get("retry-after-ms", 0))
    except (OSError, EOFError, ValueError) as error:
        print(f"a request failed: {type(error).__name__}: {error}", file=sys.stderr)
    return Answer(sent - began, time.perf_counter() - sent, status, retry_after_ms)


async def closed(port: int, body: bytes, clients: int, seconds: float) -> Load:
    """Has each client send its next request when it has the answer to the one before."""
    load, began = Load(seconds), time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - began < seconds:
            load.answers.append(await ask(port, body, began))

    await asyncio.gather(*(client() for _ in range(clients)))
    return load


async def opened(port: int, body: bytes, starts: Sequence[float], seconds: float) -> Load:
    """Sends a request at each of these moments, and waits for all answers."""
    load, began = Load(seconds), time.perf_counter()
    tasks: list[asyncio.Task[Answer]] = []
    for start in starts:
        await asyncio.sleep(max(0.0, began + start - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port, body, began)))
    load.answers += await asyncio.gather(*tasks)
    return load


def row(factor: float, load: Load, peak: float) -> str:
    """Returns the row of a load in the table."""
    good, refused = [one.took_s for one in load.good], [1000 * one.took_s for one in load.refused]
    other = len(load.answers) - len(good) - len(refused)
    ratio = quantile(load.told_over_true(), 0.5)
    return (
        f"| {factor:g} | {len(load.answers)} | {load.goodput:.1f} ({load.goodput / peak:.0%}) | "
        f"{quantile(good, 0.5):.2f} / {quantile(good, 0.99):.2f} s | {len(refused)} | "
        f"{quantile(refused, 0.5):.0f} / {quantile(refused, 0.99):.0f} ms | {ratio:.2f} | {other} |"
    )


HEAD = """| arrivals/peak | requests | answers/s (of peak) | p50/p99 | refused | refusal p50/p99 | told/true | other |
|---|---|---|---|---|---|---|---|"""


async def measure(server: Serving, rows: int, seconds: float, factors: Sequence[float], body: bytes) -> None:
    """Runs the loads on a running server and prints the table."""
    await closed(server.port, body, 2 * rows, min(3.0, seconds))
    peak = (await closed(server.port, body, 2 * rows, seconds)).goodput
    print(f"peak: {peak:.1f} answers/s with {2 * rows} clients\n\n{HEAD}", flush=True)
    for number, factor in enumerate(factors):
        starts = list(itertools.takewhile(lambda start: start < seconds, poisson(factor * peak, number)))
        load = await opened(server.port, body, starts, seconds)
        print(row(factor, load, peak), flush=True)


def main() -> int:
    """Parses the command line, starts a server, and measures."""
    parser = argparse.ArgumentParser(prog="overload", description="what a server does with more than it can do")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load")
    parser.add_argument("--factors", default="1,2,10", help="arrivals as multiples of the peak")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--rows", type=int, default=16, help="batch slots of the engine")
    parser.add_argument("--max-queue-wait", type=float, default=3.0, help="that of the server, seconds")
    parser.add_argument("--model", default="", help="another model than the demo model")
    options = parser.parse_args()
    factors = [float(one) for one in options.factors.split(",")]
    body = json.dumps({"prompt": "Once", "max_tokens": options.max_tokens, "ignore_eos": True}).encode()
    flags = [f"--max-num-seqs={options.rows}", f"--max-queue-wait={options.max_queue_wait}"]
    flags += [f"--model={options.model}"] if options.model else []
    end_in_order()
    with Serving(*flags) as server:
        asyncio.run(measure(server, options.rows, options.seconds, factors, body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
