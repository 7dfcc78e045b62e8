"""The bus ends, and another user of the machine takes its port before it is back."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.port_thief import thief
from tests.system.served import Served, fetch, serve_tiny, until_the_end, wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.nats,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]


@pytest.fixture
def served(model: Path) -> Iterator[Served]:
    with until_the_end(serve_tiny(model), reconnects=True) as started:
        yield started


@pytest.mark.matrix("B-18")
def test_whoever_takes_the_port_of_the_bus_gets_nothing_and_the_server_serves_again(served: Served):
    words = Path(f"/proc/{served.pids()['nats-server']}/cmdline").read_text().split("\0")
    config = Path(words[words.index("-c") + 1])
    port = int(re.findall(r'listen: "127.0.0.1:(\d+)"', config.read_text())[0])
    made = fetch(served, "POST", "/v1/responses", {"input": "hi", "max_output_tokens": 16}).json["id"]
    with thief(port) as other:
        # Until the other one was visited, nobody can start the bus at another port, where the services would go.
        bus = served.pids()["nats-server"]
        os.kill(served.process.pid, signal.SIGSTOP)
        os.kill(bus, signal.SIGKILL)
        other.take()
        other.visited()
        os.kill(served.process.pid, signal.SIGCONT)
        served.wait_for(f"has taken the port {port} of the bus, which starts at port")
        wait_until(lambda: fetch(served, "GET", "/readyz").status == 200, 60, lambda: served.output)
        body = {"prompt": "hi", "max_tokens": 8}
        wait_until(lambda: fetch(served, "POST", "/v1/completions", body).status == 200, 60, lambda: served.output)
        assert other.end() == b""
    # The logs were in the memory of the bus that ended, and are made again.
    assert fetch(served, "GET", f"/v1/responses/{made}").status == 404
    again = fetch(served, "POST", "/v1/responses", {"input": "hi", "max_output_tokens": 16}).json["id"]
    assert fetch(served, "GET", f"/v1/responses/{again}").status == 200
    assert port != int(re.findall(r'listen: "127.0.0.1:(\d+)"', config.read_text())[0])
