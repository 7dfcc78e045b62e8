"""The gateways' listening socket: who may have the port, how connections spread, what a restart loses."""

import asyncio
import multiprocessing
import socket
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier

import pytest

from antiphon.launch import sockets
from services.gateway.edge.http.server.accepting import Acceptor
from shared.flags import SettingsError


@pytest.fixture
def opened() -> Iterator[socket.socket]:
    with sockets.listen("127.0.0.1", 0) as found:
        yield found


@pytest.mark.spec("S-SRV-101:ports")
def test_a_port_in_use_is_refused_with_what_to_do(opened: socket.socket) -> None:
    port = opened.getsockname()[1]
    with pytest.raises(SettingsError, match=f"port {port} is in use.*--port {port + 1}"):
        sockets.listen("127.0.0.1", port)


def accepting(listener: socket.socket, ready: Barrier, counts: "multiprocessing.Queue[int]") -> None:
    """Accepts connections as a gateway does, between two passes of the barrier."""

    async def run() -> None:
        taken: list[socket.socket] = []
        acceptor = Acceptor(listener, lambda one: taken.append(one) is None)
        acceptor.start()
        await asyncio.to_thread(ready.wait)
        await asyncio.to_thread(ready.wait)
        acceptor.stop()
        counts.put(len(taken))

    asyncio.run(run())


def test_connections_spread_over_the_gateways(opened: socket.socket) -> None:
    context = multiprocessing.get_context("fork")
    ready, counts = context.Barrier(4), context.Queue()
    gateways = [context.Process(target=accepting, args=(opened, ready, counts)) for _ in range(3)]
    for each in gateways:
        each.start()
    ready.wait()
    clients = [socket.create_connection(opened.getsockname(), timeout=10) for _ in range(300)]
    ready.wait()
    taken = [counts.get(timeout=10) for _ in gateways]
    for client in clients:
        client.close()
    for each in gateways:
        each.join()
    assert sum(taken) == len(clients)
    assert max(taken) < len(clients), "one gateway has taken all"


def test_connections_made_while_a_gateway_restarts_wait_for_it(opened: socket.socket) -> None:
    inherited = opened.dup()
    inherited.close()
    with socket.create_connection(opened.getsockname(), timeout=5) as client:
        client.sendall(b"hello")
        successor = opened.dup()
        served, _ = successor.accept()
        assert served.recv(5) == b"hello"
        served.close()
        successor.close()


@pytest.mark.parametrize(("host", "said"), [("no.such.host.invalid", "no address"), ("192.0.2.1", "192.0.2.1")])
def test_a_host_that_is_not_here_is_refused(host: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        sockets.listen(host, 0)
