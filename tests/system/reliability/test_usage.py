"""Each request has one usage record although gateways are killed: in the file of a sink, written by whoever is left."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.reliability.test_streams import CHAT, connected, request, resumed, told
from tests.system.served import Served, fetch, serve_tiny, slowed, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("usage") / "usage.jsonl"


@pytest.fixture(scope="module")
def served(model: Path, sink: Path) -> Iterator[Served]:
    flags = ("--dtype=float32", "--block-size=16", "--max-num-seqs=16", "--gateways=2", f"--usage-sink=file:{sink}")
    with until_the_end(serve_tiny(model, *flags), reconnects=True) as started:
        yield started


def records(sink: Path) -> dict[str, dict[str, Any]]:
    """The records in the file, by request id. There is one for each."""
    found = [json.loads(line) for line in sink.read_text().splitlines()] if sink.exists() else []
    assert not [name for name, count in Counter(one["request_id"] for one in found).items() if count > 1]
    return {one["request_id"]: one for one in found}


def test_requests_of_killed_gateways_have_one_record_each(served: Served, sink: Path) -> None:
    path, body = request(CHAT, 40)
    streams = [connected(served, name) for name in ("gateway-1", "gateway-1", "gateway-2", "gateway-2")]
    pids = served.pids()
    before = len(records(sink))
    whole = {**body, "stream": False, "stream_options": None, "max_tokens": 400}
    threads = [threading.Thread(target=unanswered, args=(served, path, whole)) for _ in range(3)]
    with slowed(pids["engine-1"]) as slow:
        for stream in streams:
            stream.ask("POST", path, body, **{"X-Antiphon-Resumable": "1"})
        for stream in streams:
            stream.read(3)
        for thread in threads:
            thread.start()
        wait_until(lambda: num_running(served) == len(streams) + len(threads), 60)
        with slow.frozen():
            for name in ("gateway-1", "gateway-2"):
                os.kill(pids[name], signal.SIGKILL)
    told_of = [told(resumed(served, stream, path, body)) for stream in streams]
    assert all(one == told_of[0] for one in told_of)
    for thread in threads:
        thread.join()
    ids = {stream.last_id.partition(":")[0] for stream in streams}
    wait_until(lambda: len(records(sink)) >= before + len(streams) + len(threads), 60, served_output(served))
    found = records(sink)
    assert len(found) == before + len(streams) + len(threads)
    assert Counter(one["outcome"] for one in found.values()) == {"completed": len(streams), "lost": len(threads)}
    assert {found[name]["completion_tokens"] for name in ids} == {body["max_tokens"]}


def unanswered(served: Served, path: str, body: Any) -> None:
    """Sends a request whose gateway dies."""
    try:
        fetch(served, "POST", path, body)
    except OSError:
        return
    raise AssertionError("the gateway was not killed")


def num_running(served: Served) -> float:
    """Requests in the gateways, as any of them tells it."""
    lines = fetch(served, "GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("antiphon:gateway_requests{"))


def served_output(served: Served) -> Any:
    return lambda: served.output[-3000:]
