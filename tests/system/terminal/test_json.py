"""`--json` of every command that answers, on a running server and on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.served import ROOT, Served, fetch, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]


def run(served: Served, folder: Path, *words: str, code: int = 0) -> Any:
    """Runs a command with `--json` in a folder. Returns the decoded answer, or the error if there is none."""
    environ = {**os.environ, "ANTIPHON_SERVER": served.url, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder)}
    argv = [sys.executable, "-m", "antiphon", *words, "--json"]
    done = subprocess.run(
        argv,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    if done.stdout:
        return json.loads(done.stdout)
    return json.loads(done.stderr.splitlines()[-1])["error"]


@pytest.fixture(scope="module")
def recorded(talker: Served) -> str:
    """The id of a request that can run again."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    name = fetch(talker, "POST", "/v1/completions", body).json["id"]
    wait_until(lambda: bool(fetch(talker, "GET", f"/v1/requests/{name}").json["completion_tokens"]), 60)
    return name


def test_commands_that_look(talker: Served, recorded: str, tmp_path: Path) -> None:
    top = run(talker, tmp_path, "top", "--once", "--interval=0.1")
    assert {one["service"] for one in top["members"]} == {"gateway", "tokenizer", "engine", "detokenizer"}
    assert top["requests"] == []
    trace = run(talker, tmp_path, "trace", recorded)
    assert trace["completion_tokens"] == 8
    saved = run(talker, tmp_path, "trace", recorded, "--trace-events=events.json")
    assert saved["events"] == len(json.loads((tmp_path / "events.json").read_text())["traceEvents"])
    unknown = run(talker, tmp_path, "trace", "nobody", code=4)
    assert (unknown["code"], unknown["exit_code"]) == ("not_found", 4)


def test_commands_that_change(talker: Served, tmp_path: Path) -> None:
    [model] = run(talker, tmp_path, "models", "list")
    assert (model["id"], model["active"], model["versions"][0]["state"]) == ("tiny", 1, "ready")
    assert model["versions"][0]["directory"]
    assert "tiny" in run(talker, tmp_path, "models", "set", f"other={tmp_path}", code=4)["message"]
    drained = run(talker, tmp_path, "drain", "engine-1", "--force")
    assert (drained["id"], drained["sequences"]) == ("engine-1", 0)
    assert run(talker, tmp_path, "resume", "engine-1")["id"] == "engine-1"
    assert run(talker, tmp_path, "drain", "engine-9", code=4)["exit_code"] == 4


def test_commands_about_recorded_requests(talker: Served, recorded: str, tmp_path: Path) -> None:
    assert run(talker, tmp_path, "replay", recorded)["equal"] is True
    kept = run(talker, tmp_path, "record", "save", recorded, "one.json")
    assert (kept["prompts"], kept["outputs"], kept["file"]) == (1, 1, "one.json")
    assert run(talker, tmp_path, "replay", "one.json")["equal"] is True
    forked = run(talker, tmp_path, "fork", recorded, "--at=3")
    assert forked["usage"]["completion_tokens"] == 5
    assert run(talker, tmp_path, "fork", "nobody", "--at=3", code=4)["code"] == "not_found"


def test_commands_that_send_requests(talker: Served, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    for before in (0, 1):
        summary = run(talker, tmp_path, "run-batch", "in.jsonl", "out.jsonl")
        assert summary == {
            "requests": 1, "answered_before": before, "good": 1, "failed": 0, "output": "out.jsonl",
        }  # fmt: skip
    # The vocabulary of this small model ends below the ids that prompts are made of.
    failed = run(talker, tmp_path, "bench", "serve", "--num-prompts=2", "--input-len=64", "--output-len=3", code=1)
    assert "of 2 requests failed" in failed["message"]


def test_commands_about_this_machine(talker: Served, tmp_path: Path) -> None:
    assert "hub" not in {model["source"] for model in run(talker, tmp_path, "list")}
    assert run(talker, tmp_path, "rm", "org/none", "--yes", code=4)["exit_code"] == 4
    assert run(talker, tmp_path, "version")["version"]
    assert Path(run(talker, tmp_path, "tools-path")["path"]).is_dir()
    tables = run(talker, tmp_path, "ranktable", "--mode=gen", "--api-server", "--ip=192.0.2.1")
    assert all((tmp_path / name).is_file() for name in tables["files"])
    doctor = run(talker, tmp_path, "doctor", "--port=0")
    assert doctor["ready"] is True
    assert {"Python", "torch", "model"} <= {check["subject"] for check in doctor["checks"]}
    assert all(check["state"] in ("ok", "warn") for check in doctor["checks"])
    assert run(talker, tmp_path, "doctor", "--sizing")["sets"][0]["size"] == "6-8B"
    plan = run(talker, tmp_path, "plan", "--gpu=B200")
    assert (plan["fits"], plan["places"][0]["name"]) == (True, "B200")
    assert plan["recommendation"].startswith("Recommended for B200: antiphon serve")
    assert run(talker, tmp_path, "plan", "--memory-gb=0.25", code=1)["fits"] is False
    text = run(talker, tmp_path, "complete", "What is 12 + 7?", "--chat", "--temperature=0", "--dtype=float32")
    assert (text["text"], text["finish_reason"]) == ("12 + 7 = 19.", "stop")
