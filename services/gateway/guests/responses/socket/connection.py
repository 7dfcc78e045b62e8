"""Serves one WebSocket: answers its messages one after the other, and ends it when it is too old or the server ends."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from antiphon.services.gateway.edge.http.errors import as_service_error
from antiphon.services.gateway.edge.http.server.web_socket import SERVICE_RESTART, SOCKET, BoundedWebSocket
from antiphon.services.gateway.guests.responses.socket import messages
from antiphon.services.gateway.guests.responses.socket.exchange import TurnExchange, as_text_message
from antiphon.services.gateway.guests.responses.socket.memory import ConnectionResponses, SocketTurn, socket_responses
from antiphon.services.gateway.guests.responses.socket.messages import error_event
from antiphon.services.gateway.guests.responses.stored.store import ResponseStore
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError

_GOING_AWAY = 1001


class _Ending(NamedTuple):
    """Why a connection ends. `is_told`: also if no message waits, by an event of its own."""

    error: ServiceError
    code: int
    is_told: bool


class SocketEndpoint:
    """The endpoint for WebSockets at `/v1/responses`.

    `application` returns the application, through which messages pass; it may be built after this object. `count`
    counts errors by their codes.
    """

    def __init__(self, application: Callable[[], ASGIApp], count: Callable[[str], None]) -> None:
        self._application, self._count = application, count
        self._responses = socket_responses()

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one connection to its end."""
        await _Connection(websocket, self._application(), self._responses, self._count).run()


class _Connection:
    def __init__(
        self, websocket: WebSocket, application: ASGIApp, responses: ResponseStore, count: Callable[[str], None]
    ) -> None:
        self._websocket, self._application, self._count = websocket, application, count
        socket: BoundedWebSocket = websocket.scope[SOCKET]
        assert socket.held is not None
        self._socket, self._held = socket, socket.held
        self._responses = ConnectionResponses(responses)
        self._waiting = asyncio.Queue[bytes | None]()
        """Messages that are not answered yet; None: there will be no more."""
        self._gone = asyncio.Event()
        self._ending: _Ending | None = None

    async def run(self) -> None:
        """Answers messages until the client or the server ends the connection."""
        await self._websocket.accept()
        self._socket.leave = self._leave
        aging = asyncio.get_running_loop().call_later(limits.SOCKET_AGE_S, self._expire)
        answering = asyncio.create_task(self._answer_all())
        try:
            await self._read_all()
            self._gone.set()  # ends what is being answered
            self._waiting.put_nowait(None)
            await answering
        finally:
            aging.cancel()
            answering.cancel()
            await self._responses.forget_all()

    async def _read_all(self) -> None:
        while (message := await self._websocket.receive())["type"] == "websocket.receive":
            text = message.get("text")
            refused = self._take(message["bytes"] if text is None else text.encode())
            if refused is not None:
                await self._tell(refused)

    def _take(self, data: bytes) -> ServiceError | None:
        """Lets a message wait for its answer. Returns why it does not."""
        if self._ending is not None:
            return self._ending.error
        if self._waiting.qsize() >= limits.SOCKET_MESSAGES_MAX:
            told = f"{limits.SOCKET_MESSAGES_MAX} messages wait already. Send the next one when a response is complete."
            return ServiceError("rate_limit_exceeded", told, retry_after_s=1.0)
        if not self._held.waits(len(data)):
            return ServiceError("server_is_overloaded", "The server holds too many large messages. Try again later.")
        self._waiting.put_nowait(data)
        return None

    async def _answer_all(self) -> None:
        self._socket.idle()
        while (data := await self._waiting.get()) is not None:
            self._held.begins(len(data))
            if self._ending is not None:
                await self._tell(self._ending.error)
            elif not self._gone.is_set():
                self._socket.busy()
                await self._answer(data)
                self._socket.idle()
        if self._ending is not None:
            await self._close(self._ending)

    async def _answer(self, data: bytes) -> None:
        asked, exchange = None, TurnExchange(self._send, self._gone)
        try:
            asked = messages.read(data)
            if asked is None:
                return
            turn = SocketTurn(self._responses, asked.generates)
            scope = exchange.scope(self._websocket.scope, asked.body, turn)
            await self._application(scope, exchange.receive, exchange.send)
            if (failure := exchange.failure()) is not None:
                await self._send(failure)
        except Exception as error:
            await self._tell(as_service_error(error))
        if asked is not None and not exchange.has_succeeded:
            # A client that has seen a response fail begins anew, with all of its conversation.
            await self._responses.forget(asked.previous)

    def _leave(self) -> None:
        error = ServiceError("draining", "The server is shutting down. Connect again.", retry_after_s=1.0)
        self._end(_Ending(error, SERVICE_RESTART, is_told=False))

    def _expire(self) -> None:
        told = f"A WebSocket may be open for {limits.SOCKET_AGE_S / 60:g} minutes. Create a new one to continue."
        error = ServiceError("websocket_connection_limit_reached", told)
        self._end(_Ending(error, _GOING_AWAY, is_told=True))

    def _end(self, ending: _Ending) -> None:
        """Ends the connection as soon as the response in progress is complete."""
        if self._ending is None:
            self._ending = ending
            self._waiting.put_nowait(None)

    async def _close(self, ending: _Ending) -> None:
        if ending.is_told:
            await self._tell(ending.error)
        with contextlib.suppress(OSError, WebSocketDisconnect):  # the client may close first
            if not self._gone.is_set():
                await self._websocket.close(ending.code, ending.error.message)

    async def _tell(self, error: ServiceError) -> None:
        self._count(error.code)
        await self._send(error_event(error))

    async def _send(self, text: bytes) -> None:
        if not self._gone.is_set() and not self._socket.close_sent:
            try:
                await self._websocket.send(as_text_message(text))
            except (OSError, WebSocketDisconnect):
                self._gone.set()
