"""A long run: streams and faults for an hour, and whether memory, descriptors, threads and used KV blocks grow.

    make soak ARGS="--minutes 95 --warm-up 65 --streams 3 --json FILE"

Starts a server with two processes of each service and holds streams on it, which are compared as in `antiphon chaos`.
Faults hit the second process of each service only, so that the first ones live through the whole run: their samples
show growth. The report has, for each of these and for the bus, the least-squares slope of resident memory (KiB a
minute), open descriptors, threads and, for services, subscriptions (an hour), after a warm-up. The bus grows until it
has an hour of records of streams (`limits.STREAM_FORGOTTEN_S`), so its warm-up takes that long. At the end the
invariants must hold, with all KV blocks free.
"""

import argparse
import asyncio
import bisect
import functools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from antiphon.chaos.command import served_model, settle
from antiphon.chaos.schedule import make_schedule
from antiphon.chaos.server import own_server
from antiphon.chaos.streams import Load, learn, make_bodies
from antiphon.chaos.targets import Injector, find_targets
from bench.harness.output import print_and_save

WARM_UP = 0.25
"""Default share of the run that does not count: caches fill and libraries load."""
NUM_RECORDS = 64
"""Finished requests of which a gateway keeps the timeline: so few that the warm-up reaches this number."""
PAGE_KIB = 4
PARTS = 6
_SUBSCRIPTIONS = re.compile(r'^antiphon:bus_subscriptions\{id="([^"]+)",.*\} (\S+)$', re.MULTILINE)


@dataclass
class Samples:
    """Samples of one process: seconds since the start, resident KiB, open descriptors, threads, subscriptions."""

    seconds: list[float] = field(default_factory=list[float])
    rss_kib: list[float] = field(default_factory=list[float])
    descriptors: list[float] = field(default_factory=list[float])
    threads: list[float] = field(default_factory=list[float])
    subscriptions: list[float] = field(default_factory=list[float])

    def take(self, pid: int, seconds: float, subscriptions: float) -> None:
        """Takes one sample of a running process."""
        process = Path(f"/proc/{pid}")
        self.seconds.append(seconds)
        self.rss_kib.append(PAGE_KIB * int((process / "statm").read_text().split()[1]))
        self.descriptors.append(len(list((process / "fd").iterdir())))
        self.threads.append(len(list((process / "task").iterdir())))
        self.subscriptions.append(subscriptions)


@dataclass(frozen=True)
class Growth:
    """Slopes of one process, and its resident memory at the end in MiB."""

    name: str
    rss_mib: float
    rss_mib_over_time: tuple[float, ...]
    """At the ends of PARTS equal parts of the run."""
    rss_kib_per_minute: float
    descriptors_per_hour: float
    threads_per_hour: float
    subscriptions: float
    subscriptions_per_hour: float


def slope(seconds: Sequence[float], values: Sequence[float], warm_up_s: float) -> float:
    """Returns the least-squares slope of the values per second, after the warm-up; 0 for fewer than two samples."""
    skip = bisect.bisect(seconds, warm_up_s)
    xs, ys = seconds[skip:], values[skip:]
    if len(xs) < 2:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    square = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / square if square else 0.0


def at_parts(rss_kib: Sequence[float]) -> tuple[float, ...]:
    """Returns the values at the ends of PARTS equal parts, in MiB."""
    return tuple(round(rss_kib[max(0, len(rss_kib) * part // PARTS - 1)] / 1024, 1) for part in range(1, PARTS + 1))


def growth(name: str, samples: Samples, warm_up_s: float) -> Growth:
    """Returns the slopes of one process after a warm-up of this many seconds."""
    per_s = functools.partial(slope, samples.seconds, warm_up_s=warm_up_s)
    return Growth(
        name,
        round(samples.rss_kib[-1] / 1024, 1),
        at_parts(samples.rss_kib),
        round(60 * per_s(samples.rss_kib), 1),
        round(3600 * per_s(samples.descriptors), 1),
        round(3600 * per_s(samples.threads), 1),
        samples.subscriptions[-1],
        round(3600 * per_s(samples.subscriptions), 1),
    )


async def soak(minutes: float, warm_up: float, streams: int, seed: int, model: str) -> dict[str, Any]:
    """Runs it and returns the report. `minutes`, `warm_up`: of the run, and of its beginning that does not count."""
    async with own_server(model, NUM_RECORDS) as (server, launcher):
        names = find_targets(launcher)
        steady = {name: target.pid for name, target in names.items() if not name.endswith("-2")}
        victims = {target.service: [name] for name, target in names.items() if name.endswith("-2")}
        bodies = make_bodies(await served_model(server), 24, 300, seed)
        known = [await learn(server, body, 120) for body in bodies]
        load = Load(server, known, lambda _since, _until: True, hang_s=120, seed=seed)
        running = asyncio.create_task(load.run(streams))
        injector, began = Injector(launcher, lambda _: True), time.monotonic()
        samples = {name: Samples() for name in steady}

        async def sample() -> None:
            counts: dict[str, float] = {}
            while True:
                page = (await server.get("/metrics")).body.decode()  # empty if its gateway is killed meanwhile
                counts = {name: float(count) for name, count in _SUBSCRIPTIONS.findall(page)} or counts
                for name, pid in steady.items():
                    samples[name].take(pid, time.monotonic() - began, counts.get(name, 0.0))
                await asyncio.sleep(max(1.0, minutes / 5))

        sampling = asyncio.create_task(sample())
        faults = make_schedule(seed, 60 * minutes, victims, every_s=20)
        verified = 0
        for fault in faults:
            await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
            verified += (await injector.apply(fault)).verified
        await asyncio.sleep(max(0.0, began + 60 * minutes - time.monotonic()))
        load.stop()
        await running
        sampling.cancel()
        breaches = await settle(server)
    wrong = [one for one in load.outcomes if one.difference or one.hung or one.problem]
    return {
        "minutes": minutes,
        "warm_up_minutes": warm_up,
        "seed": seed,
        "faults": len(faults),
        "faults_verified": verified,
        "streams": len(load.outcomes),
        "tokens": sum(len(one.answer.token_ids) for one in load.outcomes),
        "streams_wrong": len(wrong),
        "breaches": breaches,
        "growth": [asdict(growth(name, each, 60 * warm_up)) for name, each in sorted(samples.items())],
    }


def main() -> int:
    """Parses the command line, runs, and prints the report. Returns 1 if a stream or an invariant was wrong."""
    parser = argparse.ArgumentParser(prog="soak", description="a long run that looks for growth")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=None, help="minutes that do not count (default: a quarter)")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="")
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    warm_up = WARM_UP * options.minutes if options.warm_up is None else options.warm_up
    report = asyncio.run(soak(options.minutes, warm_up, options.streams, options.seed, options.model))
    print_and_save(report, options.json)
    return 1 if report["streams_wrong"] or report["breaches"] else 0


if __name__ == "__main__":
    sys.exit(main())
