"""A server as a benchmark has it: awaited, paused, asked, ended, with its output kept for when it fails."""

import signal
import sys
import time
from pathlib import Path

import pytest

from bench.harness.serving import Server, free_port
from bench.limits_of_machine import processes
from bench.peer_systems.peer_servers import vllm_environment

PROGRAM = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "a-model"}]}')
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def start() -> Server:
    port = free_port()
    return Server("it", [sys.executable, "-c", PROGRAM, str(port)], port, "/ready")


def test_a_server_is_ready_can_be_paused_and_goes_on() -> None:
    with start() as server:
        assert server.ready_s > 0
        assert server.model_name() == "a-model"
        assert server.memory_mb()["it"] > 1
        server.pause()
        before = server.cpu_seconds()
        assert server.paused
        server.resume()
        assert server.get("/ready")[0] == 200
        assert server.cpu_seconds()["it"] >= before["it"]


def test_a_paused_server_ends_with_everything_that_it_started() -> None:
    with start() as server:
        family = processes.tree(server.process.pid)
        server.pause()
    assert len(family) == 2
    assert server.process.returncode == -signal.SIGTERM
    assert not any(living(process) for process in family)


def living(process: processes.Process) -> bool:
    """Whether it still runs; a moment to die is given to what was killed."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        now = processes.tree(process.pid)[:1]
        if not now or now[0].started != process.started or not now[0].command:
            return False
        time.sleep(0.01)
    return True


def test_a_server_that_ends_at_once_is_reported_with_its_last_words() -> None:
    command = [sys.executable, "-c", "raise SystemExit('the model is missing')"]
    with pytest.raises(SystemExit, match="it ended: the model is missing"):
        Server("it", command, free_port(), "/ready")


def test_vllm_gets_all_cores_and_stays_off_the_network(tmp_path: Path) -> None:
    environment = vllm_environment(tmp_path / "bin" / "vllm")
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"]
    assert "libiomp5" not in environment.get("LD_PRELOAD", "")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert str(tmp_path / "lib" / "libiomp5.so") in vllm_environment(tmp_path / "bin" / "vllm")["LD_PRELOAD"]
