"""A deployment by rank tables, as its documentation starts it: tables, prefill and decode instances, scheduler."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import greedy_reference, make_model
from tests.system.roles import Machine, ask, free_ports, machine, make_tables
from tests.system.served import ROOT, wait_until

PREFILL, DECODE = f"{os.getpid()}4", f"{os.getpid()}6"
"""Devices that nobody else on this machine uses: running instances claim them."""
pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def chat(model: str) -> dict[str, Any]:
    """The documented request."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 100,
        "top_k": -1,
        "top_p": 1,
        "temperature": 0,
        "ignore_eos": False,
        "stream": False,
    }


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Of the prefill instance, the decode instance and the scheduler."""
    return free_ports(3)


@pytest.fixture(scope="module")
def deployed(model: Path, tmp_path_factory: pytest.TempPathFactory, ports: list[int]) -> Iterator[Machine]:
    """One prefill and one decode instance; the scheduler is started first, and finds nobody."""
    words = ("--prefill-server-list", PREFILL, "--decode-server-list", DECODE, "--api-server")
    with machine(tmp_path_factory.mktemp("tables"), model, *words) as made:
        host = made.start("host", ports[2], f"{ports[0]},{ports[1]}")
        wait_until(lambda: ask(ports[2], "/health")[0] == 503, 60, lambda: host.output)
        assert ask(ports[2], "/health")[1]["reason"] == "Waiting for the instances: prefill-1, decode-1."
        assert ask(ports[2], "/v1/chat/completions", chat("demo"))[0] == 503
        # Workers export the ports too, where they mean nothing.
        made.start(DECODE, ports[1], "8088,8089")
        wait_until(lambda: "prefill-1." in str(ask(ports[2], "/health")[1]), 60, lambda: host.output)
        wait_until(lambda: ask(ports[1], "/health")[0] == 200, 60, lambda: made.running[1].output)
        wait_until(lambda: ask(ports[2], "/health")[1]["reason"].endswith(": prefill-1."), 60, lambda: host.output)
        made.start(PREFILL, ports[0], "8088,8089")
        host.wait_for("Antiphon is ready")
        yield made


@pytest.mark.spec("S-DIS-040")
def test_the_scheduler_waits_for_its_instances_in_whatever_order_they_come(deployed: Machine, ports: list[int]) -> None:
    """The fixture has shown the waiting: 503 with the names of those that are missing."""
    assert [ask(port, "/health") for port in ports] == [
        (200, {"instance": "prefill-1", "status": "ready"}),
        (200, {"instance": "decode-1", "status": "ready"}),
        (200, {"status": "ready"}),
    ]
    for name in ("prefill-1", "decode-1"):
        assert f"{name} has joined" in deployed.running[0].output


@pytest.mark.spec("S-DIS-003", "S-SRV-003")
def test_the_same_script_and_flags_start_every_role_and_the_scheduler_has_no_engine(deployed: Machine) -> None:
    def services(index: int) -> list[str]:
        """The services that an instance started, by their commands."""
        pid = deployed.running[index].process.pid
        listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
        children = [line.split(maxsplit=1)[1] for line in listed.splitlines() if line.split()[0] == str(pid)]
        return sorted(word for child in children for word in child.split() if word.startswith("antiphon.services."))

    gathered = ["antiphon.services.detokenizer", "antiphon.services.gateway", "antiphon.services.tokenizer"]
    assert [services(index) for index in range(3)] == [
        gathered,
        ["antiphon.services.engine"],
        ["antiphon.services.engine"],
    ]


@pytest.mark.spec("S-DIS-060:disaggregated", "S-DEP-044")
def test_the_documented_request_is_answered_at_the_schedulers_port(
    deployed: Machine, ports: list[int], model: Path
) -> None:
    answers = [ask(ports[2], "/v1/chat/completions", chat(name)) for name in (str(model), "demo")]
    assert [status for status, _ in answers] == [200, 200]
    (choice,) = answers[0][1]["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answers[0][1]["choices"] == answers[1][1]["choices"]


def test_tokens_are_those_of_the_model(deployed: Machine, ports: list[int], model: Path) -> None:
    prompt = list(range(5, 60))
    body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    status, answer = ask(ports[2], "/v1/completions", {**body, "return_token_ids": True})
    assert status == 200
    assert answer["choices"][0]["token_ids"] == greedy_reference(model, prompt, 24)


@pytest.mark.spec("S-DIS-045")
def test_the_ports_of_the_instances_answer_that_requests_belong_to_the_scheduler(
    deployed: Machine, ports: list[int]
) -> None:
    for port, name in zip(ports[:2], ("prefill-1", "decode-1"), strict=True):
        for path, body in (
            ("/v1/chat/completions", chat("demo")),
            ("/v1/models", None),
            ("/generate", {"prompt": "a"}),
        ):
            status, answer = ask(port, path, body)
            assert status == 404
            assert f"This is {name}" in answer["error"]["message"]
            assert "send them to the port of the scheduler" in answer["error"]["message"]


def test_a_message_without_the_key_is_refused(deployed: Machine, ports: list[int]) -> None:
    status, answer = ask(ports[0], "/join", {"epoch": 1 << 62, "name": "prefill-1", "table": "", "bus": "nats://h:1"})
    assert (status, "keys" in answer["error"]) == (403, True)
    assert ask(ports[2], "/health")[0] == 200


@pytest.mark.spec("S-DIS-047", "S-DIS-046")
def test_a_device_and_a_deployment_are_taken_once(deployed: Machine) -> None:
    second = deployed.start(PREFILL, free_ports(1)[0])
    assert second.code() == 78
    assert f"device {PREFILL} of {deployed.ip} is in use by another instance" in second.output
    second = deployed.start("host", free_ports(1)[0], "1,2")
    assert second.code() == 78
    assert "a scheduler of this deployment runs already" in second.output
    deployed.running[-2:] = []


def test_an_instance_that_was_killed_joins_again_when_it_is_started_again(deployed: Machine, ports: list[int]) -> None:
    deployed.running[2].stop(signal.SIGKILL)
    body = {"model": "demo", "prompt": "A", "max_tokens": 4, "temperature": 0}
    wait_until(lambda: ask(ports[2], "/v1/completions", body)[0] == 200, 60)
    deployed.running[2] = deployed.start(PREFILL, ports[0])
    deployed.running.pop()
    wait_until(lambda: ask(ports[0], "/health")[0] == 200, 60, lambda: deployed.running[2].output)
    assert "joins the bus" in deployed.running[2].output
    assert ask(ports[2], "/v1/completions", body)[0] == 200


@pytest.mark.spec("S-DIS-043")
def test_ports_in_the_wrong_order_are_an_error_that_names_the_position(deployed: Machine, ports: list[int]) -> None:
    """The scheduler is replaced by one with swapped ports, and then by a right one, which the instances follow."""
    assert deployed.running[0].stop() == 0
    wrong = deployed.start("host", ports[2], f"{ports[1]},{ports[0]}")
    assert wrong.code() == 78
    assert "NODE_PORTS position 1, prefill-1 at" in wrong.output or "NODE_PORTS position 2, decode-1" in wrong.output
    assert "in the order of the global rank table" in wrong.output
    few = deployed.start("host", ports[2], str(ports[0]))
    assert few.code() == 78
    assert "has 1 ports, and the global rank table 2 instances" in few.output
    deployed.running[-2:] = []
    deployed.running[0] = deployed.start("host", ports[2], f"{ports[0]},{ports[1]}", USE_OPENAI="0")
    deployed.running.pop()
    deployed.running[0].wait_for("Antiphon is ready")


@pytest.mark.spec("S-DIS-035")
def test_use_openai_0_in_the_scheduler_serves_generate_alone(deployed: Machine, ports: list[int]) -> None:
    """The scheduler of the last test has it; the other instances have 1, which means nothing there."""
    assert ask(ports[2], "/v1/chat/completions", chat("demo"))[0] == 404
    status, answer = ask(ports[2], "/generate", {"prompt": "A", "max_tokens": 4, "temperature": 0})
    assert status == 200
    assert len(answer["text"]) == 1
    assert ask(ports[2], "/v1/completions", {"model": "demo", "prompt": "A"})[0] == 404
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[2]}/health", timeout=60) as health:
        assert health.status == 200


@pytest.fixture(scope="module")
def two_hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine, list[int]]]:
    """Two addresses of this machine as hosts: scheduler and prefill on the first, decode on the second. Both have a
    device of the same number. Nothing has started yet; the ports are those of prefill, decode and scheduler.
    """
    first_words = ("--prefill-server-list", PREFILL, "--api-server", "--ip", "127.0.0.2")
    second_words = ("--decode-server-list", PREFILL, "--ip", "127.0.0.3")
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    with machine(folders[1], model, *second_words) as second, machine(folders[0], model, *first_words) as first:
        tables = [str(each.table) for each in (first, second)]
        (joined,) = make_tables(folders[0], "--mode", "merge", "--global-ranktable-list", *tables)
        first.table = second.table = joined
        yield first, second, free_ports(3)


@pytest.mark.spec("S-DIS-015", "S-DIS-041")
def test_two_hosts_with_a_joined_table_and_one_key(two_hosts: tuple[Machine, Machine, list[int]]) -> None:
    first, second, ports = two_hosts
    keyless = first.start("host", ports[2], f"{ports[0]},{ports[1]}")
    assert keyless.code() == 78
    assert "--cluster-key-file is needed, since the rank table has several hosts" in keyless.output
    first.running.clear()
    keys = [first.folder / "key", second.folder / "key"]
    for key in keys:
        key.write_text("0123456789abcdef" * 2)
        key.chmod(0o600)
    named = [{"ANTIPHON_CLUSTER_KEY_FILE": str(key)} for key in keys]
    first.start(PREFILL, ports[0], **named[0])
    decode = second.start(PREFILL, ports[1], **named[1])
    host = first.start("host", ports[2], f"{ports[0]},{ports[1]}", **named[0])
    host.wait_for("Antiphon is ready")
    assert "decode-1 joins the bus at nats://127.0.0.2:" in decode.output
    assert ask(ports[2], "/v1/completions", {"model": "demo", "prompt": "A", "max_tokens": 4})[0] == 200
    # A decode instance with another key is not taken in, and the scheduler says so.
    assert host.stop() == decode.stop() == 0
    keys[1].write_text("another key, as long as the other")
    second.start(PREFILL, ports[1], **named[1])
    second.running[-1].wait_for("waiting for the scheduler")
    host = first.start("host", ports[2], f"{ports[0]},{ports[1]}", **named[0])
    assert host.code() == 78
    assert "NODE_PORTS position 2, decode-1 at 127.0.0.3" in host.output
    assert "has another key; all instances need the same --cluster-key-file" in host.output
    first.running.remove(host)


@pytest.mark.spec("S-DIS-004", "S-DIS-036", "S-DIS-048")
def test_1p1d_tp2_with_the_documented_flags(tmp_path: Path) -> None:
    """Two devices an instance: each engine is two processes, and the tokens are those of one."""
    model = make_model(tmp_path / "model", max_position_embeddings=4096)
    pairs = [f"{PREFILL}0,{PREFILL}1", f"{PREFILL}2,{PREFILL}3"]
    words = ("--prefill-server-list", pairs[0], "--decode-server-list", pairs[1], "--api-server")
    flags = ("--tensor-parallel-size=2", "--max-model-len=4096", "--max-num-seqs=256", "--max-num-batched-tokens=4096")
    ports = free_ports(3)
    with machine(tmp_path / "tables", model, *words) as made:
        for pair, port in zip(pairs, ports, strict=False):
            made.start(pair.replace(",", "-"), port, "", *flags)
        host = made.start("host", ports[2], f"{ports[0]},{ports[1]}", *flags)
        host.wait_for("Antiphon is ready", 150)
        prompt = list(range(5, 60))
        body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        status, answer = ask(ports[2], "/v1/completions", {**body, "return_token_ids": True})
        assert status == 200
        assert answer["choices"][0]["token_ids"] == greedy_reference(model, prompt, 12)
        # All of the prompt but its last token has been computed by the other instance.
        counted = f'engine_kv_loaded_tokens_total{{engine="decode-1",model_name="demo"}} {len(prompt) - 1}.0'
        wait_until(lambda: counted in ask(ports[2], "/metrics")[1], 60, lambda: ask(ports[2], "/metrics")[1])


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    script = ROOT / "infra" / "llm_tools" / "PD_separate" / "start_servers.sh"
    environ = {"PATH": "/usr/bin:/bin", "ANTIPHON_PYTHON": sys.executable, "HOME": str(tmp_path)}
    done = subprocess.run(["sh", str(script)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "GLOBAL_RANK_TABLE_FILE_PATH is not set: export the path of the global rank table" in done.stderr
