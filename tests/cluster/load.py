"""The clients of `test_cluster`: many streams at all times, until a line comes on standard input.

Reads one line of JSON: `gateways` (URLs) and `requests` (bodies). Each request has a client of its own, which asks its
gateway for it again and again. Prints a line of JSON for each answer: the request's number, `text`, the longest silence
within the stream, and how often the answer began anew because it was refused (503) before its first token; or `error`.
"""

import asyncio
import json
import sys
import time
from typing import Any

import openai

STREAM_TIMEOUT_S = 120.0
REFUSALS_MAX = 40
PAUSE_S = 0.5


async def main() -> None:
    orders = json.loads(await asyncio.to_thread(sys.stdin.readline))
    stop = asyncio.Event()
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=STREAM_TIMEOUT_S)
        for url in orders["gateways"]
    ]
    work = [
        asyncio.create_task(repeat(clients[number % len(clients)], number, body, stop))
        for number, body in enumerate(orders["requests"])
    ]
    await asyncio.to_thread(sys.stdin.readline)
    stop.set()
    await asyncio.gather(*work)


async def repeat(client: openai.AsyncOpenAI, number: int, body: dict[str, Any], stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            answer = await patient(client, body)
        except Exception as error:  # every failure is an answer that was lost
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"request": number, **answer}), flush=True)


async def patient(client: openai.AsyncOpenAI, body: dict[str, Any]) -> dict[str, Any]:
    """Asks again, as clients do, when a server says that it cannot take the request now."""
    refused = 0
    while True:
        try:
            return {**await ask(client, body), "refused": refused}
        except openai.InternalServerError as error:
            if error.status_code != 503 or refused == REFUSALS_MAX:
                raise
            refused += 1
            await asyncio.sleep(PAUSE_S)


async def ask(client: openai.AsyncOpenAI, body: dict[str, Any]) -> dict[str, Any]:
    text, longest, last, reason = "", 0.0, time.monotonic(), None
    extra: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "extra_headers": {"X-Antiphon-Resumable": "1"}}
    async with await client.completions.create(**body, stream=True, **extra) as chunks:
        async for chunk in chunks:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            text += chunk.choices[0].text
            reason = chunk.choices[0].finish_reason or reason
    if reason is None:
        raise RuntimeError("the stream ended without a finish reason")
    return {"text": text, "longest_s": round(longest, 3)}


if __name__ == "__main__":
    asyncio.run(main())
