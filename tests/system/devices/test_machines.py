"""One model on two machines: the same command on both, the same text as one process, and a machine that dies."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from antiphon import LLM, SamplingParams
from tests.system.machines import Host, two_hosts, why_not
from tests.system.roles import free_ports
from tests.system.served import Served, Started, fetch, until_the_end, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(240)]
PROMPTS = [f"Number {number}:" for number in range(4)]
NUM_TOKENS, LONG = 24, 200
FLAGS = ("--served-model-name=m", "--device=cpu", "--dtype=float32", "--kv-cache-memory-gb=0.05", "--threads=1")
BODY = {"model": "m", "prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(model=str(model), dtype="float32", kv_cache_memory_gb=0.1) as llm:
        texts = [output.outputs[0].text or "" for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        long = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
        return [*texts, llm.generate(PROMPTS[0], long, use_tqdm=False)[0].outputs[0].text or ""]


def texts(served: Served) -> list[str]:
    wait_until(lambda: fetch(served, "GET", "/readyz").status == 200, 60, lambda: served.output)
    reply = fetch(served, "POST", "/v1/completions", BODY)
    assert reply.status == 200, reply.body
    return [choice["text"] for choice in reply.json["choices"]]


def streamed(served: Served, then: Callable[[], None]) -> str:
    """The text of a long stream; calls `then` after its first event."""
    with openai.OpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=60) as client:
        chunks = client.completions.create(
            model="m",
            prompt=PROMPTS[0],
            max_tokens=LONG,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = next(chunks).choices[0].text
        then()
        return text + "".join(chunk.choices[0].text for chunk in chunks)


def rank_of(other: Served) -> int:
    """Process id of the one rank of the other machine."""
    (pid,) = other.pids().values()
    return pid


@pytest.mark.spec("S-SRV-073", "S-SRV-074", "S-DEP-025")
def test_two_machines_on_loopback_addresses_compute_one_model(model: Path, tmp_path: Path, expected: list[str]) -> None:
    (port,) = free_ports(1)
    words = (f"--model={model}", *FLAGS, "--nnode=2", "--pod-ips=127.0.0.1,127.0.0.2", f"--master-port={port}")
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    other = Served(*words, environ={**cache, "NODE_RANK": "1"})
    try:
        other.wait_for("waiting for the engine at 127.0.0.1")
        assert len(other.pids()) == 1
        *short, long = expected
        with until_the_end(Served(*words, environ={**cache, "NODE_RANK": "0"})) as head:
            # Without degrees, each machine is one device.
            assert texts(head) == short
            before = head.pids()["engine-1"]
            os.kill(rank_of(other), signal.SIGKILL)
            # An idle engine notices it too, and the one that replaces it waits for the rank that is started again.
            wait_until(lambda: head.pids().get("engine-1", before) != before, 60, lambda: head.output)
            assert texts(head) == short
            assert "rank 1 on 127.0.0.2 has ended" in head.output
            # A stream that is under way goes on there.
            assert streamed(head, lambda: os.kill(rank_of(other), signal.SIGKILL)) == long
            assert head.output.count("Antiphon is ready") == 1
        # The head has ended: the other machine waits for the next one.
        wait_until(lambda: len(re.findall("waiting for the engine", other.output)) > 1, 60, lambda: other.output)
        assert other.process.poll() is None
        assert other.stop() == 0
    finally:
        other.stop()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.mark.slow
def test_two_network_namespaces_are_two_machines(
    hosts: tuple[Host, Host], model: Path, tmp_path: Path, expected: list[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("the secret of both machines")
    key.chmod(0o600)
    listed = ",".join(host.address for host in hosts)
    words = ("antiphon", "serve", f"--model={model}", *FLAGS, "--port=18080", "--nnode=2", f"--pod-ips={listed}")
    words = (*words, f"--cluster-key-file={key}", "-tp", "2")
    started: list[Started] = []
    try:
        # The same command on both: each finds its place by its addresses.
        started += [host.start(*words) for host in hosts]
        head, other = started
        other.wait_for("this is machine 2 of 2")
        head.wait_for("Antiphon is ready")
        url = "http://127.0.0.1:18080/v1/completions"
        assert [choice["text"] for choice in hosts[0].ask(url, BODY)["choices"]] == expected[:-1]
        # A machine that does not answer any more: a request that is there waits for the engine that replaces this one.
        hosts[1].cut(off=True)
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(hosts[0].ask, url, BODY)
            wait_until(lambda: "its machine does not answer" in head.output, 60, lambda: head.output)
            hosts[1].cut(off=False)
            assert [choice["text"] for choice in asked.result()["choices"]] == expected[:-1]
    finally:
        for each in started:
            each.stop()
