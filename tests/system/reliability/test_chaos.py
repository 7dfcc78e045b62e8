"""`antiphon chaos` and `antiphon watch` on real processes: a run that passes, and a system with a breach."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.chaos.schedule import Fault, FaultKind
from antiphon.chaos.streams import Load, Outcome, learn, make_bodies
from antiphon.chaos.targets import Injector
from antiphon.launch.readiness import ServerAddress
from tests.system.served import ROOT, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = pytest.mark.system
KEY = "sk-the-key-of-this-test"


def _antiphon(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "antiphon", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    replicas = [f"--{service}=2" for service in ("gateways", "tokenizers", "engines", "detokenizers")]
    tiny = serve_tiny(model, *replicas, "--log-level=debug", environ={"OPENAI_API_KEYS": KEY})
    with until_the_end(tiny, reconnects=True) as started:
        yield started


def _run_directory(served: Served) -> str:
    """Where the launcher keeps its files: the bus was started with the configuration in it."""
    words = Path(f"/proc/{served.pids()['nats-server']}/cmdline").read_text().split("\0")
    return str(Path(words[words.index("-c") + 1]).parent)


@pytest.mark.matrix("R-14")
def test_a_short_run_loses_nothing(served: Served, tmp_path: Path):
    report = tmp_path / "report.json"
    done = _antiphon(
        "chaos", "--minutes=0.12", "--streams=4", "--seed=3", "--max-tokens=60", "--calm=4",
        f"--json={report}", f"--api-key={KEY}",
        f"--server={served.url}", f"--run-directory={_run_directory(served)}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["passed"] is True
    assert (found["lost"], found["repeated"], found["differing"], found["hung"]) == (0, 0, 0, 0)
    assert found["faults"][0]["kind"] == "none"
    assert found["streams"] > 0
    assert found["tokens"] > 0
    assert sum(row["count"] for row in found["faults"]) == sum(row["verified"] for row in found["faults"]) > 0
    assert "passed:" in done.stdout


def test_the_watcher_finds_nothing_in_a_healthy_system_and_a_frozen_engine_in_another(served: Served):
    url = served.url.removesuffix("/v1")
    wait_until(lambda: _ready(served) == 8, 60)
    healthy = _antiphon("watch", "--once", "--server", url, "--token", KEY)
    assert (healthy.returncode, "nothing is wrong" in healthy.stdout) == (0, True), healthy.stdout + healthy.stderr
    engines = [pid for name, pid in served.pids().items() if name.startswith("engine")]
    for pid in engines:
        os.kill(pid, signal.SIGSTOP)
    try:
        broken = _antiphon("watch", "--once", "--server", url, "--token", KEY)
    finally:
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
    assert broken.returncode == 1, broken.stdout
    assert "engine: no process is ready" in broken.stdout


def _fault(kind: FaultKind, duration_s: float, *targets: str) -> Fault:
    return Fault(at_s=0.0, kind=kind, group=targets[0].partition("-")[0], targets=targets, duration_s=duration_s)


async def _survived(served: Served, *faults: Fault) -> list[Outcome]:
    """Applies faults one after the other while streams run, and returns what became of the streams."""
    launcher = served.process.pid
    address = ServerAddress(host="127.0.0.1", port=served.port, token=KEY)
    known = [await learn(address, body, 60) for body in make_bodies("tiny", 6, 100, seed=5)]
    injector = Injector(launcher, lambda _: True)
    killed = any(one.kind == "kill" and one.group == "gateway" for one in faults)
    load = Load(address, known, lambda _since, _until: killed, hang_s=30, seed=5)
    running = asyncio.create_task(load.run(4))
    for fault in faults:
        await asyncio.sleep(0.3)
        injection = await injector.apply(fault)
        assert injection.verified, injection.problem
    await asyncio.sleep(0.5)
    load.stop()
    await running
    return load.outcomes


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([_fault("kill", 0, "engine-1")], marks=pytest.mark.matrix("R-01"), id="engine killed"),
        pytest.param([_fault("freeze", 1.2, "engine-2")], marks=pytest.mark.matrix("R-03"), id="engine frozen"),
        pytest.param([_fault("kill", 0, "detokenizer-1")], marks=pytest.mark.matrix("R-08"), id="detokenizer killed"),
        pytest.param(
            [_fault("kill", 0, "tokenizer-1"), _fault("freeze", 0.8, "tokenizer-2")],
            marks=pytest.mark.matrix("R-09"),
            id="tokenizers",
        ),
        pytest.param([_fault("kill", 0, "gateway-1")], marks=pytest.mark.matrix("R-10"), id="gateway killed"),
        pytest.param(
            [_fault("stop", 0, "engine-2"), _fault("stop", 0, "detokenizer-2"), _fault("stop", 0, "gateway-2")],
            marks=pytest.mark.matrix("R-11"),
            id="rolling update",
        ),
        pytest.param([_fault("kill", 0, "nats")], marks=pytest.mark.matrix("B-01"), id="bus killed"),
        pytest.param([_fault("freeze", 2.0, "nats")], marks=pytest.mark.matrix("B-02"), id="bus frozen"),
    ],
)
async def test_streams_have_the_same_tokens_whatever_fails(served: Served, faults: list[Fault]):
    outcomes = await _survived(served, *faults)
    assert outcomes
    for one in outcomes:
        assert not one.problem
        assert not one.difference
        assert not one.hung


@pytest.mark.matrix("S-14")
def test_no_key_and_no_password_is_in_a_command_line_or_a_log(served: Served):
    files = list(Path(_run_directory(served)).glob("*.credentials"))
    assert len(files) == 15
    secrets = [KEY, *(file.read_text().split(":")[1] for file in files)]
    for key in (KEY, "sk-wrong"):
        answer = fetch(
            served, "POST", "/v1/completions", {"prompt": "x", "max_tokens": -1}, Authorization=f"Bearer {key}"
        )
        assert answer.status in (400, 401)
        assert KEY.encode() not in answer.body
    command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (served.process.pid, *served.descendants())]
    assert len(command_lines) > 9
    for secret in secrets:
        assert not any(secret in text for text in command_lines)
        assert secret not in served.output
    assert "DEBUG" in served.output, "the log has its most talkative level"
    # The bus has no monitoring port, so there is no /varz at all.
    assert "http" not in Path(_run_directory(served), "nats.conf").read_text()


def _ready(served: Served) -> int:
    members = fetch(served, "GET", "/admin/topology", Authorization=f"Bearer {KEY}").json["members"]
    return sum(one["state"] == "ready" for one in members)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--minutes=0"], "--minutes"),
        (["--server=http://127.0.0.1:1"], "belong together"),
        (["--url=http://127.0.0.1:1", "--run-directory=/tmp"], "no directory antiphon-PID"),
        (["--url=x", "--run-directory=y", "--model=z"], "--model is for a server that is started"),
    ],
)
def test_what_cannot_be_run_is_said(words: list[str], text: str):
    done = _antiphon("chaos", *words)
    assert done.returncode == 2
    assert text in done.stderr
