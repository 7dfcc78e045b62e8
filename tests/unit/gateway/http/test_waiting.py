"""Connections that wait in the sockets of other gateways: real sockets that share a port."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from antiphon.launch import sockets
from antiphon.services.gateway.edge.http.server.waiting import accept_waiting, num_waiting
from antiphon.shared import limits


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    found = sockets.listen("127.0.0.1", 0, 2)
    yield found
    sockets.close(found)


def connect(opened: list[socket.socket], count: int) -> list[socket.socket]:
    return [socket.create_connection(opened[0].getsockname(), timeout=60) for _ in range(count)]


def test_connections_that_nobody_has_accepted_are_counted(opened: list[socket.socket]) -> None:
    assert [num_waiting(each) for each in opened] == [0, 0]
    clients = connect(opened, 30)
    assert sum(map(num_waiting, opened)) == 30
    opened[0].setblocking(False)
    before = num_waiting(opened[0])
    opened[0].accept()[0].close()
    assert num_waiting(opened[0]) == before - 1
    for client in clients:
        client.close()


async def test_what_waits_for_another_gateway_is_accepted_and_served(opened: list[socket.socket]) -> None:
    clients = connect(opened, 100)
    count = num_waiting(opened[1])
    assert 0 < count < 100

    served: set[object] = set()

    def taken(connection: socket.socket) -> bool:
        served.add(connection.getpeername())
        connection.send(b"hello")
        connection.close()
        return True

    other = opened[1].dup()
    other.setblocking(False)
    task = asyncio.create_task(accept_waiting([other], taken))
    while len(served) < count:
        await asyncio.sleep(limits.WAITING_LOOK_S)
    assert num_waiting(opened[1]) == 0
    for client in clients:
        if client.getsockname() in served:
            assert client.recv(5) == b"hello"
        client.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert other.fileno() < 0  # closed, so that the port becomes free with the last gateway
    assert num_waiting(opened[0]) == 100 - count


async def test_a_gateway_that_accepts_at_once_keeps_its_connections(opened: list[socket.socket]) -> None:
    taken: list[socket.socket] = []
    task = asyncio.create_task(accept_waiting([opened[1].dup()], lambda one: taken.append(one) is None))
    own = await asyncio.start_server(lambda _, writer: writer.close(), sock=opened[1].dup())
    for _ in range(20):
        _, writer = await asyncio.open_connection(*opened[0].getsockname())
        writer.close()
        await asyncio.sleep(limits.WAITING_LOOK_S / 10)
    assert not taken
    own.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
