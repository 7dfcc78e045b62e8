"""A bit of a weight flips in a live engine: it ends before its clients see a wrong token, and its neighbours go on.

All services are processes; the engines' module is `tests.support.flipping_engine`, the rest is the product's.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.shared import limits
from tests.conftest import NatsServer, free_port
from tests.system.served import wait_until

pytestmark = [pytest.mark.system, pytest.mark.nats, pytest.mark.timeout(480)]
START_S = 120.0
PROMPT = "Once upon a time there was a small house at the edge of the forest"


class Fleet:
    """A gateway, a tokenizer, a detokenizer and engines, and what they have logged."""

    def __init__(self, server: NatsServer, namespace: str, directory: Path) -> None:
        self._server, self._namespace, self._directory = server, namespace, directory
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, module: str, name: str, *flags: str, **environ: str) -> None:
        common = (
            f"--nats={self._server.url}", f"--nats-credentials={self._server.credentials}",
            f"--namespace={self._namespace}", f"--service-id={name}", "--log-level=info",
        )  # fmt: skip
        with self.log_file(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *common, *flags], env={**os.environ, **environ}, stdout=log, stderr=log
            )

    def engine(self, name: str, *flags: str, **environ: str) -> None:
        small = ("--kv-cache-memory-gb=0.05", "--weight-cache=off", "--threads=1", "--max-num-seqs=8")
        self.start("tests.support.flipping_engine", name, *small, *flags, **environ)

    def others(self, *gateway_flags: str) -> None:
        self.start("antiphon.services.tokenizer", "tok")
        self.start("antiphon.services.detokenizer", "det")
        self.start("antiphon.services.gateway", "gw", f"--port={self.port}", "--host=127.0.0.1", *gateway_flags)

    def wait(self, *engines: str) -> None:
        for name in engines:
            self.until(lambda name=name: " ready" in self.log(name) and f'engine="{name}"' in self.metrics())
        self.until(lambda: self.request("GET", "/readyz")[0] == 200)

    def until(self, condition: Any, timeout_s: float = START_S) -> None:
        wait_until(condition, timeout_s, lambda: str({name: self.log(name)[-1500:] for name in self.processes}))

    def log_file(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text()

    def flip(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGUSR1)

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError:
            return 0, ""
        finally:
            connection.close()

    def metrics(self) -> str:
        return self.request("GET", "/metrics")[1]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        lines = [line for line in self.metrics().splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(text in line for text in wanted))

    def complete(self, number: int, headers: dict[str, str] | None = None, **fields: Any) -> str:
        return self.answer(number, headers, **fields)["choices"][0]["text"]

    def answer(self, number: int, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        """The choices and the usage of a completion."""
        body = {"prompt": f"{number} {PROMPT}", "max_tokens": 60, "temperature": 0, "ignore_eos": True, **fields}
        status, text = self.request("POST", "/v1/completions", body, headers)
        assert status == 200, (status, text)
        found = json.loads(text)
        found["usage"].pop("prompt_tokens_details", None)
        return {"choices": found["choices"], "usage": found["usage"]}

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def fleet(nats_server: NatsServer, namespace: str, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(nats_server, namespace, tmp_path)
    yield made
    made.close()


class Streams:
    """Completions that run on threads of their own."""

    def __init__(self, fleet: Fleet, numbers: range, **fields: Any) -> None:
        self.texts: dict[int, str] = {}

        def ask(number: int) -> None:
            try:
                self.texts[number] = fleet.complete(number, **fields)
            except AssertionError as error:
                self.texts[number] = str(error)  # the comparison with what is right shows it

        self._threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
        for thread in self._threads:
            thread.start()

    def wait(self) -> dict[int, str]:
        for thread in self._threads:
            thread.join(150)
        return self.texts


def test_a_flipped_bit_ends_the_engine_within_seconds_and_its_neighbours_go_on(fleet: Fleet) -> None:
    fleet.others()
    # In the first engine the change is large: the test sequence shows it. In the second it is the last bit of a weight,
    # which rounding may hide: the sums over the weights show it. The third stays sound.
    fleet.engine("big", FLIP_BIT="14", FLIP_WEIGHT="layer 1, down")
    fleet.engine("small", "--canary-interval=60", FLIP_BIT="0")
    fleet.engine("sound", "--deterministic")
    fleet.engine("refused", "--deterministic", "--cpu-backend=torch")
    fleet.wait("big", "small", "sound")
    assert fleet.processes["refused"].wait(60) == 78
    assert "--deterministic: PyTorch's operations order their sums" in fleet.log("refused")
    members = json.loads(fleet.request("GET", "/admin/topology")[1])["members"]
    loads = {member["id"]: member["load"] for member in members}
    assert [loads[name]["deterministic"] for name in ("big", "sound")] == [False, True]
    assert loads["sound"]["configuration"] == loads["big"]["configuration"] + "-deterministic"
    assert loads["sound"]["golden_digest"] == loads["big"]["golden_digest"] != ""
    right = {number: fleet.complete(number) for number in range(4)}
    fleet.until(lambda: fleet.metric("antiphon:engine_canary_runs_total", engine="sound") >= 2)
    assert fleet.metric("antiphon:engine_generation_tokens_total") == 4 * 60, "the canary is not counted"

    for name in ("big", "small"):
        fleet.flip(name)
        code = fleet.processes[name].wait(60)  # 5 s to find it; the rest is for a machine that is busy
        assert code == 13, fleet.log(name)
        assert "this engine is faulty and ends" in fleet.log(name)
    assert "the weights have changed in memory: layer 0, down" in fleet.log("small")
    assert fleet.processes["sound"].poll() is None
    assert {number: fleet.complete(number) for number in range(4)} == right


NO_CANARY = "--canary-interval=0"
VARIED: tuple[dict[str, Any], ...] = (
    {"n": 2, "temperature": 0.9, "seed": 5},
    {"stop": [" little"], "logprobs": 3},
    {"echo": True, "logprobs": 1, "max_tokens": 4},
    {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "min_tokens": 3, "ignore_eos": False},
    {"guided_regex": "[a-z ]{20,40}", "ignore_eos": False},
    {"max_tokens": 1},
)


def test_in_lockstep_no_wrong_token_is_shown_and_a_third_engine_finds_the_wrong_one(fleet: Fleet) -> None:
    fleet.others("--lockstep=1")
    for name in ("e1", "e2", "e3"):
        # Without canaries only the comparison can find the fault.
        fleet.engine(name, NO_CANARY, FLIP_WEIGHT="layer 1, down")
    fleet.wait("e1", "e2", "e3")
    right = {number: fleet.complete(number) for number in range(6)}
    # A chosen request runs alone while heartbeats are late, on a busy machine.
    chosen, alone = (fleet.metric(f"antiphon:lockstep_{name}_total") for name in ("requests", "unavailable"))
    assert chosen > 0
    assert chosen + alone == 6
    assert fleet.metric("antiphon:lockstep_compared_tokens_total") == chosen * 60
    assert fleet.metric("vllm:generation_tokens_total") == 6 * 60, "tokens count once"
    for fields in VARIED:
        declined, compared = ({"X-Antiphon-Lockstep": header} for header in ("0", "1"))
        assert fleet.answer(0, compared, **fields) == fleet.answer(0, declined, **fields), fields
    assert fleet.metric("antiphon:lockstep_differences_total") == 0

    # Asked for, as a sampled request runs alone while heartbeats are late, and might do so on the faulty engine.
    asked = {"headers": {"X-Antiphon-Lockstep": "1"}}
    streams = Streams(fleet, range(6), **asked)
    fleet.flip("e1")
    assert streams.wait() == right
    deadline = time.monotonic() + START_S
    while fleet.processes["e1"].poll() is None and time.monotonic() < deadline:
        # All streams of e1 may have ended before the bit flipped: more of them follow.
        assert Streams(fleet, range(6), **asked).wait() == right
    assert fleet.processes["e1"].wait(60) == 13, fleet.log("e1")
    assert "other tokens than they do" in fleet.log("e1")
    assert "the engine e1" in fleet.log("gw")
    assert fleet.metric("antiphon:lockstep_differences_total") >= 1
    assert fleet.metric("antiphon:lockstep_votes_total", kind="third") >= 1
    assert fleet.metric("antiphon:lockstep_quarantined_total") == 1
    for number in range(2):
        assert fleet.complete(number, seed=7, temperature=0.8)
    assert all(fleet.processes[name].poll() is None for name in ("e2", "e3"))

    # With a single engine left, the sampled requests run alone, and one that asks for lockstep is refused.
    fleet.processes["e2"].kill()
    fleet.until(lambda: 'engine="e2"' not in fleet.metrics())
    alone = fleet.metric("antiphon:lockstep_unavailable_total")
    assert fleet.complete(0) == right[0]
    assert fleet.metric("antiphon:lockstep_unavailable_total") == alone + 1
    time.sleep(limits.LOCKSTEP_GRACE_S)
    body = {"prompt": PROMPT, "max_tokens": 4}
    status, text = fleet.request("POST", "/v1/completions", body, {"X-Antiphon-Lockstep": "1"})
    assert status == 503
    assert "Lockstep needs two ready engines" in text
    status, text = fleet.request("POST", "/v1/completions", body, {"X-Antiphon-Lockstep": "yes"})
    assert status == 400
    assert "must be 1" in text


def test_two_engines_that_differ_test_themselves_and_an_engine_may_die_in_lockstep(fleet: Fleet) -> None:
    fleet.others()
    for name in ("e1", "e2"):
        # The canary comes too late by itself: only the comparison asks for it.
        fleet.engine(name, "--canary-interval=60", FLIP_WEIGHT="layer 1, down")
    fleet.wait("e1", "e2")
    asked = {"headers": {"X-Antiphon-Lockstep": "1"}, "max_tokens": 200}
    right = {number: fleet.complete(number, **asked) for number in range(4)}
    assert fleet.metric("antiphon:lockstep_requests_total") == 4
    assert fleet.complete(0, max_tokens=200) == right[0]
    assert fleet.metric("antiphon:lockstep_requests_total") == 4, "only requests that ask for it"

    streams = Streams(fleet, range(4), **asked)
    fleet.until(lambda: fleet.metric("antiphon:lockstep_requests_total") == 8)
    fleet.flip("e2")
    assert fleet.processes["e2"].wait(60) == 13
    fleet.engine("e4", "--canary-interval=60")
    assert streams.wait() == right
    fleet.wait("e4")

    streams = Streams(fleet, range(4), **asked)
    fleet.until(lambda: fleet.metric("antiphon:lockstep_requests_total") == 12)
    fleet.processes["e1"].kill()
    fleet.engine("e5", "--canary-interval=60")
    assert streams.wait() == right
