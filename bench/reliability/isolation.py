"""What structured output costs, and how hostile schemas or a flood under another API key slow other requests down.

    python -m bench.reliability.isolation [--model DIRECTORY] [--seconds 15] [--rounds 3] [--json FILE]

    guided    32 streams that follow a JSON Schema against 32 that follow none: share of the tokens/s
    bomb      8 streams beside requests with schemas and expressions that are made to be expensive, against 8 alone:
              ratio of the 99th percentiles of the time between two tokens
    flood     one request a second under one key while 200 requests run at all times under another key, against the same
              requests on an idle server: ratio of the 99th percentiles of the time to the first token

The two sides of each figure alternate (A B B A …), because the speed of a shared machine changes. A goal is printed
with each figure.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmark.load import Result, run_open, stream
from bench.harness.output import print_and_save
from bench.harness.serving import HOST, Serving, end_in_order

STREAMS, STREAM_TOKENS = 32, 96
BESIDE, BESIDE_TOKENS = 8, 128
FLOOD, FLOOD_TOKENS, SINGLE_TOKENS = 200, 32, 8
KEYS = {"flooding": "k-flooding", "single": "k-single"}
RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["sword", "axe", "bow"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
"""The JSON Schema of the guided streams. No output of `STREAM_TOKENS` tokens completes it."""
BOMBS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "((a?){60}){60}b"},
    {"guided_regex": "(([a-z]{1,40} ?){1,40}[0-9]{1,40}){1,40}"},
    {
        "guided_json": {
            "type": "object",
            "properties": {f"p{n}": {"type": "string", "maxLength": 900} for n in range(99)},
        }
    },
    {"guided_json": {"anyOf": [{"type": "array", "items": {"const": f"v{n}"}, "minItems": n} for n in range(150)]}},
)
Bodies = list[dict[str, Any]]


def main() -> int:
    """Measures everything once and prints it."""
    options = parse()
    end_in_order()
    print_and_save(measure(options), options.json)
    return 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command-line options."""
    parser = argparse.ArgumentParser(description="What requests cost that run beside them.")
    parser.add_argument("--model", default="", help="model directory (default: the demo model)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one side of `flood`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one server with two API keys."""
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.toml"
        keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
        flags = [f"--api-keys-file={keys}", *([f"--model={options.model}"] if options.model else [])]
        with Serving(*flags) as server:
            return asyncio.run(_all(server.port, options))


async def _all(port: int, options: argparse.Namespace) -> dict[str, Any]:
    await _streams(port, STREAMS, {})  # not counted: the first requests fill caches
    return {
        "guided": await _guided(port, options.rounds),
        "bomb": await _bomb(port, options.rounds),
        "flood": await _flood(port, options),
    }


async def _guided(port: int, rounds: int) -> dict[str, Any]:
    rates: dict[bool, list[float]] = {False: [], True: []}
    for guided in _alternating(rounds):
        result = await _streams(port, STREAMS, {"guided_json": RECORDS} if guided else {})
        rates[guided].append(result.tokens_per_s)
    shares = [guided / plain for plain, guided in zip(rates[False], rates[True], strict=True)]
    return {
        "streams": STREAMS,
        "plain_tokens_per_s": round(statistics.median(rates[False])),
        "guided_tokens_per_s": round(statistics.median(rates[True])),
        "share": round(statistics.median(shares), 3),
        "goal": ">= 0.9",
    }


async def _bomb(port: int, rounds: int) -> dict[str, Any]:
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for bombed in _alternating(rounds):
        async with _bombs(port) if bombed else contextlib.nullcontext():
            gaps[bombed] += (await _streams(port, BESIDE, {"max_tokens": BESIDE_TOKENS})).chunk_gaps_s
    return {"streams": BESIDE, **_quantiles("alone", gaps[False], "beside", gaps[True]), "goal": "<= 1.2"}


async def _flood(port: int, options: argparse.Namespace) -> dict[str, Any]:
    first: dict[bool, list[float]] = {False: [], True: []}
    refused = 0
    count = max(1, round(options.seconds))
    for flooded in _alternating(max(1, options.rounds // 2)):
        async with _flooding(port) if flooded else contextlib.nullcontext():
            bodies = _bodies(count, {"max_tokens": SINGLE_TOKENS})
            result = await run_open(HOST, port, bodies, range(count), token=KEYS["single"])
        if not flooded:
            _check(result)
        first[flooded] += result.first_token_s
        refused += len(result.errors)
    figures = _quantiles("idle", first[False], "beside", first[True])
    return {"flood": FLOOD, **figures, "refused_beside": refused, "goal": "<= 2, and 0 refused"}


@contextlib.asynccontextmanager
async def _bombs(port: int) -> AsyncIterator[None]:
    """While the context is open, sends requests one after the other, each with another expensive grammar.

    Their answers may be errors.
    """
    numbers = itertools.count()

    async def send() -> None:
        for number in numbers:
            field, value = next(iter(BOMBS[number % len(BOMBS)].items()))
            # Each grammar has a different number, so that no verdict and no compiled grammar is found in a cache.
            other = f"{value}{number}" if isinstance(value, str) else {**value, "description": f"{number}"}
            result = Result()
            body = _bodies(1, {field: other, "max_tokens": 8})[0]
            await stream(HOST, port, "/v1/completions", body, result, token=KEYS["flooding"])

    async with _meanwhile(send()):
        yield


@contextlib.asynccontextmanager
async def _flooding(port: int) -> AsyncIterator[None]:
    """Keeps `FLOOD` requests running under the key `flooding` while the context is open."""

    async def send() -> None:
        while True:
            await stream(HOST, port, "/v1/completions", _bodies(1, {"max_tokens": FLOOD_TOKENS})[0], Result(),
                         token=KEYS["flooding"])  # fmt: skip

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(FLOOD):
            await stack.enter_async_context(_meanwhile(send()))
        yield


@contextlib.asynccontextmanager
async def _meanwhile(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _streams(port: int, count: int, fields: dict[str, Any]) -> Result:
    """Runs `count` streams at once under the key `single`."""
    bodies = _bodies(count, {"max_tokens": STREAM_TOKENS, **fields})
    result = await run_open(HOST, port, bodies, [0.0] * count, token=KEYS["single"])
    _check(result)
    return result


_number = itertools.count()


def _bodies(count: int, fields: dict[str, Any]) -> Bodies:
    """Returns requests with prompts that have no prefix in common."""
    return [
        {"prompt": f"{next(_number)} knights came home and", "temperature": 0.7, "ignore_eos": True, **fields}
        for _ in range(count)
    ]


def _alternating(rounds: int) -> list[bool]:
    return [side for number in range(rounds) for side in ((False, True) if number % 2 == 0 else (True, False))]


def _quantiles(name: str, plain: Sequence[float], other_name: str, other: Sequence[float]) -> dict[str, Any]:
    """Returns medians and 99th percentiles of both sides in ms, and the ratio of the percentiles."""
    figures: dict[str, Any] = {}
    for side, values in ((name, plain), (other_name, other)):
        figures[f"{side}_p50_ms"] = round(1000 * statistics.median(values), 1)
        figures[f"{side}_p99_ms"] = round(1000 * _p99(values), 1)
    return figures | {"ratio": round(_p99(other) / _p99(plain), 2)}


def _p99(values: Sequence[float]) -> float:
    found = sorted(values)
    return found[min(len(found) - 1, int(0.99 * len(found)))]


def _check(result: Result) -> None:
    if result.errors:
        raise SystemExit(result.errors[0])


if __name__ == "__main__":
    sys.exit(main())
