"""`antiphon serve` as a user starts it: real processes, the openai client, broken parts, an orderly end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from antiphon.async_client import get
from antiphon.shared import limits
from tests.system.served import END_S, READY_S, ROOT, Served, alive, has_opentelemetry, serve_tiny, wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(300)]
ASK = {"messages": [{"role": "user", "content": "Tell me something"}], "temperature": 0, "max_tokens": 24}


@pytest.mark.spec("S-DEP-042:sdk")
def test_the_openai_client_gets_the_same_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", **ASK)
    chunks = list(client.chat.completions.create(model="tiny", stream=True, **ASK))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.choices[0].message.content
    assert streamed == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24


async def test_64_requests_at_once_all_get_the_answer_they_get_alone(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.url, api_key="EMPTY", max_retries=0, timeout=90) as client:

        async def complete(n: int) -> str:
            done = await client.completions.create(model="tiny", prompt=f"Number {n} is", max_tokens=16, temperature=0)
            return done.choices[0].text

        alone = [await complete(n) for n in range(4)]
        together = await asyncio.gather(*(complete(n % 4) for n in range(64)))
    assert together == [alone[n % 4] for n in range(64)]


def test_a_wrong_request_gets_an_error_that_says_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model="tiny", messages=ASK["messages"], temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="unknown", messages=ASK["messages"])


def test_the_ready_message_has_what_a_newcomer_needs(served: Served) -> None:
    block = served.output.partition("Antiphon is ready")[2]
    for word in ("/v1", "tiny", "curl", "antiphon chat", "gateway-1", "engine-1", "Ctrl-C"):
        assert word in block


def test_the_curl_line_works_as_printed(served: Served) -> None:
    line = next(line for line in served.lines if " curl http" in line)
    command = line[line.index("curl") :] + " --silent --fail"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"choices"' in done.stdout


def test_the_terminal_client_talks_to_it(served: Served) -> None:
    argv = [sys.executable, "-m", "antiphon", "chat", "--server", served.url, "--max-tokens=8"]
    done = subprocess.run(argv, cwd=ROOT, input="Hello\n", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_without_a_collector_no_service_loads_opentelemetry(served: Served) -> None:
    services = {name: pid for name, pid in served.pids().items() if name != "nats-server"}
    assert len(services) == 4
    assert not [name for name, pid in services.items() if has_opentelemetry(pid)]


@pytest.mark.parametrize("name", ["tokenizer-1", "detokenizer-1", "engine-1", "gateway-1", "nats-server"])
def test_a_killed_process_is_replaced_and_requests_work_again(name: str, served: Served, client: openai.OpenAI) -> None:
    before = client.chat.completions.create(model="tiny", **ASK).choices[0].message.content
    killed = served.pids()[name]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: served.pids().get(name, killed) != killed, 60, lambda: served.output)
    deadline = time.monotonic() + 60
    while True:
        try:
            after = client.chat.completions.create(model="tiny", **ASK).choices[0].message.content
            break
        except (openai.InternalServerError, openai.APIConnectionError):
            assert time.monotonic() < deadline, served.output
            time.sleep(0.1)
    assert after == before


def test_a_request_that_comes_while_the_gateway_starts_again_waits_and_is_answered(
    served: Served, client: openai.OpenAI
) -> None:
    before = client.chat.completions.create(model="tiny", **ASK).choices[0].message.content
    for _ in range(3):
        killed = served.pids()["gateway-1"]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not alive(killed), 60)  # noqa: B023
        assert client.chat.completions.create(model="tiny", **ASK).choices[0].message.content == before


@pytest.mark.parametrize("name", ["engine-1", "gateway-1"])
def test_a_process_that_stands_still_again_and_again_costs_a_stream_nothing_but_time(
    name: str, served: Served, client: openai.OpenAI
) -> None:
    """Each time for longer than a lease, and more often than engines may die under a sequence."""
    long = {"prompt": "Once", "max_tokens": 480, "n": 16, "seed": 5, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="tiny", **long)
    stream = iter(client.completions.create(model="tiny", stream=True, **long))
    chunks = [next(stream)]
    for _ in range(limits.DEATHS_MAX + 1):
        os.kill(served.pids()[name], signal.SIGSTOP)
        time.sleep(1.5 * limits.LEASE_S)
        os.kill(served.pids()[name], signal.SIGCONT)
        time.sleep(0.1)
    texts = dict.fromkeys(range(16), "")
    for chunk in [*chunks, *stream]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in whole.choices}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_leaves_no_process(model: Path, number: signal.Signals) -> None:
    started = serve_tiny(model)
    try:
        started.wait_for("Antiphon is ready")
        assert set(started.pids()) == {"nats-server", "gateway-1", "tokenizer-1", "engine-1", "detokenizer-1"}
        pids = started.descendants()
        started.process.send_signal(number)
        assert started.process.wait(END_S) == 0, started.output
        # Children of a service end with it, a moment later.
        wait_until(lambda: not any(map(alive, pids)), 60, lambda: str([pid for pid in pids if alive(pid)]))
        assert "is killed" not in started.output
    finally:
        started.stop()


@pytest.mark.matrix("R-11")
def test_requests_in_flight_are_finished_before_the_end(model: Path) -> None:
    started = serve_tiny(model)
    try:
        started.wait_for("Antiphon is ready")
        with openai.OpenAI(base_url=started.url, api_key="EMPTY", max_retries=0, timeout=60) as client:
            long = {"max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(model="tiny", prompt="Once", stream=True, **long)
            first = next(iter(stream))
            started.process.terminate()
            chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert started.process.wait(END_S) == 0, started.output
    finally:
        started.stop()


def test_no_process_survives_a_launcher_that_is_killed(model: Path) -> None:
    started = serve_tiny(model)
    try:
        started.wait_for("Antiphon is ready")
        pids = started.descendants()
        assert len(pids) >= 5
        started.process.kill()
        wait_until(lambda: not any(alive(pid) for pid in pids), 60, lambda: str(pids))
    finally:
        started.stop()


async def _until_engines(started: Served, pattern: str) -> str:
    """A gateway's metrics, as soon as both engines match."""
    async with asyncio.timeout(READY_S):
        while True:
            page = (await get("127.0.0.1", started.port, "/metrics")).body.decode()
            if sorted(re.findall(pattern, page)) == ["engine-1", "engine-2"]:
                return page
            await asyncio.sleep(0.05)


async def test_two_of_each_share_the_work(model: Path) -> None:
    started = serve_tiny(model, "--gateways=2", "--tokenizers=2", "--engines=2", "--detokenizers=2")
    try:
        await asyncio.to_thread(started.wait_for, "Antiphon is ready")
        assert len(started.pids()) == 9
        # It is ready with one engine and one gateway; the others may come a moment later.
        await _until_engines(started, r'engine_generation_tokens_total{engine="([^"]+)"')
        answered: set[str] = set()
        async with asyncio.timeout(READY_S):
            while len(answered) < 2:
                reply = await get("127.0.0.1", started.port, "/admin/topology")
                answered.add(json.loads(reply.body)["gateway"])
        async with openai.AsyncOpenAI(base_url=started.url, api_key="EMPTY", max_retries=0) as client:
            more = {"model": "tiny", "max_tokens": 24}
            every = (client.completions.create(prompt=f"{n} is a number and", **more) for n in range(24))
            assert all(answer.usage for answer in await asyncio.gather(*every))
        # Heartbeats bring the engines' counts a moment later.
        page = await _until_engines(started, r'engine_generation_tokens_total{engine="([^"]+)".*} [1-9]')
        # The page of either gateway: odds of 1 in 8 million that all 24 connections went to one.
        took = re.findall(r'^http_requests_total{handler="/v1/completions",.*} (\S+)', page, re.MULTILINE)
        assert 0 < float(took[0]) < 24
        started.process.terminate()
        assert await asyncio.to_thread(started.process.wait, END_S) == 0, started.output
    finally:
        started.stop()


@pytest.mark.matrix("R-15")
def test_an_impossible_setting_ends_it_with_78_and_the_reason(model: Path) -> None:
    started = serve_tiny(model, "--max-model-len=100000000")
    try:
        assert started.process.wait(READY_S) == 78, started.output
        assert "max-model-len" in started.output
    finally:
        started.stop()
