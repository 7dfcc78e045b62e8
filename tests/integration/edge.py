"""Support for the tests of the HTTP edge: a scripted backend, a real uvicorn, and a raw HTTP client.

The backend is a fake on purpose: the edge is the thing under test, and only a script can make every update, error and
silence happen at a known moment. Sockets, server, application and client libraries are real.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from antiphon.services.gateway.app import create_app
from antiphon.services.gateway.edge.access.usage import UsageLedger
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.services.gateway.edge.http.server.uvicorn_server import Server, server_config
from antiphon.services.gateway.ops.timeline.directory import RecordDirectory
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.path.generation import (
    GenerationRequest,
    ModelCard,
    RequestTimes,
    SequenceUpdate,
    TokenCounts,
)
from antiphon.services.gateway.path.guest import Guests
from antiphon.services.gateway.path.models.catalog import find_model, unknown_model
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared.config import GatewaySettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import Heartbeat

CARD = ModelCard(name="org/toy", path="/models/toy", max_model_len=512, vocab_size=300, created=1_700_000_000)
Batch = list[SequenceUpdate]
Step = Batch | ServiceError | Exception


def text_batches(*pieces: str, index: int = 0, finish: str = "stop", **last: Any) -> list[Batch]:
    """One update for each piece of text, one token each; the last one ends the sequence."""
    updates: list[Batch] = []
    for number, piece in enumerate(pieces):
        end: dict[str, Any] = {"finish_reason": finish, **last} if number == len(pieces) - 1 else {}
        logprob = {"cumulative_logprob": -0.5 * (number + 1)}
        updates.append([SequenceUpdate(index=index, text=piece, token_ids=(number + 1,), **logprob, **end)])
    return updates


def good_day(request: GenerationRequest) -> list[Step]:
    """The same answer for every prompt and choice."""
    count = request.inputs.num_prompts * request.n
    return [batch for index in range(count) for batch in text_batches("Good ", "day", index=index)]


class ScriptedGeneration:
    """Plays what is put into it; ends when told to."""

    def __init__(self, request: GenerationRequest, num_prompt_tokens: int, prompt_tail: str = "") -> None:
        self.request = request
        self.cancelled: list[str] = []
        self.stopped = asyncio.Event()
        self.generated = 0
        self.outputs = [
            SequenceState(sequence_id=str(index)) for index in range(request.inputs.num_prompts * request.num_sequences)
        ]
        self._num_prompt_tokens = num_prompt_tokens
        self._prompt_tail = prompt_tail
        self._steps: asyncio.Queue[Step | None] = asyncio.Queue()

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens * self.request.inputs.num_prompts

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        return [list(range(self._num_prompt_tokens))] * self.request.inputs.num_prompts

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(0.0, 0.0)

    @property
    def prompt_tail(self) -> str:
        return self._prompt_tail

    @property
    def waiting(self) -> int:
        """Steps that the edge has not taken yet."""
        return self._steps.qsize()

    def put(self, *steps: Step | None) -> None:
        """Batches to deliver; an exception to raise; None to end."""
        for step in steps:
            self._steps.put_nowait(step)

    @property
    def token_counts(self) -> TokenCounts:
        return TokenCounts(self.num_prompt_tokens, 0, self.num_prompt_tokens + self.generated, self.generated)

    async def updates(self) -> AsyncIterator[Batch]:
        while (step := await self._steps.get()) is not None:
            if isinstance(step, Exception):
                raise step
            for update in step:
                self._accept(update)
            yield step

    def _accept(self, update: SequenceUpdate) -> None:
        output = self.outputs[update.index]
        self.generated += len(update.token_ids)
        if update.token_ids:
            output.last_from, output.last_from_logprob = len(output.token_ids), output.cumulative_logprob
            output.token_ids += update.token_ids
            output.cumulative_logprob = update.cumulative_logprob
        output.num_cached_tokens = max(output.num_cached_tokens, update.num_cached_tokens)
        output.finish_reason = update.finish_reason

    async def cancel(self, reason: str, cause: str = "") -> None:
        self.cancelled.append(reason)
        self.stopped.set()


@dataclass
class ScriptedBackend:
    """Answers every request with `reply`, unless `manual`: then the test puts the steps itself."""

    cards: list[ModelCard] = field(default_factory=lambda: [CARD])
    reply: Callable[[GenerationRequest], Sequence[Step]] = field(default=lambda request: good_day(request))
    refusal: Exception | None = None
    manual: bool = False
    missing: str = ""
    num_prompt_tokens: int = 3
    prompt_tail: str = ""
    requests: list[GenerationRequest] = field(default_factory=list)
    remote: dict[str, bytes] = field(default_factory=dict)
    """Files of images, by URL."""
    fetched: list[str] = field(default_factory=list)
    """URLs of the images that `fetch_images` was called for."""
    generations: "asyncio.Queue[ScriptedGeneration]" = field(default_factory=asyncio.Queue)

    def models(self) -> list[ModelCard]:
        return self.cards

    def resolve_model(self, name: str | None) -> ModelCard:
        wanted = "" if name is None or name == "default" else name
        card = find_model(self.cards, wanted)
        if card is None:
            raise unknown_model(self.cards, wanted)
        return card

    def generate(self, request: GenerationRequest) -> ScriptedGeneration:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        generation = ScriptedGeneration(request, self.num_prompt_tokens, self.prompt_tail)
        if not self.manual:
            generation.put(*self.reply(request), None)
        self.generations.put_nowait(generation)
        return generation

    async def tokenize(self, request: GenerationRequest, *, return_tokens: bool) -> list[tuple[list[int], list[str]]]:
        self.requests.append(request)
        inputs = request.inputs
        text = inputs.texts[0] if inputs.texts else "".join(message.content for message in inputs.messages)
        return [(list(text.encode()), list(text) if return_tokens else [])]

    async def fetch_images(self, request: GenerationRequest) -> GenerationRequest:
        self.fetched += [one.url for one in request.inputs.images if not one.file]
        images = tuple([replace(one, file=one.file or self.remote[one.url]) for one in request.inputs.images])
        return structs.replace(request, inputs=structs.replace(request.inputs, images=images))

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        return bytes(one % 128 for one in token_ids).decode()

    async def token_texts(self, model: str, token_ids: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(bytes([one % 128]).decode() for one in token_ids)

    def ready(self) -> str:
        return self.missing


@contextlib.asynccontextmanager
async def serving(
    backend: ScriptedBackend,
    heartbeats: Callable[[], list[Heartbeat]] = list,
    keys: ApiKeys | None = None,
    usage: UsageLedger | None = None,
    recorder: Recorder | None = None,
    members: Callable[[], list[tuple[Heartbeat, float]]] = list,
    offers: Sequence[object] = (),
    **settings: Any,
) -> AsyncIterator[int]:
    """A real server on a free port. At the end every request must be over; a leak would show as a hanging test.

    `offers`: what guests offer to the APIs.
    """
    given, guests = GatewaySettings(**settings), Guests()
    guests.offer(*offers)
    app = create_app(
        backend,
        given,
        keys=keys,
        usage=usage,
        heartbeats=heartbeats,
        records=None if recorder is None else RecordDirectory(recorder, "gateway-1"),
        members=members,
        guests=guests,
    )
    config = server_config(app, given)
    config.load()
    server = Server(config)
    server.lifespan = config.lifespan_class(config)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.startup(sockets=[listener])
    for api in app.state.apis:
        await api.answering()
    try:
        yield listener.getsockname()[1]
    finally:
        for api in app.state.apis:
            await api.leave()
            await api.finish()
        # The server's own shutdown is in steps of 100 ms.
        await server.stop_accepting()
        listener.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await asyncio.gather(*server.server_state.tasks)


@dataclass(frozen=True)
class Reply:
    """A response, its chunks joined."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, checked for its shape."""
        assert set(self.json) == {"error"}, self.body
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert isinstance(error["code"], str)
        assert "Traceback" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, decoded where they are JSON."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


class Connection:
    """One raw connection, closed at the end of the block."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        every = {"host": f"127.0.0.1:{self._port}", "content-length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in every.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes:
        """One piece of a chunked body; empty at the end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:size]

    async def reply(self, method: str = "GET") -> Reply:
        status, headers = await self.head()
        if method == "HEAD":
            return Reply(status, headers, b"")
        if "content-length" in headers:
            return Reply(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        return Reply(status, headers, await self.rest())

    async def rest(self) -> bytes:
        """What is left of a chunked body."""
        pieces: list[bytes] = []
        while piece := await self.chunk():
            pieces.append(piece)
        return b"".join(pieces)


async def call(port: int, method: str, path: str, body: Any = b"", headers: Mapping[str, str] | None = None) -> Reply:
    """One request on a connection of its own. `body`: bytes, or something to send as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with Connection(port) as connection:
        await connection.send(method, path, data, headers)
        return await connection.reply(method)


async def endings(recorder: Recorder) -> list[tuple[str | None, str]]:
    """Returns how each recorded request has ended, and the cause, when none runs any more."""
    async with asyncio.timeout(60):
        while any(one.outcome is None for one in recorder.all()):
            await asyncio.sleep(0.01)
    return [(one.outcome, one.error_code) for one in recorder.all()]
