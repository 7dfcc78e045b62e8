"""The record of requests in the whole system: a timeline down to the token, also of a request that moves."""

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.served import Served, fetch, slowed, until_the_end, wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def pair() -> Iterator[Served]:
    """A system with two engines and the demo model, whose context is long."""
    with until_the_end(Served("--engines=2", "--served-model-name=tiny")) as started:
        yield started


def timeline(served: Served, name: str) -> Any:
    reply = fetch(served, "GET", f"/v1/requests/{name}/timeline")
    assert reply.status == 200, reply.body
    return reply.json


def complete(served: Served, max_tokens: int, **more: Any) -> tuple[str, float]:
    """Streams a completion. Returns its id, and the seconds that the client waited for it."""
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}
    request = urllib.request.Request(
        f"{served.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, name = time.monotonic(), ""
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                name = json.loads(line[6:])["id"]
    return name, time.monotonic() - began


def all_steps(found: Any) -> list[Any]:
    return [step for one in found["sequences"] for attempt in one["attempts"] for step in attempt["steps"]]


def test_every_token_has_its_step_and_the_phases_add_up(served: Served):
    name, waited_s = complete(served, 40)
    wait_until(lambda: sum(step["num_output"] for step in all_steps(timeline(served, name))) == 40, 60)
    found = timeline(served, name)
    assert (found["state"], found["completion_tokens"], found["dropped_events"]) == ("completed", 40, 0)
    [sequence] = found["sequences"]
    assert sum(piece["num_tokens"] for piece in sequence["pieces"]) == 40
    assert all(piece["written_s"] >= piece["arrived_s"] for piece in sequence["pieces"])
    steps = all_steps(found)
    assert steps[0]["kind"] == "prefill"
    assert steps[0]["position"] == 0
    assert all(step["kind"] == "decode" for step in steps[1:])
    assert [step["end_s"] for step in steps] == sorted(step["end_s"] for step in steps)
    # Every token is there when its step has ended, up to the message's way to the engine, which the steps leave out.
    [attempt] = sequence["attempts"]
    assert steps[-1]["end_s"] <= sequence["pieces"][-1]["arrived_s"]
    assert attempt["placed_s"] <= steps[0]["start_s"] <= steps[0]["end_s"]
    assert sum(found["phases"].values()) == pytest.approx(found["duration_s"], rel=1e-3)
    # The client may have the last bytes before the gateway has noted the end.
    assert sequence["pieces"][-1]["arrived_s"] <= waited_s


def test_the_durations_are_those_that_the_client_measures(pair: Served):
    # Beside other tests, a client that gets no processor at the end of a response measures more.
    for _ in range(5):
        name, waited_s = complete(pair, 900)
        found = timeline(pair, name)
        assert found["longest_phase"] == "decode"
        if sum(found["phases"].values()) == pytest.approx(waited_s, rel=0.05):
            return
    raise AssertionError(f"{found['phases']} of {waited_s} s")


def test_requests_that_share_a_step_see_each_other(served: Served):
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(complete(served, 60)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: all(len(all_steps(timeline(served, name))) >= 30 for name in names), 60)
    assert max(step["batch_size"] for name in names for step in all_steps(timeline(served, name))) > 1


def test_the_move_after_a_kill_is_in_the_timeline(pair: Served):
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(complete(pair, 900)[0]))

    def placed_at() -> list[str]:
        listed = fetch(pair, "GET", "/v1/requests?state=running").json["data"]
        return listed[0]["engines"] if listed and listed[0]["completion_tokens"] > 5 else []

    pids = pair.pids()
    with slowed(pids["engine-1"], pids["engine-2"]):
        thread.start()
        wait_until(lambda: bool(placed_at()), 60)
        engine = placed_at()[-1]
        os.kill(pids[engine], signal.SIGKILL)
    thread.join()
    found = timeline(pair, names[0])
    assert (found["state"], found["completion_tokens"]) == ("completed", 900)
    # Beside other tests, an engine that gets no processor for a while is taken for dead, too.
    attempts = found["sequences"][0]["attempts"]
    assert found["moves"] == len(attempts) - 1 > 0
    lost = next(number for number, one in enumerate(attempts) if one["engine"] == engine)
    first, second = attempts[lost : lost + 2]
    assert (first["engine"], first["reason"]) == (engine, "the engine stopped responding")
    assert second["placed_s"] >= first["lost_s"]
    assert second["engine"] != engine
    wait_until(lambda: bool(timeline(pair, names[0])["sequences"][0]["attempts"][-1]["steps"]), 60)
    again = timeline(pair, names[0])["sequences"][0]["attempts"][-1]["steps"][0]
    assert again["kind"] == "prefill", "the other engine computes what is there once more"


def test_the_topology_shows_every_process_and_its_traffic(pair: Served):
    def members() -> dict[str, Any]:
        return {one["id"]: one for one in fetch(pair, "GET", "/admin/topology").json["members"]}

    names = {"gateway-1", "tokenizer-1", "engine-1", "engine-2", "detokenizer-1"}
    wait_until(lambda: set(members()) == names, 60)
    before = members()
    complete(pair, 20)

    def total(found: dict[str, Any], service: str, what: str) -> int:
        return sum(one[what] for one in found.values() if one["service"] == service)

    for service in ("gateway", "tokenizer", "engine", "detokenizer"):
        for what in ("messages_received", "messages_sent"):
            wait_until(lambda s=service, w=what: total(members(), s, w) > total(before, s, w), 60)

    def is_fresh(one: dict[str, Any]) -> bool:
        return one["state"] == "ready" and one["heartbeat_age_s"] <= 3 * one["heartbeat_interval_s"]

    # A heartbeat is late while its process gets no processor.
    wait_until(lambda: set(members()) == names and all(map(is_fresh, members().values())), 60, lambda: str(members()))


def test_a_request_that_waited_for_kv_blocks_says_so():
    flags = ("--engines=1", "--served-model-name=tiny", "--num-gpu-blocks-override=18", "--no-enable-prefix-caching")
    with until_the_end(Served(*flags)) as served:
        names: list[str] = []
        # Of 18 blocks of 64 tokens, the prompt of the first request needs 9, and that of the second one 11.
        first = threading.Thread(target=lambda: complete(served, 500, prompt="word " * 550))
        second = threading.Thread(target=lambda: names.append(complete(served, 2, prompt="word " * 700)[0]))

        def is_written() -> bool:
            found = fetch(served, "GET", "/v1/requests?state=running").json["data"]
            return bool(found) and found[0]["completion_tokens"] > 0

        with slowed(served.pids()["engine-1"]):
            first.start()
            wait_until(is_written, 60)
            second.start()
            wait_until(lambda: waiting(served) == 1, 60)
        first.join()
        second.join()
        lack = r"Too few KV blocks were free: its prompt needs 11, and \d were free\."
        wait_until(lambda: re.search(lack, " ".join(timeline(served, names[0])["explanation"])) is not None, 60)


def waiting(served: Served) -> float:
    """How many requests wait in the engines, as their heartbeats say."""
    lines = fetch(served, "GET", "/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_waiting{"))
