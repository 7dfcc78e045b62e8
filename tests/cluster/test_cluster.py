"""A deployment over three hosts keeps every stream when a server of the bus or a whole host goes (`make cluster-test`).

The hosts are network namespaces. Writes what it has measured to build/cluster-report.json.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon import LLM, SamplingParams
from bench.limits_of_machine import machine
from tests.cluster.deployment import Deployment, Load, deployed
from tests.cluster.hosts import Host, network
from tests.models import make_model
from tests.system.machines import why_not
from tests.system.served import ROOT, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(600)]
NUM_STREAMS, NUM_TOKENS, CUT_S = 64, 96, 5.0
LONG = "The prefill engine computes a prompt once and hands it over. " * 3
REPORT = ROOT / "build" / "cluster-report.json"
STORES = {"antiphon-v3-streams", "antiphon-v3-stream-tokens"}


def prompt(number: int) -> str:
    return f"{number} {LONG}{number}"


def sampling(number: int) -> dict[str, Any]:
    """Half of the requests are greedy."""
    return {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def right(model: Path) -> list[str]:
    """What one engine without a bus answers."""
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling(number)) for number in range(NUM_STREAMS)
    ]
    with LLM(str(model), dtype="float32", kv_cache_memory_gb=0.1, threads=1) as llm:
        prompts = [prompt(number) for number in range(NUM_STREAMS)]
        return [output.outputs[0].text or "" for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"machine": machine.facts(), "streams": NUM_STREAMS, "tokens": NUM_TOKENS}
    yield found
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(found, indent=1) + "\n")


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[list[Host], Host]]:
    if reason := why_not():
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(
    place: tuple[list[Host], Host], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with deployed(place[0], model, tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def load(place: tuple[list[Host], Host], cluster: Deployment, right: list[str]) -> Iterator[Load]:
    """Streams that run during all tests of this module, through both gateways."""
    requests = [
        {"model": "tiny", "prompt": prompt(number), "max_tokens": NUM_TOKENS, **sampling(number)}
        for number in range(NUM_STREAMS)
    ]
    made = Load(place[1], cluster.urls(), requests, right)
    try:
        yield made
    finally:
        made.kill()


def note(report: dict[str, Any], name: str, answers: list[dict[str, Any]]) -> None:
    """Adds what came of the answers to the report. All must be right."""
    report[name] = {
        "answers": len(answers),
        "lost": sum(answer["lost"] for answer in answers),
        "different": sum(answer["different"] for answer in answers),
        "refused": sum(answer.get("refused", 0) for answer in answers),
        "longest_silence_s": max((answer.get("longest_s", 0.0) for answer in answers), default=0.0),
    }
    assert [answer for answer in answers if answer["lost"] or answer["different"]] == []


def engine_metric(cluster: Deployment, name: str) -> dict[str, float]:
    host = cluster.hosts[0]
    found: dict[str, float] = {}
    for line in host.fetch(f"{cluster.urls()[0]}/metrics").splitlines():
        if line.startswith(f"antiphon:engine_{name}_total{{"):
            found[line.partition('engine="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
    return found


def test_sixty_four_streams_over_two_prefill_and_two_decode_engines(
    cluster: Deployment, load: Load, report: dict[str, Any]
) -> None:
    note(report, "undisturbed", load.read(1))
    saved, loaded = engine_metric(cluster, "kv_saved_tokens"), engine_metric(cluster, "kv_loaded_tokens")
    assert saved["prefill-1"]
    assert saved["prefill-2"]
    assert loaded["decode-1"]
    assert loaded["decode-3"]
    # Every store is kept by all three servers.
    streams = {stream["name"]: stream for stream in cluster.jetstream(cluster.hosts[1])}
    assert set(streams) >= STORES
    assert {stream["config"]["num_replicas"] for stream in streams.values()} == {3}


def test_a_killed_server_of_the_bus_costs_no_stream_and_comes_back(
    cluster: Deployment, load: Load, report: dict[str, Any]
) -> None:
    for host in cluster.hosts:
        node = cluster.running[f"nats-{host.number}"]
        os.kill(node.process.pid, signal.SIGKILL)  # `ip` and the script replace themselves by the server
        node.process.wait(60)
        node.stop()
        note(report, f"NATS server {host.number} killed", load.read(2))
        cluster.start_node(host)
        wait_until(lambda host=host: is_whole(host), 60, cluster.outputs)
        note(report, f"NATS server {host.number} back", load.read(1))


def test_a_host_that_is_cut_off_for_five_seconds_costs_no_stream(
    place: tuple[list[Host], Host], cluster: Deployment, load: Load, report: dict[str, Any]
) -> None:
    for host in cluster.hosts:
        assert place[1].reaches(host)
        host.cut(off=True)
        begun = time.monotonic()
        assert not place[1].reaches(host)
        time.sleep(max(0.0, begun + CUT_S - time.monotonic()))  # what is shown is a host that is away for this long
        host.cut(off=False)
        note(report, f"host {host.number} cut off for 5 s", load.read(2))
        wait_until(lambda host=host: is_whole(host), 60, cluster.outputs)
    note(report, "at the end", load.finish())
    assert all(each.process.poll() is None for each in cluster.running.values()), cluster.outputs()


def is_whole(host: Host) -> bool:
    """Whether this host's server is in the cluster, and its copies of all stores are up to date."""
    try:
        return '"ok"' in host.fetch("http://127.0.0.1:8222/healthz")
    except subprocess.CalledProcessError:
        return False
