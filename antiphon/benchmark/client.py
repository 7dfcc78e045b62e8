"""Sends streamed requests to an OpenAI-compatible server and measures them. Raw sockets keep the CPU time small.

Closed loop (`run`): each of `concurrency` workers sends its next request when its last one has ended. Open loop
(`run_open`): requests are sent at given times, whatever the server does. Tokens are counted by the usage figures that
the server sends; a stream without usage figures is an error. Each request has its own connection, because some servers
close an idle connection at the moment when it is used again.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

Clock = Callable[[], float]
"""Seconds of some clock that does not go backwards."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
READ_LIMIT = 2**20
ERROR_CHARS = 500


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


@dataclass
class Result:
    """The raw result of one load. Times are in seconds of `clock`."""

    clock: Clock = time.perf_counter
    wall_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    """For each request: time from sending to the first text."""
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
    result, queue = Result(clock), list(reversed(bodies))

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
    path: str = "/v1/completions",
    token: str | None = None,
) -> Result:
    """Sends body i at second `starts_s[i]`.

    `concurrency`: largest number of requests at once; further ones wait, and their times include the wait. Returns when
    all requests have ended. A connection that fails is an error of its request.
    """
    result = Result()
    room = asyncio.Semaphore(concurrency or len(bodies) or 1)
    started = result.clock()

    async def one(body: dict[str, Any], start_s: float) -> None:
        await asyncio.sleep(max(0.0, started + start_s - result.clock()))
        due = result.clock()
        async with room:
            try:
                await stream(host, port, path, body, result, token=token, sent=due)
            except OSError as error:
                result.errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(one(body, start_s) for body, start_s in zip(bodies, starts_s, strict=True)))
    result.wall_s = result.clock() - started
    return result


async def stream(
    host: str, port: int, path: str, body: dict[str, Any], result: Result, *, token: str | None = None,
    sent: float | None = None, headers: Mapping[str, str] = NO_HEADERS,
) -> None:  # fmt: skip
    """Sends one streamed request on its own connection. `sent`: time from which its durations count (default: now)."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=READ_LIMIT)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    sent = result.clock() if sent is None else sent
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            result.errors.append((status + await reader.read(ERROR_CHARS)).decode(errors="replace"))
            return
        await _events(reader, result, sent)
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader, result: Result, sent: float) -> None:
    arrivals: list[float] = []
    usage: Usage | None = None
    async for line in _lines(reader):
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


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the lines of a response's body."""
    chunked = False
    while (header := (await reader.readline()).strip().lower()) != b"":
        chunked = chunked or (header.startswith(b"transfer-encoding:") and header.endswith(b"chunked"))
    rest = b""
    async for piece in _chunks(reader) if chunked else reader:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields the chunks of a chunked body (RFC 9112, section 7.1)."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]
