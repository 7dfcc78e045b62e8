"""The HTTP server of a gateway: uvicorn with its settings, listening socket and shutdown. No bus."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from services.gateway.http.server.connection import BoundedConnection
from services.gateway.http.server.waiting import accept_waiting
from shared import limits
from shared.config import GatewaySettings, SettingsError

_log = logging.getLogger(__name__)

BACKLOG = 2048
TICKS_A_SECOND = 10
"""Ticks per second of uvicorn's main loop. uvicorn counts ticks and updates the date header at each multiple of 10."""


class Server(uvicorn.Server):
    """uvicorn without signal handling, which `shared.actors.service` does, and without waking up ten times a second."""

    def __init__(self, config: uvicorn.Config, others: Sequence[socket.socket] = ()) -> None:
        """`others`: the listening sockets of the other gateways; connections that wait there are served too."""
        super().__init__(config)
        self._leave = asyncio.Event()
        self._others = others
        self._beside: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections on the sockets, and connections that wait at the other gateways' sockets."""
        await super().startup(sockets)
        if self._others:
            self._beside = asyncio.create_task(accept_waiting(self._others, self._accepted))
            self._beside.add_done_callback(_tell_failure)

    async def _accepted(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(self._make_protocol, connection, ssl=self.config.ssl)

    def _make_protocol(self) -> asyncio.Protocol:
        """Returns a protocol object for a connection, configured as uvicorn does for its own connections."""
        return BoundedConnection(self.config, self.server_state, self.lifespan.state)

    async def _end_beside(self) -> None:
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)

    async def leave(self) -> None:
        """Makes the server accept no more connections and end when the requests in progress are answered.

        Requests on connections that were accepted are answered too (`BoundedConnection.shutdown`).
        """
        await self._end_beside()
        servers: list[asyncio.Server] = getattr(self, "servers", [])
        # Not closed yet: asyncio drops a connection whose server is closed between accepting and preparing it.
        for server in servers:
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
        await asyncio.sleep(limits.ACCEPT_LINGER_S)
        for server in servers:
            server.close()
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


def server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """Returns the configuration of the HTTP server. The process itself provides signals, logging and the socket."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=BoundedConnection,
        ws="none",
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
