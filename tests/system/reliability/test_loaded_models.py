"""Models that are loaded and unloaded while another one is served: real processes, commands as a user types them."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon import cli
from tests.conftest import NatsServer, free_port, nats_server_binary
from tests.models import make_model
from tests.system.served import ROOT, Answer, Served, Started, fetch, fetch_url, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
LOADED = "org/other"
ASK = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models, whose texts differ."""
    return [make_model(tmp_path_factory.mktemp(f"weights{seed}"), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def served(directories: list[Path]) -> Iterator[Served]:
    with until_the_end(Served(f"--model={directories[0]}", "--served-model-name=tiny", "--threads=1")) as started:
        yield started


def models(served: Served, *words: str) -> int:
    return cli.main(["models", *words, "--server", served.url])


def text(served: Served, model: str) -> str:
    answer = fetch(served, "POST", "/v1/completions", {**ASK, "model": model})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"]


def names(served: Served) -> list[str]:
    return [card["id"] for card in fetch(served, "GET", "/v1/models").json["data"]]


def ended(served: Served) -> bool:
    return not [name for name in served.pids() if "other" in name]


def stream(served: Served, model: str, tokens: int) -> Iterator[str]:
    body = json.dumps({**ASK, "model": model, "max_tokens": tokens, "stream": True}).encode()
    asked = urllib.request.Request(f"{served.url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=90) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def test_a_model_is_loaded_beside_another_survives_its_engine_and_is_unloaded_without_cutting_a_stream(
    served: Served, directories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, running = text(served, "tiny"), served.pids()
    assert fetch(served, "POST", "/v1/completions", {**ASK, "model": LOADED}).status == 404
    assert models(served, "load", f"{LOADED}={directories[1]}", "--set", "max-model-len=300") == 0
    assert names(served) == [LOADED, "tiny"] or names(served) == ["tiny", LOADED]
    cards = {card["id"]: card for card in fetch(served, "GET", "/v1/models").json["data"]}
    assert (cards[LOADED]["max_model_len"], cards[LOADED]["root"]) == (300, str(directories[1]))
    other = text(served, LOADED)
    assert (other != first, text(served, "tiny")) == (True, first)
    assert running.items() <= served.pids().items(), "the first model's processes go on"

    [engine] = [pid for name, pid in served.pids().items() if "other" in name and "engine" in name]
    os.kill(engine, signal.SIGKILL)
    assert text(served, LOADED) == other, "the engine was started again"

    pieces = stream(served, LOADED, 250)
    began = next(pieces)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(models, served, "unload", LOADED)
        wait_until(lambda: names(served) == ["tiny"], 30, lambda: str(names(served)))
        refused = fetch(served, "POST", "/v1/completions", {**ASK, "model": LOADED})
        assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
        assert "Served here: 'tiny'." in refused.json["error"]["message"]
        whole = began + "".join(pieces)
        assert unloading.result() == 0
    assert whole.startswith(other)
    wait_until(lambda: ended(served), 30, lambda: str(served.pids()))
    assert (text(served, "tiny"), served.pids()) == (first, running)
    assert "unloaded by order" in capsys.readouterr().out

    assert models(served, "load", f"{LOADED}={directories[1]}") == 0
    assert text(served, LOADED) == other
    assert models(served, "set", f"{LOADED}={directories[0]}") == 0
    assert text(served, LOADED) == first
    assert models(served, "unload", LOADED) == 0


def test_a_model_that_cannot_be_loaded_leaves_nothing_and_says_why(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*words: str) -> str:
        assert models(served, "load", *words) == 1
        wait_until(lambda: ended(served), 30, lambda: str(served.pids()))
        assert names(served) == ["tiny"]
        return capsys.readouterr().err

    wait_until(lambda: ended(served), 30, lambda: str(served.pids()))
    running = served.pids()
    assert "other is not served: --model:" in failed(f"other={tmp_path / 'nowhere'}")
    assert "unknown setting 'max-model-length'" in failed(f"other={tmp_path}", "--set=max-model-length=3")
    assert "'port' is for the whole server" in failed(f"other={tmp_path}", "--set=port=3")
    assert "'trust-remote-code' can only be given when the server starts" in failed(
        f"other={tmp_path}", "--set=trust-remote-code=true"
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert "other is not served" in failed(f"other={tmp_path}")
    # A process that had only begun to start has no name yet.
    wait_until(lambda: served.pids() == running, 30, lambda: f"{running} {served.pids()}")


def test_names_that_are_taken_and_the_only_model_are_refused(
    served: Served, directories: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(method: str, path: str, body: dict[str, Any] | None = None) -> str:
        answer = fetch(served, method, path, body)
        assert answer.status == 400, answer.body
        return answer.json["error"]["message"]

    load = {"model": "tiny", "directory": str(directories[1])}
    assert "'tiny' is served already" in refused("POST", "/admin/models", {**load, "load": True})
    assert "settings of its model" in refused("POST", "/admin/models", {**load, "settings": {"engines": 2}})
    assert "'tiny' is the only model here" in refused("DELETE", "/admin/models/tiny")
    assert fetch(served, "DELETE", "/admin/models/nobody").status == 404
    assert models(served, "set", f"other={directories[1]}") == 4
    assert "No model is called 'other'. Models here: 'tiny'." in capsys.readouterr().err


@pytest.mark.slow
def test_launchers_on_a_bus_of_its_own_follow_each_other_and_load_the_model_again_when_they_start(
    private_nats_server: NatsServer, directories: list[Path]
) -> None:
    bus = f"--nats={private_nats_server.url}", f"--nats-credentials={private_nats_server.credentials}"
    flags = f"--model={directories[0]}", "--served-model-name=tiny", "--threads=1", *bus
    with until_the_end(Served(*flags)) as first:
        assert models(first, "load", f"{LOADED}={directories[1]}", "--set", "max-model-len=300") == 0
        other = text(first, LOADED)
        with until_the_end(Served(*flags)) as second:
            wait_until(lambda: any("other" in name and "engine" in name for name in second.pids()), 60)
            for pid in (*first.descendants(), first.process.pid):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: names(second) == ["tiny", LOADED], 60, lambda: second.output)
            assert text(second, LOADED) == other
    with until_the_end(Served(*flags)) as third:
        wait_until(lambda: names(third) == ["tiny", LOADED], 60, lambda: third.output)
        assert text(third, LOADED) == other
        [card] = [card for card in fetch(third, "GET", "/v1/models").json["data"] if card["id"] == LOADED]
        assert card["max_model_len"] == 300
        assert models(third, "unload", LOADED) == 0
        assert names(third) == ["tiny"]


@pytest.fixture
def drawn_bus(tmp_path: Path) -> Iterator[str]:
    """URL of a server with the files of infra/nats, on a port of this machine. The passwords are in `drawn`."""
    nats, drawn = ROOT / "infra/nats", tmp_path / "drawn"
    subprocess.run(["sh", str(nats / "make_credentials.sh"), str(drawn)], env={**os.environ, "OWNER": ""}, check=True)
    (tmp_path / "secrets").symlink_to(drawn / "server")
    config, port = (nats / "nats.conf").read_text(), free_port()
    for old, new in (("0.0.0.0:4222", f"127.0.0.1:{port}"), ("127.0.0.1:8222", f"127.0.0.1:{free_port()}")):
        config = config.replace(old, new)
    (tmp_path / "nats.conf").write_text(config.replace("/tmp/jetstream", f"{tmp_path}/jetstream"))
    (tmp_path / "users.conf").write_text((nats / "users.conf").read_text())
    argv = [nats_server_binary(), "-c", str(tmp_path / "nats.conf")]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"nats://127.0.0.1:{port}"
    process.terminate()
    process.wait()


class Service(Started):
    """One process of a service, as in a container of its own; `models`: a launcher without gateways."""

    def __init__(self, name: str, bus: str, credentials: Path, *flags: str) -> None:
        command = ("serve", "--gateways=0", "--standby=off") if name == "models" else ("service", name)
        own = f"--nats={bus}", f"--nats-credentials={credentials}"
        super().__init__([sys.executable, "-m", "antiphon", *command, *own, *flags], os.environ)


@pytest.mark.slow
def test_a_launcher_without_gateways_loads_models_for_those_of_other_containers(
    drawn_bus: str, tmp_path: Path, directories: list[Path]
) -> None:
    port, drawn = free_port(), tmp_path / "drawn"
    url, ask = f"http://127.0.0.1:{port}", ["--server", f"http://127.0.0.1:{port}"]
    flags = f"--model={directories[0]}", "--served-model-name=tiny", "--threads=1", "--kv-cache-memory-gb=0.05"

    def listed() -> list[str]:
        return [card["id"] for card in fetch_url("GET", f"{url}/v1/models").json["data"]]

    def answer(model: str) -> Answer:
        return fetch_url("POST", f"{url}/v1/completions", {**ASK, "model": model})

    started = [
        Service("setup", drawn_bus, drawn / "setup/credentials"),
        Service("gateway", drawn_bus, drawn / "gateway/credentials", f"--port={port}"),
        Service("models", drawn_bus, drawn, *flags),
    ]
    try:
        started[1].wait_for(" ready")
        wait_until(lambda: listed() == ["tiny"], 60, lambda: started[2].output)
        assert cli.main(["models", "load", f"other={directories[1]}", *ask]) == 0, started[2].output
        assert {*listed()} == {"tiny", "other"}
        assert answer("other").json["choices"][0]["text"] != answer("tiny").json["choices"][0]["text"]
        assert cli.main(["models", "unload", "other", *ask]) == 0
        assert (listed(), answer("other").status) == (["tiny"], 404)
    finally:
        codes = [one.stop() for one in reversed(started)]
    assert codes == [0, 0, 0]
    assert "Violation" not in "".join(one.output for one in started)
