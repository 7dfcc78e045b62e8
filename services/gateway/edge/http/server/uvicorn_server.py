"""The HTTP server of a gateway: uvicorn with its settings, listening socket and shutdown. No bus."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvicorn
from fastapi import FastAPI

from antiphon.services.gateway.edge.http.server.accepting import Acceptor, Connections
from antiphon.services.gateway.edge.http.server.connection import BoundedConnection
from antiphon.services.gateway.edge.http.server.places import Places
from antiphon.services.gateway.edge.http.server.waiting import accept_waiting
from antiphon.services.gateway.edge.http.server.web_socket import BoundedWebSocket
from antiphon.shared import limits
from antiphon.shared.actors.descriptors import raise_limit
from antiphon.shared.config import GatewaySettings
from antiphon.shared.flags import SettingsError

_log = logging.getLogger(__name__)

BACKLOG = 2048
TICKS_A_SECOND = 10
"""Ticks per second of uvicorn's main loop. uvicorn counts ticks and updates the date header at each multiple of 10."""


class Server(uvicorn.Server):
    """uvicorn with its own accepting of connections, of which it has a bounded number.

    It does without signal handling, which `shared/actors/service.py` does, and without waking up ten times a second.
    """

    def __init__(self, config: uvicorn.Config, others: Sequence[socket.socket] = ()) -> None:
        """`others`: the listening sockets of the other gateways; connections that wait there are served too."""
        super().__init__(config)
        self.places = Places(connections_max(raise_limit()))
        self._leave = asyncio.Event()
        self._others = others
        self._beside: asyncio.Task[None] | None = None
        self._listeners: list[socket.socket] = []
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections on the sockets, and connections that wait at the other gateways' sockets."""
        await super().startup([])
        make = partial(BoundedConnection, self.config, self.server_state, self.lifespan.state)
        taken = Connections(self.places, make, self.config.ssl).take
        self._listeners = sockets or []
        self._acceptors = [Acceptor(listener, taken) for listener in self._listeners]
        for acceptor in self._acceptors:
            acceptor.start()
        if self._others:
            self._beside = asyncio.create_task(accept_waiting(self._others, taken))
            self._beside.add_done_callback(_tell_failure)

    async def stop_accepting(self) -> None:
        """Accepts no more connections; those that wait in the listening sockets are left there."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
        for acceptor in self._acceptors:
            acceptor.stop()

    async def leave(self) -> None:
        """Makes the server accept no more connections and end when the requests in progress are answered.

        Requests on connections that were accepted are answered too (`BoundedConnection.shutdown`).
        """
        await self.stop_accepting()
        await asyncio.sleep(limits.ACCEPT_LINGER_S)
        for listener in self._listeners:
            listener.close()
        self.should_exit = True
        self._leave.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does not install signal handlers."""
        yield

    async def main_loop(self) -> None:
        """Like uvicorn's main loop, but with one tick per second.

        A tick sets the date header of the next responses and returns whether the server must end.
        """
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += TICKS_A_SECOND
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._leave.wait()


def _tell_failure(beside: asyncio.Task[None]) -> None:
    if not beside.cancelled() and (error := beside.exception()) is not None:
        _log.error("connections that wait for other gateways are not accepted any more", exc_info=error)


def connections_max(descriptors: int) -> int:
    """Returns how many connections a gateway may have whose process may have `descriptors` open descriptors."""
    return min(limits.CONNECTIONS_MAX, max(descriptors - limits.DESCRIPTORS_RESERVED, descriptors // 2))


def server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """Returns the configuration of the HTTP server. The process itself provides signals, logging and the socket."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedConnection,
        ws=BoundedWebSocket,
        ws_max_size=limits.BODY_BYTES_MAX,
        ws_ping_interval=limits.SOCKET_PING_S,
        # A client that runs a tool between two responses may not read meanwhile. The kernel notices one that is gone.
        ws_ping_timeout=None,
        # What clients send is small compared with what this would cost: memory for each connection, and time.
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=int(limits.DRAIN_S),
        timeout_keep_alive=int(limits.IDLE_CONNECTION_S),
        server_header=False,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
    )


def listen(settings: GatewaySettings) -> socket.socket:
    """Returns a listening socket. Several gateways may share a port: the kernel distributes connections over them."""
    if settings.listen_fd >= 0:
        return socket.socket(fileno=settings.listen_fd)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # The kernel closes the connection of a client that accepts no data; accepted sockets inherit the option.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limits.CLIENT_STALL_S))
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"--port: cannot listen on {settings.host}:{settings.port} ({error.strerror}).") from error
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def others(settings: GatewaySettings) -> list[socket.socket]:
    """Returns the listening sockets of the other gateways of this server."""
    inherited = [socket.socket(fileno=int(text)) for text in settings.other_listen_fds.split(",") if text]
    for each in inherited:
        each.setblocking(False)
    return inherited
