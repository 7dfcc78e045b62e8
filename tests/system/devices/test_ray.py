"""Engines whose processes Ray starts, with a real Ray: `make ray-test` installs it and runs these tests."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon import LLM, SamplingParams
from tests.system.roles import free_ports
from tests.system.served import ROOT, Served, Started, fetch, until_the_end, wait_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: make ray-test")
PROMPTS = [f"Number {number}:" for number in range(4)]
PARAMS = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
FLAGS = ("--served-model-name=m", "--device=cpu", "--dtype=float32", "--threads=1")
AUTHORIZED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
OFFLINE = """
import json, sys
from antiphon import LLM, SamplingParams
model, prompts, params = json.loads(sys.argv[1])
settings = dict(dtype="float32", device="cpu", kv_cache_memory_gb=0.1, threads=1, tensor_parallel_size=2)
with LLM(model=model, **settings, distributed_executor_backend="ray") as llm:
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
print(json.dumps([output.outputs[0].text for output in outputs]))
"""


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    with LLM(model=str(model), dtype="float32", kv_cache_memory_gb=0.1) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(**PARAMS), use_tqdm=False)
        return [output.outputs[0].text or "" for output in outputs]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of two nodes with a processor each, so that two ranks need both. Its address."""
    (port,) = free_ports(1)
    # The paths of sockets in it may not be long.
    folder = Path(f"/tmp/antiphon-ray-{os.getpid()}")
    address = f"127.0.0.1:{port}"
    environ = {**os.environ, **AUTHORIZED}
    with contextlib.ExitStack() as stack:
        for where in (("--head", f"--port={port}", f"--temp-dir={folder}"), (f"--address={address}",)):
            words = ("start", *where, "--block", "--num-cpus=1", "--node-ip-address=127.0.0.1", "--disable-usage-stats")
            memory = "--object-store-memory=80000000"
            node = Started([sys.executable, "-m", "ray.scripts.scripts", *words, memory], environ)
            stack.callback(node.stop)
            node.wait_for("--block", 60)
        yield address


def texts(served: Served) -> list[str]:
    wait_until(lambda: fetch(served, "GET", "/readyz").status == 200, 60, lambda: served.output)
    reply = fetch(served, "POST", "/v1/completions", {"model": "m", "prompt": PROMPTS, **PARAMS})
    assert reply.status == 200, reply.body
    return [choice["text"] for choice in reply.json["choices"]]


def test_ranks_are_actors_on_the_nodes_of_a_cluster_and_are_replaced(
    cluster: str, model: Path, expected: list[str]
) -> None:
    # RAY_ADDRESS is enough: Ray is installed, and several devices are asked for.
    with until_the_end(
        Served(f"--model={model}", *FLAGS, "-tp", "2", environ={**AUTHORIZED, "RAY_ADDRESS": cluster})
    ) as served:
        assert "Ray has started 2 ranks on 2 machines" in served.output
        assert texts(served) == expected
        before = served.pids()["engine-1"]
        (pid,) = re.findall(r"RankActor pid=(\d+)", served.output)[-1:]
        os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: served.pids().get("engine-1", before) != before, 60, lambda: served.output)
        assert texts(served) == expected
        assert served.output.count("Ray has started 2 ranks on 2 machines") == 2


def test_the_offline_api_starts_a_cluster_of_its_own_where_there_is_none(model: Path, expected: list[str]) -> None:
    asked = json.dumps([str(model), PROMPTS, PARAMS])
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, asked], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_a_cluster_that_is_not_there_is_told(model: Path) -> None:
    (port,) = free_ports(1)
    for address, said in (
        (f"127.0.0.1:{port}", f"RAY_ADDRESS: no Ray cluster can be reached at 127.0.0.1:{port}"),
        ("ray://127.0.0.1:10001", "RAY_ADDRESS: ray://127.0.0.1:10001 is for clients"),
    ):
        served = Served(f"--model={model}", *FLAGS, "-tp", "2", environ={**AUTHORIZED, "RAY_ADDRESS": address})
        try:
            served.wait_for(said, 60)
        finally:
            served.stop()
