"""Time between the tokens of running streams while long prompts arrive: prefill and decode apart, or on each engine.

    python -m bench.disaggregation MODEL_DIRECTORY [--streams 8] [--prompt 192] [--every S] [--seconds 20] [--json FILE]

Both servers have two engines. They run in turn, several times each, because the speed of a shared machine changes. The
streams run all the time; a prompt with a short answer arrives every few seconds. Prints for each server the quantiles
of the time between two tokens of the streams, the median time to the first token of the prompts, and the ratio of the
99th percentiles with its goal. Part of `make bench` for the models of `make bench-models`.

The prompts must arrive so often that more than 1 of 100 tokens is generated while a prompt is computed; otherwise the
99th percentile does not show the effect of the prompts. And one engine must be able to compute all of them. By default
the time between two prompts is `LOAD` times the time that the first server needs for one.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from bench.harness.output import print_and_save
from bench.harness.serving import HOST, Serving, end_in_order

SERVERS = {"both on each engine": ("--engines=2",), "apart": ("--prefill=1", "--decode=1")}
VOCABULARY = range(1000, 20_000)
STREAM_PROMPT, LONG_OUTPUT = 64, 4
READY_S = 180.0
LOAD = 1.5
GOAL = 0.5
"""Goal for the ratio of the 99th percentiles of the time between two tokens: prefill and decode apart, divided by both
on each engine."""


@dataclass
class Measured:
    """Times in seconds, of all rounds."""

    between: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def main() -> None:
    """Measures and prints."""
    options = parse()
    end_in_order()
    results = measure(options)
    print_and_save(results, options.json)
    print(text(results))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="Time between tokens while long prompts arrive.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two prompts (default: see above)")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of each server in milliseconds, over all rounds, and the ratio of the 99th percentiles."""
    found = {name: Measured() for name in SERVERS}
    every_s = options.every
    for number in range(options.rounds):
        for name, flags in SERVERS.items():
            with Serving(f"--model={options.model}", "--kv-cache-memory-gb=0.5", *flags) as server:
                _wait_for_engines(server, 2)
                every_s = every_s or LOAD * asyncio.run(_prompt_s(server, options.prompt))
                asyncio.run(_load(server, options, found[name], number, every_s))
            print(f"round {number + 1}, {name}: done", file=sys.stderr, flush=True)
    return summary(found) | {"streams": options.streams, "prompt": options.prompt, "every_s": round(every_s, 2)}


def summary(found: Mapping[str, Measured]) -> dict[str, Any]:
    """Returns the quantiles of each server, and the 99th percentile of `apart` divided by that of the other."""
    servers = {name: _quantiles(measured) for name, measured in found.items()}
    together, apart = (servers[name]["p99_ms"] for name in SERVERS)
    return {"servers": servers, "p99_ratio": round(apart / together, 3), "goal": GOAL}


def text(results: Mapping[str, Any]) -> str:
    """Returns the results as text for the terminal."""
    load = f"{results['streams']} streams, a prompt of {results['prompt']} tokens every {results['every_s']} s"
    lines = [f"Between two tokens of running streams while prompts arrive: {load}, two engines"]
    for name, one in results["servers"].items():
        quantiles = f"p50 {one['p50_ms']:.0f} ms, p99 {one['p99_ms']:.0f} ms, longest {one['max_ms']:.0f} ms"
        lines.append(f"{name:<20} {quantiles}; first token of a prompt {one['first_ms']:.0f} ms")
    return "\n".join([*lines, f"p99 apart / both: {results['p99_ratio']} (goal {results['goal']})"])


def _quantiles(measured: Measured) -> dict[str, float]:
    cuts = statistics.quantiles(measured.between, n=100)
    times = {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(measured.between)}
    times["first_ms"] = statistics.median(measured.first)
    return {name: round(1000 * value, 1) for name, value in times.items()}


def _wait_for_engines(server: Serving, count: int) -> None:
    deadline = time.monotonic() + READY_S
    while server.get("/metrics")[1].count(b"antiphon:engine_stalled{") < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all engines are ready: {server.output()}")
        time.sleep(0.2)


async def _prompt_s(server: Serving, length: int) -> float:
    """Returns the seconds to the first token of a prompt on the idle server, measured after one prompt to warm up."""
    measured, draw = Measured(), random.Random(0)
    async with _client(server) as client:
        for _ in range(2):
            await _long(client, server.model_name(), draw, length, measured)
    return measured.first[-1]


def _client(server: Serving) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{HOST}:{server.port}/v1", api_key="none", timeout=300)


async def _load(server: Serving, options: argparse.Namespace, measured: Measured, number: int, every_s: float) -> None:
    draw = random.Random(number)
    async with _client(server) as client:
        model = server.model_name()
        end = time.perf_counter() + options.seconds
        streams = [asyncio.create_task(_stream(client, model, draw, measured, end)) for _ in range(options.streams)]
        await asyncio.sleep(1.0)
        prompts: list[asyncio.Task[None]] = []
        while time.perf_counter() < end:
            prompts.append(asyncio.create_task(_long(client, model, draw, options.prompt, measured)))
            await asyncio.sleep(every_s)
        await asyncio.gather(*streams, *prompts)


async def _stream(client: openai.AsyncOpenAI, model: str, draw: random.Random, measured: Measured, end: float) -> None:
    """Runs one stream after the other until the time `end`; the time to a stream's first token does not count."""
    while time.perf_counter() < end:
        last = None
        tokens = _tokens(client, model, draw.choices(VOCABULARY, k=STREAM_PROMPT), 256)
        async with contextlib.aclosing(tokens):
            async for at in tokens:
                if last is not None:
                    measured.between.append(at - last)
                last = at
                if at > end:
                    break


async def _long(client: openai.AsyncOpenAI, model: str, draw: random.Random, length: int, measured: Measured) -> None:
    started = time.perf_counter()
    first = None
    async for at in _tokens(client, model, draw.choices(VOCABULARY, k=length), LONG_OUTPUT):
        first = first or at
    if first is not None:
        measured.first.append(first - started)


async def _tokens(client: openai.AsyncOpenAI, model: str, prompt: list[int], max_tokens: int) -> AsyncGenerator[float]:
    """Yields the time of each token."""
    asked = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async with await asked as chunks:
        async for _ in chunks:
            yield time.perf_counter()


if __name__ == "__main__":
    main()
