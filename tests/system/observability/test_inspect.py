"""`antiphon tap`, `top` and `trace` beside the real system."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.served import ROOT, Served, fetch, until_the_end, wait_until

pytestmark = pytest.mark.system
SECRET = "Zanzibar"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with until_the_end(Served()) as started:
        yield started


@pytest.fixture(scope="module")
def bus(served: Served) -> list[str]:
    """The flags that name this system's own bus; others may run on this machine too."""
    words = Path(f"/proc/{served.pids()['nats-server']}/cmdline").read_text().split("\0")
    config = Path(words[words.index("-c") + 1])
    port = config.read_text().split('listen: "127.0.0.1:')[1].split('"')[0]
    return [f"--nats=nats://127.0.0.1:{port}", f"--nats-credentials={config.with_name('observer.credentials')}"]


def command(*words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "antiphon", *words]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(*words: str) -> str:
    process = command(*words)
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (told, errors)
    return told


def chat(served: Served) -> str:
    body = {"messages": [{"role": "user", "content": f"Say {SECRET}."}], "max_tokens": 5, "temperature": 0}
    return fetch(served, "POST", "/v1/chat/completions", body).json["id"]


def tapped(served: Served, *flags: str) -> list[dict[str, object]]:
    """What a tap prints that is there before a request."""
    process = command("tap", *flags)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first, process.stderr.read() if process.stderr else ""
    chat(served)
    told, _ = process.communicate(timeout=60)
    return [json.loads(line) for line in [first, *told.splitlines()]]


def test_a_tap_decodes_messages_and_hides_what_people_wrote(served: Served, bus: list[str]):
    found = tapped(served, "--count=60", *bus)
    assert {"Heartbeat", "TokenizeRequest", "SubmitBatch", "TokenEvents", "TextEvents"} <= {
        one["type"] for one in found
    }
    assert SECRET not in json.dumps(found)
    assert SECRET in json.dumps(tapped(served, "--count=60", "--show-content", *bus))


def test_a_tap_shows_the_subject_that_it_is_asked_for(served: Served, bus: list[str]):
    found = [json.loads(line) for line in output("tap", "hb.engine.*", "--count=3", *bus).splitlines()]
    assert [(one["type"], one["subject"]) for one in found] == [("Heartbeat", "hb.engine.engine-1")] * 3


def test_a_wrong_bus_is_told(bus: list[str]):
    process = command("tap", "--nats=nats://127.0.0.1:1", "--count=1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "127.0.0.1:1" in errors


def test_trace_and_top_show_a_request_and_every_process(served: Served, tmp_path: Path):
    name = chat(served)
    where = f"--server=http://127.0.0.1:{served.port}"
    wait_until(lambda: bool(fetch(served, "GET", f"/v1/requests/{name}").json["completion_tokens"]), 60)
    told = output("trace", name, where)
    assert "<- longest" in told
    assert "attempt 1 on engine-1" in told
    assert SECRET not in told
    file = tmp_path / "trace.json"
    assert "ui.perfetto.dev" in output("trace", name, where, f"--trace-events={file}")
    events = json.loads(file.read_text())["traceEvents"]
    assert {"prefill", "decode", "admission"} <= {one["name"] for one in events}
    top = output("top", "--once", "--interval=0.3", where)
    for process in ("gateway-1", "tokenizer-1", "engine-1", "detokenizer-1"):
        assert process in top
    unknown = command("trace", "nobody", where)
    assert "nobody" in unknown.communicate(timeout=60)[1]
    assert unknown.returncode == 4
