"""Time between the tokens of running streams while long prompts arrive: prefill and decode apart, or on each engine.

    python -m bench.disaggregation MODEL_DIRECTORY [--streams 2] [--prompt 512] [--every 5] [--seconds 30]

Both servers have two engines and run one after the other, several times in turn, since a shared machine changes. The
streams run all the time; a long prompt with a short answer arrives every few seconds. Prints for each server the
quantiles of the time between two tokens of the streams, and the median time to the first token of the long prompts.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import openai  # noqa: E402  (after the path)

from bench.serving import HOST, Serving, end_in_order  # noqa: E402  (after the path)

SERVERS = {"both on each engine": ("--engines=2",), "apart": ("--prefill=1", "--decode=1")}
VOCABULARY = range(1000, 20_000)
STREAM_PROMPT, LONG_OUTPUT = 64, 4
READY_S = 180.0


@dataclass
class Measured:
    """Times in seconds, of all rounds."""

    between: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time between tokens while long prompts arrive.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    end_in_order()
    found = {name: Measured() for name in SERVERS}
    for number in range(options.rounds):
        for name, flags in SERVERS.items():
            with Serving(f"--model={options.model}", "--kv-cache-memory-gb=0.5", *flags) as server:
                _wait_for_engines(server, 2)
                asyncio.run(_load(server, options, found[name], number))
            print(f"round {number + 1}, {name}: {_text(found[name])}", flush=True)
    print()
    for name, measured in found.items():
        print(f"{name:<20} {_text(measured)}")


def _text(measured: Measured) -> str:
    cuts = statistics.quantiles(measured.between, n=100)
    p50, p99, most = (1000 * x for x in (cuts[49], cuts[98], max(measured.between)))
    first = 1000 * statistics.median(measured.first)
    return (
        f"between tokens p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {most:.0f} ms; first token of a prompt {first:.0f} ms"
    )


def _wait_for_engines(server: Serving, count: int) -> None:
    deadline = time.monotonic() + READY_S
    while server.get("/metrics")[1].count(b"antiphon:engine_stalled{") < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all engines are ready: {server.output()}")
        time.sleep(0.2)


async def _load(server: Serving, options: argparse.Namespace, measured: Measured, number: int) -> None:
    draw = random.Random(number)
    async with openai.AsyncOpenAI(base_url=f"http://{HOST}:{server.port}/v1", api_key="none", timeout=300) as client:
        model = server.model_name()
        end = time.perf_counter() + options.seconds
        streams = [asyncio.create_task(_stream(client, model, draw, measured, end)) for _ in range(options.streams)]
        await asyncio.sleep(1.0)
        prompts: list[asyncio.Task[None]] = []
        while time.perf_counter() < end:
            prompts.append(asyncio.create_task(_long(client, model, draw, options.prompt, measured)))
            await asyncio.sleep(options.every)
        await asyncio.gather(*streams, *prompts)


async def _stream(client: openai.AsyncOpenAI, model: str, draw: random.Random, measured: Measured, end: float) -> None:
    """One stream after the other until the end; the time to a stream's first token does not count."""
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
