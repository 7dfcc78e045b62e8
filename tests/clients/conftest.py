"""The network of the clients' tests, and the record of what each client did.

`make client-test` runs them where only the loopback device exists, if the system allows that.
"""

import fcntl
import socket
import struct
from pathlib import Path

import pytest

from tests.clients import results
from tests.clients.results import Row

_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 0x1
CLIENT, FACTS = "client", "facts"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-requests", action="store_true", help="write the agents' requests as fixtures")
    parser.addoption("--agents-model", default="", help="a model directory for the agents, not the demo model")


@pytest.fixture(scope="session", autouse=True)
def _loopback() -> None:
    """A new network has a loopback device that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        asked = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(one, _GET_FLAGS, asked))
        if not flags & _IS_UP:
            fcntl.ioctl(one, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _IS_UP))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the outcome of a test that has told which client it runs."""
    told = dict(report.user_properties)
    if report.when == "call" and CLIENT in told:
        results.add(Row(**told[CLIENT], passed=report.passed, seconds=round(report.duration, 1), **told.get(FACTS, {})))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if rows := results.new_rows():
        results.write(rows)
        terminalreporter.section("clients")
        terminalreporter.write_line(results.table(rows))


@pytest.fixture(scope="session")
def programs() -> Path:
    """Where npm has put the clients' commands."""
    return results.folder() / "node_modules" / ".bin"
