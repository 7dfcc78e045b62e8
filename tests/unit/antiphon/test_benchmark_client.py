"""The load client against a server that is written out here: what it counts, and what it calls an error."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from antiphon.benchmark.load import Result, run, run_open
from bench.harness.loads import Load
from bench.harness.measure import LoadFailed, check

BODY = {"model": "m", "prompt": "x", "max_tokens": 3}
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(*pieces: str) -> bytes:
    return b"".join(event({"choices": [{"index": 0, "text": piece}]}) for piece in pieces)


def plain(body: bytes) -> list[bytes]:
    return [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", body]


def chunked(*chunks: bytes) -> list[bytes]:
    framed = [f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks]
    return [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *framed, b"0\r\n\r\n"]


@asynccontextmanager
async def server(
    writes: list[bytes], seen: list[dict] | None = None, heads: list[bytes] | None = None
) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")).split()[1])
        body = json.loads(await reader.readexactly(length))
        if seen is not None:
            seen.append(body)
        if heads is not None:
            heads.append(head)
        for data in writes:
            writer.write(data)
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]


async def load(writes: list[bytes], requests: int = 1, clients: int = 1) -> Result:
    async with server(writes) as port:
        return await run("127.0.0.1", port, [BODY] * requests, clients)


@pytest.mark.parametrize("framing", [plain, lambda body: chunked(body[:17], body[17:18], body[18:])])
async def test_tokens_come_from_usage_and_times_from_pieces_of_text(framing: Callable[[bytes], list[bytes]]) -> None:
    done = await load(framing(text("a", "", "b", "c") + event(USAGE) + b"data: [DONE]\n\n"), requests=4, clients=2)
    assert not done.errors
    assert (done.prompt_tokens, done.output_tokens) == (20, 12)
    assert [len(done.first_token_s), len(done.chunk_gaps_s), len(done.token_s)] == [4, 8, 4]


async def test_a_chat_stream_counts_the_same() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]
    body = b"".join(event({"choices": [{"delta": delta}]}) for delta in deltas)
    done = await load(plain(body + event(USAGE) + b"data: [DONE]\n\n"))
    assert (done.output_tokens, len(done.chunk_gaps_s), done.errors) == (3, 1, [])


async def test_usage_counts_wherever_it_stands_in_the_stream() -> None:
    done = await load(plain(event(USAGE) + text("a") + event({"choices": [], "usage": None}) + b"data: [DONE]\n\n"))
    assert (done.output_tokens, done.errors) == (3, [])


async def test_every_request_asks_for_a_stream_with_usage() -> None:
    seen: list[dict] = []
    async with server(plain(text("a") + event(USAGE)), seen) as port:
        await run("127.0.0.1", port, [BODY, BODY], 1)
    assert seen == [{**BODY, "stream": True, "stream_options": {"include_usage": True}}] * 2


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy"], "429 Too Many Requests"),
        (plain(text("a") + b"data: [DONE]\n\n"), "without usage"),
        (plain(event(USAGE)), "no text"),
        (plain(text("a") + event({"error": {"message": "broken"}})), "broken"),
    ],
)
async def test_a_stream_that_is_not_whole_is_an_error(writes: list[bytes], message: str) -> None:
    done = await load(writes)
    assert len(done.errors) == 1
    assert message in done.errors[0]
    with pytest.raises(LoadFailed):
        check(done, Load("x", 1, 5, 3, 1, 0), 1)


@pytest.mark.parametrize(("prompt", "output"), [(6, 3), (5, 4)])
async def test_other_tokens_than_asked_for_fail_the_load(prompt: int, output: int) -> None:
    done = await load(plain(text("a") + event(USAGE)))
    check(done, Load("x", 1, 5, 3, 1, 0), 1)
    with pytest.raises(LoadFailed, match=r"\(5, 3\) prompt and output tokens"):
        check(done, Load("x", 1, prompt, output, 1, 0), 1)


async def test_the_wait_for_a_place_is_no_time_to_the_first_token() -> None:
    """With one place the requests follow each other, so that their times together are at most the whole time."""
    async with server(plain(text("a", "b") + event(USAGE) + b"data: [DONE]\n\n")) as port:
        done = await run_open("127.0.0.1", port, [BODY] * 5, [0.0] * 5, concurrency=1)
    assert not done.errors
    assert len(done.wait_s) == len(done.first_token_s) == 5
    assert sum(done.first_token_s) <= done.wall_s
    waits = sorted(done.wait_s)
    assert waits[-1] >= sum(done.first_token_s) - max(done.first_token_s)


async def test_further_headers_are_sent() -> None:
    heads: list[bytes] = []
    async with server(plain(text("a") + event(USAGE) + b"data: [DONE]\n\n"), heads=heads) as port:
        result = await run("127.0.0.1", port, [BODY], 1, headers={"X-Antiphon-Resumable": "1"})
    assert not result.errors
    assert b"\r\nX-Antiphon-Resumable: 1\r\n" in heads[0]
