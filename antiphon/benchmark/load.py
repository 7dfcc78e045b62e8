"""Loads of streamed requests: their prompts and arrival times, sending them to an OpenAI-compatible server, and times.

Closed loop (`run`): each of `concurrency` workers sends its next request when its last one has ended. Open loop
(`run_open`): requests are sent at given times, whatever the server does. Tokens are counted by the usage figures that
the server sends; a stream without usage figures is an error.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from antiphon.async_client import Response, authorization, connected

Clock = Callable[[], float]
"""Seconds of some clock that does not go backwards."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
ERROR_CHARS = 500
FIRST_TOKEN_ID = 10
"""Lower ids are often special tokens."""


class Delta(msgspec.Struct):
    """The new part of a chat message in a stream event."""

    content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """One choice of a stream event: `text` for a completion, `delta` for a chat message."""

    text: str = ""
    delta: Delta | None = None


class Usage(msgspec.Struct):
    """Numbers of tokens as the server counts them."""

    prompt_tokens: int
    completion_tokens: int


class Chunk(msgspec.Struct):
    """The fields of a stream event that the client reads."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


@dataclass(kw_only=True)
class Result:
    """The raw result of one load. Times are in seconds of `clock`."""

    clock: Clock = time.perf_counter
    wall_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    """For each request: time from sending to the first text."""
    wait_s: list[float] = field(default_factory=list)
    """For each request of an open loop: time from its arrival until it could be sent."""
    chunk_gaps_s: list[float] = field(default_factory=list)
    """Times between two consecutive pieces of text of a request."""
    token_s: list[float] = field(default_factory=list)
    """For each request: mean time per token after the first text."""
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time."""
        return self.output_tokens / self.wall_s

    def take(self, sent: float, arrivals: list[float], usage: Usage | None) -> None:
        """Adds a finished request. `arrivals` has the times at which its pieces of text arrived."""
        if usage is None or not arrivals:
            self.errors.append("a stream ended without usage" if usage is None else "a stream brought no text")
            return
        self.prompt_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        self.first_token_s.append(arrivals[0] - sent)
        self.chunk_gaps_s += [later - earlier for earlier, later in itertools.pairwise(arrivals)]
        if usage.completion_tokens > 1:
            self.token_s.append((arrivals[-1] - arrivals[0]) / (usage.completion_tokens - 1))


async def run(
    host: str,
    port: int,
    bodies: list[dict[str, Any]],
    concurrency: int,
    path: str = "/v1/completions",
    clock: Clock = time.perf_counter,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Result:
    """Sends every body once, at most `concurrency` at a time, and returns the result. `headers`: sent besides."""
    result, queue = Result(clock=clock), list(reversed(bodies))

    async def worker() -> None:
        while queue:
            await stream(host, port, path, queue.pop(), result, headers=headers)

    started = clock()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    result.wall_s = clock() - started
    return result


async def run_open(
    host: str,
    port: int,
    bodies: Sequence[dict[str, Any]],
    starts_s: Sequence[float],
    *,
    concurrency: int | None = None,
    token: str | None = None,
) -> Result:
    """Sends body i at second `starts_s[i]`.

    `concurrency`: largest number of requests at once; further ones wait, which `wait_s` counts and their other times do
    not. Returns when all requests have ended. A connection that fails is an error of its request.
    """
    result = Result()
    room = asyncio.Semaphore(concurrency or len(bodies) or 1)
    started = result.clock()

    async def one(body: dict[str, Any], start_s: float) -> None:
        await asyncio.sleep(max(0.0, started + start_s - result.clock()))
        due = result.clock()
        async with room:
            result.wait_s.append(result.clock() - due)
            try:
                await stream(host, port, "/v1/completions", body, result, token=token)
            except OSError as error:
                result.errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(one(body, start_s) for body, start_s in zip(bodies, starts_s, strict=True)))
    result.wall_s = result.clock() - started
    return result


async def stream(
    host: str, port: int, path: str, body: dict[str, Any], result: Result, *, token: str | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> None:  # fmt: skip
    """Sends one streamed request on its own connection. Its durations count from the moment when it is sent."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    async with connected(host, port) as connection:
        sent = result.clock()
        response = await connection.ask("POST", path, data, {**authorization(token), **headers})
        if response.status != 200:
            text = (await response.read(ERROR_CHARS)).decode(errors="replace")
            result.errors.append(f"{response.status_line} {text}"[:ERROR_CHARS])
            return
        await _events(response, result, sent)


async def _events(response: Response, result: Result, sent: float) -> None:
    arrivals: list[float] = []
    usage: Usage | None = None
    async for line in response.lines():
        if line == b"data: [DONE]":
            break
        if not line.startswith(b"data: "):
            continue
        now = result.clock()
        chunk = msgspec.json.decode(line[6:], type=Chunk)
        if chunk.error is not None:
            result.errors.append(f"an error event: {chunk.error}"[:ERROR_CHARS])
            return
        usage = chunk.usage or usage
        if any(_has_text(choice) for choice in chunk.choices):
            arrivals.append(now)
    result.take(sent, arrivals, usage)


def _has_text(choice: Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta is not None and (delta.content or delta.reasoning)))


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns lists of `length` token ids, different for each request, so that no prefix is found in a cache."""
    draw = random.Random(f"prompts/{seed}")
    return [
        [draw.randrange(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(length)] for _ in range(count)
    ]


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yields arrival times in seconds since the start, without an end: a Poisson process of `rate` requests per second.

    With an infinite rate all arrive at once.
    """
    draw = random.Random(f"arrivals/{seed}")
    now = 0.0
    while True:
        yield now
        now += draw.expovariate(rate) if rate != float("inf") else 0.0


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Returns the first `count` times of `poisson`."""
    return list(itertools.islice(poisson(rate, seed), count))
