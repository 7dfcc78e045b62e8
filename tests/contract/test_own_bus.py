"""The bus of a launcher proves to its clients whose it is, before they say anything."""

import asyncio
import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.launch.nats_server import SETUP, Bus, find_binary, prepare
from antiphon.shared.bus.nats import NatsTransport
from antiphon.shared.bus.own_bus import OwnBus
from antiphon.shared.errors import ServiceError
from antiphon.shared.security.socket_users import listener, user_name, user_of_end
from tests.support.port_thief import UID, thief

pytestmark = pytest.mark.nats
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
    made = prepare(tmp_path)
    made.write()
    return made


@contextlib.contextmanager
def running(bus: Bus) -> Iterator[None]:
    process = subprocess.Popen([find_binary(), "-c", str(bus.config)], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def connected(bus: Bus, wait_s: float = 60.0) -> NatsTransport:
    credentials = bus.credentials(SETUP)
    return await NatsTransport.connect(
        [bus.address], name=SETUP, inbox_prefix="antiphon.v3.inbox.setup.setup", credentials=credentials, wait_s=wait_s
    )


def port_of(bus: Bus) -> int:
    return int(bus.url.rpartition(":")[2])


@contextlib.contextmanager
def ends(*, dual_stack: bool) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A server's socket and a client's, whose connection is not accepted yet."""
    family, host = (socket.AF_INET6, "::") if dual_stack else (socket.AF_INET, "127.0.0.1")
    with (
        socket.create_server((host, 0), family=family, dualstack_ipv6=dual_stack) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client,
    ):
        yield server, client


@pytest.mark.parametrize("dual_stack", [False, True], ids=["IPv4", "both"])
def test_an_end_has_a_user_once_it_is_accepted_and_as_long_as_it_is_open(dual_stack: bool) -> None:
    with ends(dual_stack=dual_stack) as (server, client):
        addresses = client.getpeername(), client.getsockname()
        assert user_of_end(*addresses) is None, "nobody has accepted it"
        accepted, _ = server.accept()
        with accepted:
            assert user_of_end(*addresses) == os.geteuid()
            assert user_of_end(*reversed(addresses)) == os.geteuid()
            assert user_of_end(addresses[0], (addresses[1][0], 1)) is None
        assert user_of_end(*addresses) is None, "an end that is closed has no process"
        assert listener(addresses[0][1]) == user_name(os.geteuid())


async def test_a_server_of_this_user_is_used(bus: Bus) -> None:
    with running(bus):
        transport = await connected(bus)
        assert transport.connected
        await transport.close()


@as_root
@pytest.mark.matrix("B-18")
async def test_a_server_of_another_user_is_told_nothing(bus: Bus) -> None:
    with thief(port_of(bus)) as other:
        other.take()
        with pytest.raises(ServiceError, match=f"belongs to the user {user_name(UID)}"):
            await connected(bus, wait_s=0.3)
        other.visited()
        assert other.end() == b""


@as_root
async def test_who_listens_for_somebody_else_and_does_not_accept_is_told_nothing(bus: Bus) -> None:
    with socket.create_server(("127.0.0.1", port_of(bus))), pytest.raises(ServiceError, match="No NATS server"):
        await connected(bus, wait_s=0.1)


@as_root
async def test_clients_follow_the_bus_to_another_port(bus: Bus) -> None:
    server = contextlib.ExitStack()
    server.enter_context(running(bus))
    transport, taken = await connected(bus), port_of(bus)
    with thief(taken) as other:
        server.close()
        other.take()
        await asyncio.to_thread(other.visited)
        told = bus.make_way()
        new = port_of(bus)
        assert new != taken
        assert told == (
            f"the user {user_name(UID)} has taken the port {taken} of the bus, which starts at port {new} instead"
        )
        with running(bus):
            await transport.barrier()
            assert transport.connected
            await transport.close()
        assert other.end() == b""


def test_a_port_that_is_free_is_kept(bus: Bus) -> None:
    before = bus.url, bus.config.read_text()
    assert bus.make_way() == ""
    assert (bus.url, bus.config.read_text()) == before


def test_a_bus_whose_port_others_know_stays_and_says_who_is_there(tmp_path: Path) -> None:
    bus = prepare(tmp_path, moves=False)
    bus.write()
    with socket.create_server(("127.0.0.1", port_of(bus))):
        told = bus.make_way()
    assert re.fullmatch(rf"the user \S+ has taken the port {port_of(bus)} of the bus, .*free", told)


def test_the_address_of_a_bus_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a, b %20 ü"
    folder.mkdir()
    bus = prepare(folder)
    bus.write()
    assert "," not in bus.address
    assert OwnBus(bus.address).address().port == port_of(bus)
