"""A lean load on an OpenAI-compatible server: raw sockets, so that the client takes little of a small machine.

Closed loop: `concurrency` workers, each sends its next streamed request when the last one has ended. Tokens are counted
by the server's own usage figures. Used by the other scripts here.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass
class Result:
    """One load. Times in seconds."""

    wall_s: float = 0.0
    output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    chunk_gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the wall time."""
        return self.output_tokens / self.wall_s


async def run(host: str, port: int, bodies: list[dict], concurrency: int, path: str = "/v1/completions") -> Result:
    """Sends every body once."""
    result, queue = Result(), list(reversed(bodies))

    async def worker() -> None:
        while queue:
            await stream(host, port, path, queue.pop(), result)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    result.wall_s = time.perf_counter() - started
    return result


async def stream(host: str, port: int, path: str, body: dict, result: Result) -> None:
    """One streamed request on a connection of its own."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    started = time.perf_counter()
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            result.errors.append((status + await reader.read(2000)).decode(errors="replace"))
            return
        await _events(reader, result, started)
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader, result: Result, started: float) -> None:
    previous, usage = None, None
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        now = time.perf_counter()
        if previous is None:
            result.first_token_s.append(now - started)
        else:
            result.chunk_gaps_s.append(now - previous)
        previous = now
        if b'"usage":{' in line:
            usage = json.loads(line[6:])["usage"]
        elif line.startswith(b'data: {"error"'):
            result.errors.append(line.decode())
    if usage is None:
        result.errors.append("a stream ended without usage")
    else:
        result.output_tokens += usage["completion_tokens"]
