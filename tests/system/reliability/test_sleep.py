"""Engines of a running server that sleep: vLLM's endpoints, the commands, the request that wakes, and the memory."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import make_model
from tests.system.served import ROOT, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
ENGINE = "/admin/engines/engine-1"
BODY = {"model": "tiny", "prompt": "Once upon a time " * 60, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    flags = ["--kv-cache-memory-gb=0.3", "--threads=1", "--api-keys=key", "--sleep-after=1.5", "--sleep-level=2"]
    with until_the_end(serve_tiny(model, *flags)) as started:
        yield started


def call(served: Served, method: str, path: str, body: object = None):
    answer = fetch(served, method, path, body, Authorization="Bearer key")
    assert answer.status == 200, answer.body
    return answer.json


def text(served: Served) -> str:
    return call(served, "POST", "/v1/completions", BODY)["choices"][0]["text"]


def held_mib(served: Served) -> int:
    """The memory of the engine's process that is not of files, MiB."""
    status = Path(f"/proc/{served.pids()['engine-1']}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) // 1024  # pyright: ignore[reportOptionalSubscript]


def fill(served: Served) -> None:
    """Writes to most of the KV cache."""
    prompts = [f"{number} " * 450 for number in range(100, 130)]
    call(served, "POST", "/v1/completions", {**BODY, "prompt": prompts, "max_tokens": 1})


def test_vllms_endpoints_free_the_memory_and_the_tokens_stay_the_same(served):
    want = text(served)
    for level in (1, 2):
        fill(served)
        before = held_mib(served)
        call(served, "POST", f"/sleep?level={level}")
        assert call(served, "GET", "/is_sleeping") == {"is_sleeping": True}
        assert held_mib(served) < before - 20
        # The model can still be used.
        assert fetch(served, "GET", "/readyz").status == 200
        assert [one["id"] for one in call(served, "GET", "/v1/models")["data"]] == ["tiny"]
        members = {one["id"]: one for one in call(served, "GET", "/admin/topology")["members"]}
        assert members["engine-1"]["state"] == "sleeping"
        call(served, "POST", "/wake_up?tags=weights&tags=kv_cache")
        assert call(served, "GET", "/is_sleeping") == {"is_sleeping": False}
        assert text(served) == want


def test_an_engine_falls_asleep_and_the_next_request_wakes_it(served):
    want = text(served)
    before = call(served, "GET", ENGINE)["sleep"]["num_wakes"]
    wait_until(lambda: call(served, "GET", ENGINE)["sleep"]["level"] == 2, 20)
    assert text(served) == want
    found = call(served, "GET", ENGINE)["sleep"]
    assert (found["level"], found["num_wakes"]) == (0, before + 1)
    assert found["last_wake_s"] > 0
    metrics = fetch(served, "GET", "/metrics", Authorization="Bearer key").body.decode()
    assert f'antiphon:engine_wakes_total{{engine="engine-1",model_name="tiny"}} {before + 1}.0' in metrics
    assert "ended (exit code" not in served.output


def test_the_commands_and_their_refusals(served):
    def command(*words: str) -> dict:
        argv = [sys.executable, "-m", "antiphon", *words, "--server", served.url, "--api-key", "key", "--json"]
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    assert command("sleep", "engine-1", "--level=1")["sleep"]["level"] == 1
    assert command("wake", "engine-1")["state"] == "ready"
    for path in ("/sleep?level=3", "/sleep?mode=now", "/sleep?deep=1", "/wake_up?tags=weights"):
        assert fetch(served, "POST", path, Authorization="Bearer key").status == 400
    assert fetch(served, "POST", "/sleep").status == 401
