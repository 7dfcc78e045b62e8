"""The official OpenAI client repeats a request whose gateway was killed: it gets one answer, which is counted once."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.system.reliability.test_streams import CHAT, Broken, Events, request, told
from tests.system.reliability.test_usage import num_running, records
from tests.system.served import Served, fetch, serve_tiny, slowed, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]

FLAGS = ("--dtype=float32", "--block-size=16", "--max-num-seqs=16")
CALL: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "tell me"}],
    "max_tokens": 200,
    "temperature": 0.9,
    "seed": 7,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repeated") / "usage.jsonl"


@pytest.fixture(scope="module", params=[2, 1])
def served(request: pytest.FixtureRequest, model: Path, sink: Path) -> Iterator[Served]:
    flags = (*FLAGS, f"--gateways={request.param}", f"--usage-sink=file:{sink}")
    with until_the_end(serve_tiny(model, *flags), reconnects=True) as started:
        yield started


def test_the_official_client_gets_one_answer_although_gateways_are_killed(served: Served, sink: Path) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=12)
    before = set(records(sink))

    def whole(name: str) -> Callable[[], Any]:
        # This client sends the header of each call again when it repeats the call, but draws none by itself.
        return lambda: client.chat.completions.create(**CALL, extra_headers={"Idempotency-Key": name})

    right = client.chat.completions.create(**CALL)
    gateways = [name for name in served.pids() if name.startswith("gateway")]
    pids = served.pids()
    stream = Events(served)
    path, body = request(CHAT, 50)
    with ThreadPoolExecutor(6) as pool, slowed(pids["engine-1"]) as slow:
        asked = [pool.submit(whole(f"key-{served.process.pid}-{number}")) for number in range(3)]
        asked += [pool.submit(whole(f"key-{served.process.pid}-0"))]
        stream.ask("POST", path, body, **{"Idempotency-Key": f"stream-{served.process.pid}"})
        stream.read(3)
        wait_until(lambda: num_running(served) == 4, 60)
        with slow.frozen():
            for name in gateways:
                os.kill(pids[name], signal.SIGKILL)
        slow.end()
        answers = [one.result() for one in asked]
    assert {answer.choices[0].message.content for answer in answers} == {right.choices[0].message.content}
    assert len({answer.id for answer in answers}) == 3, "two of them have the same key"
    again = whole_stream(served, path, body, f"stream-{served.process.pid}")
    assert again[: len(stream.events)] == stream.events
    told(again)
    ids = {answer.id.partition("-")[2] for answer in (*answers, right)} | {json.loads(again[0])["id"].partition("-")[2]}
    wait_until(lambda: len(set(records(sink)) - before) >= len(ids), 60, lambda: served.output[-3000:])
    found = {name: one for name, one in records(sink).items() if name not in before}
    assert found.keys() == ids
    assert Counter(one["outcome"] for one in found.values()) == {"completed": len(ids)}
    assert all(one["completion_tokens"] == 200 for name, one in found.items() if name in ids - {streamed(again)})


def streamed(events: list[bytes]) -> str:
    return json.loads(events[0])["id"].partition("-")[2]


def whole_stream(served: Served, path: str, body: Any, key: str) -> list[bytes]:
    """All events of a stream that is asked for again."""
    while True:
        again = Events(served)
        try:
            again.ask("POST", path, body, **{"Idempotency-Key": key})
            again.read()
        except (Broken, OSError):
            continue
        return again.events


def test_another_gateway_repeats_the_answer(served: Served) -> None:
    body = {"prompt": "once", "max_tokens": 5, "temperature": 1.0}
    headers = {"Idempotency-Key": f"everywhere-{served.process.pid}"}
    first = fetch(served, "POST", "/v1/completions", body, **headers)
    more = [fetch(served, "POST", "/v1/completions", body, **headers) for _ in range(12)]
    assert {one.body for one in more} == {first.body}
    assert all(one.headers["idempotency-replayed"] == "true" for one in more)
    refused = [fetch(served, "POST", "/v1/completions", {**body, "max_tokens": 6}, **headers) for _ in range(8)]
    assert {one.status for one in refused} == {409}
