"""The gateways' listening sockets: who may have the port, how connections spread, what a restart loses."""

import selectors
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from antiphon.launch import sockets
from antiphon.shared.flags import SettingsError


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    every: list[socket.socket] = []
    yield every
    sockets.close(every)


@pytest.mark.spec("S-SRV-101:ports")
@pytest.mark.parametrize("count", [1, 3])
def test_a_port_in_use_is_refused_with_what_to_do(count: int, opened: list[socket.socket]) -> None:
    opened += sockets.listen("127.0.0.1", 0, count)
    port = opened[0].getsockname()[1]
    for again in (1, 3):
        with pytest.raises(SettingsError, match=f"port {port} is in use.*--port {port + 1}"):
            sockets.listen("127.0.0.1", port, again)


def test_several_gateways_share_one_port(opened: list[socket.socket]) -> None:
    opened += sockets.listen("127.0.0.1", 0, 3)
    assert len({each.getsockname() for each in opened}) == 1


def test_connections_spread_over_the_gateways(opened: list[socket.socket]) -> None:
    opened += sockets.listen("127.0.0.1", 0, 4)
    address = opened[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(200)]
    taken: Counter[int] = Counter()
    with selectors.DefaultSelector() as selector:
        for each in opened:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        while sum(taken.values()) < len(clients):
            for key, _ in selector.select(timeout=60):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.accept()[0].close()
                taken[key.fd] += 1
    for client in clients:
        client.close()
    # 200 independent choices among 4: fewer than 20 for one has odds below 1 in 10 million.
    assert len(taken) == 4
    assert min(taken.values()) >= 20


def test_connections_made_while_a_gateway_restarts_wait_for_it(opened: list[socket.socket]) -> None:
    opened += sockets.listen("127.0.0.1", 0, 1)
    inherited = opened[0].dup()
    inherited.close()
    with socket.create_connection(opened[0].getsockname(), timeout=60) as client:
        client.sendall(b"hello")
        successor = opened[0].dup()
        served, _ = successor.accept()
        assert served.recv(5) == b"hello"
        served.close()
        successor.close()


@pytest.mark.parametrize(("host", "said"), [("no.such.host.invalid", "no address"), ("192.0.2.1", "192.0.2.1")])
def test_a_host_that_is_not_here_is_refused(host: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        sockets.listen(host, 0, 1)
