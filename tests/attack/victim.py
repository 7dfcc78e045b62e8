"""The client that is measured during an attack: some streams at once, one after the other, and /livez.

    python -m tests.attack.victim PORT KEY STREAMS

A process of its own, so that it does not wait for the attacker's interpreter. Each line on its standard input closes a
window: it answers with the window as a line of JSON (`judging.Window`) and starts a new one. It ends with its input.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.attack.judging import Window, window_of

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 400
PAUSE_S = 0.1
"""Between two looks at /livez, and before a stream is tried again."""
ANSWER_S = 120.0
"""Longest time that the victim waits for a line of an answer; longer than any attack."""


class Watch:
    """What the victim has seen since the last window."""

    def __init__(self, streams: int) -> None:
        self.since = [time.monotonic()] * streams
        """For each stream when its last token came, or when it was asked for."""
        self._reset()

    def _reset(self) -> None:
        self.began, self.lost, self.refused = time.monotonic(), 0, 0
        self.gaps, self.livez = list[float](), list[float]()
        self.livez_since = self.began

    def token(self, stream: int) -> None:
        """Notes a token."""
        now = time.monotonic()
        self.gaps.append(now - self.since[stream])
        self.since[stream] = now

    def close(self) -> Window:
        """Returns the window until now, in which the gaps that are open count as long as they are."""
        now = time.monotonic()
        # What is still waited for counts with the time that has passed in this window.
        gaps = [*self.gaps, *(now - max(since, self.began) for since in self.since)]
        livez = [*self.livez, now - max(self.livez_since, self.began)]
        window = window_of(now - self.began, len(self.gaps), gaps, livez, lost=self.lost, refused=self.refused)
        self._reset()
        return window


def head_of(key: str) -> str:
    """Returns the header of a key; nothing without one."""
    return f"Authorization: Bearer {key}\r\n" if key else ""


async def stream(port: int, key: str, number: int, watch: Watch) -> None:
    """Keeps one stream running for ever."""
    body = json.dumps({"prompt": f"victim {number}", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n{head_of(key)}"
    request = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    while True:
        watch.since[number] = time.monotonic()
        try:
            ended = await _one(port, request, number, watch)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            ended = False
        if not ended:
            watch.lost += 1
            await asyncio.sleep(PAUSE_S)


async def _one(port: int, request: bytes, number: int, watch: Watch) -> bool:
    """Runs one stream. Returns whether it came to its end, or was refused (which is counted as such)."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), ANSWER_S)
    try:
        writer.write(request)
        status = await asyncio.wait_for(reader.readline(), ANSWER_S)
        if b" 200 " not in status:
            watch.refused += bool(status)
            await asyncio.sleep(PAUSE_S)
            return bool(status)
        while line := await asyncio.wait_for(reader.readline(), ANSWER_S):
            if line.startswith(b"data: [DONE]"):
                return True
            if line.startswith(b"data: "):
                if b'"error"' in line:
                    return False
                watch.token(number)
        return False
    finally:
        writer.close()


async def livez(port: int, watch: Watch) -> None:
    """Asks for /livez for ever."""
    request = f"GET /livez HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    while True:
        watch.livez_since = began = time.monotonic()
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            await asyncio.wait_for(reader.read(), ANSWER_S)
            writer.close()
        watch.livez.append(time.monotonic() - began)
        watch.livez_since = time.monotonic() + PAUSE_S
        await asyncio.sleep(PAUSE_S)


async def run(port: int, key: str, streams: int) -> None:
    """Runs the victim until its standard input ends."""
    watch = Watch(streams)
    tasks = [asyncio.create_task(stream(port, key, number, watch)) for number in range(streams)]
    tasks.append(asyncio.create_task(livez(port, watch)))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        sys.stdout.write(json.dumps(asdict(watch.close())) + "\n")
        sys.stdout.flush()
    for task in tasks:
        task.cancel()


class Victim:
    """The process. `window` returns what it saw since the last call."""

    def __init__(self, port: int, key: str, streams: int) -> None:
        argv = [sys.executable, "-m", "tests.attack.victim", str(port), key, str(streams)]
        self._process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def window(self) -> Window:
        """Closes the window and returns it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told: Mapping[str, Any] = json.loads(self._process.stdout.readline())
        return Window(**told)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
