"""`antiphon chaos` and `antiphon watch` on real processes: a run that passes, and a system with a breach."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.served import ROOT, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = pytest.mark.system
KEY = "sk-the-key-of-this-test"


def _antiphon(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "antiphon", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    replicas = [f"--{service}=2" for service in ("gateways", "tokenizers", "engines", "detokenizers")]
    with until_the_end(serve_tiny(model, *replicas, "--log-level=debug", environ={"OPENAI_API_KEYS": KEY})) as started:
        yield started


def _run_directory(served: Served) -> str:
    """Where the launcher keeps its files: the bus was started with the configuration in it."""
    words = Path(f"/proc/{served.pids()['nats-server']}/cmdline").read_text().split("\0")
    return str(Path(words[words.index("-c") + 1]).parent)


def test_a_short_run_loses_nothing(served: Served, tmp_path: Path):
    report = tmp_path / "report.json"
    done = _antiphon(
        "chaos", "--minutes=0.12", "--streams=4", "--seed=3", "--max-tokens=60", f"--json={report}", f"--token={KEY}",
        f"--url={served.url}", f"--run-directory={_run_directory(served)}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["passed"] is True
    assert (found["lost"], found["repeated"], found["differing"], found["hung"]) == (0, 0, 0, 0)
    assert found["streams"] > 0
    assert found["tokens"] > 0
    assert sum(row["count"] for row in found["faults"]) == sum(row["verified"] for row in found["faults"]) > 0
    assert "passed:" in done.stdout


def test_the_watcher_finds_nothing_in_a_healthy_system_and_a_frozen_engine_in_another(served: Served):
    url = served.url.removesuffix("/v1")
    wait_until(lambda: _ready(served) == 8, 30)
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


@pytest.mark.matrix("S-14")
def test_no_key_and_no_password_is_in_a_command_line_or_a_log(served: Served):
    files = list(Path(_run_directory(served)).glob("*.credentials"))
    assert len(files) == 9
    secrets = [KEY, *(file.read_text().split(":")[1] for file in files)]
    for key in (KEY, "sk-wrong"):
        answer = fetch(served, "POST", "/v1/completions", {"prompt": "x", "nonsense": 1}, Authorization=f"Bearer {key}")
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
        (["--url=http://127.0.0.1:1"], "belong together"),
        (["--url=http://127.0.0.1:1", "--run-directory=/tmp"], "no directory antiphon-PID"),
        (["--url=x", "--run-directory=y", "--model=z"], "--model is for a server that is started"),
    ],
)
def test_what_cannot_be_run_is_said(words: list[str], text: str):
    done = _antiphon("chaos", *words)
    assert done.returncode == 78
    assert text in done.stderr
