"""An engine with a directory of its own goes on with the copies of a killed one, as on another machine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.chaos.streams import Answer, ask, learn
from antiphon.launch.readiness import ServerAddress
from tests.conftest import NatsServer
from tests.system.served import ROOT, Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats]
STREAMS, END_S = 4, 60.0
WRITTEN_MIN = 256
"""Tokens of the shortest sequence that is written to the disk."""
DISK = ("--kv-disk-gb=0.1", "--kv-replicate=peer", "--swap-space=0.05", "--kv-host=127.0.0.1", "--threads=1")


@pytest.fixture
def served(model: Path, nats_server: NatsServer, tmp_path: Path) -> Iterator[Served]:
    bus = f"--nats={nats_server.url}", f"--nats-credentials={nats_server.credentials}", "--namespace=kv-copies"
    far = [
        sys.executable, "-m", "antiphon.services.engine", *bus, "--service-id=far", f"--model={model}",
        "--served-model-name=tiny", "--kv-cache-memory-gb=0.05", *DISK, f"--kv-disk-path={tmp_path / 'far'}",
    ]  # fmt: skip
    process = subprocess.Popen(far, cwd=ROOT, env={**os.environ})
    try:
        with until_the_end(serve_tiny(model, *bus, *DISK, f"--kv-disk-path={tmp_path / 'near'}")) as started:
            yield started
    finally:
        process.terminate()
        process.wait(END_S)


def loads(served: Served) -> dict[str, Any]:
    members = json.loads(fetch(served, "GET", "/admin/topology").body)["members"]
    return {one["id"]: one["load"] for one in members if one["service"] == "engine"}


@pytest.mark.matrix("K-04")
async def test_streams_of_a_lost_machine_go_on_with_their_copies(served: Served) -> None:
    await asyncio.to_thread(wait_until, lambda: len(loads(served)) == 2, END_S)
    near = next(name for name in loads(served) if name != "far")
    address = ServerAddress(host="127.0.0.1", port=served.port)
    ways = {"ignore_eos": True, "return_token_ids": True, "stream": True, "model": "tiny", "max_tokens": 150}
    bodies = [{**ways, "prompt": f"{number} " + "word " * 75, "temperature": 0} for number in range(STREAMS)]
    known = [await learn(address, body, END_S) for body in bodies]

    def copied() -> int:
        return loads(served)[near]["kv_copied_tokens"]

    # Whatever ran on the first engine is copied.
    await asyncio.to_thread(wait_until, lambda: copied() >= WRITTEN_MIN, END_S, lambda: str(loads(served)))
    answers = [Answer() for _ in known]
    tasks = [asyncio.create_task(ask(address, one.body, answer)) for one, answer in zip(known, answers, strict=True)]
    while not any(answer.token_ids for answer in answers):
        await asyncio.sleep(0.002)
    os.kill(served.pids()[near], signal.SIGKILL)
    done = await asyncio.gather(*tasks)
    assert [answer.token_ids for answer in done] == [one.token_ids for one in known]
    assert [answer.text for answer in done] == [one.text for one in known]
    await asyncio.to_thread(wait_until, lambda: loads(served)["far"]["kv_tier_tokens"] > 0, 5.0)
