"""Runs in OpenVINO's environment: serves one model with OpenVINO GenAI's continuous batching, over HTTP.

    ENVIRONMENT/bin/python openvino_server.py MODEL_DIRECTORY --port PORT

GenAI is a library, and its own server is not a Python package. This one has only what the benchmarks need: /health,
/v1/models, and streamed greedy completions (`prompt`, `max_tokens`) that end after `max_tokens` tokens. As in OpenVINO
Model Server, a thread calls the pipeline's `step` while there are requests, prompts are cached, and the other settings
are GenAI's defaults. What each step brought is decoded by one call and passed to the connections at once. Started by
`peer_servers`; imports nothing of this project, which OpenVINO's environment lacks.
"""

import argparse
import asyncio
import importlib
import json
import queue
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
SEEN_MAX = 1 << 20
"""Most bytes of a request."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A completion. `pieces`: the texts of its tokens as they come, then None."""

    prompt: str
    max_tokens: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    handle: Any = None
    pieces: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue[str | None]())

    def usage(self) -> dict[str, int]:
        """Returns the numbers of tokens as OpenAI's API names them."""
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.output_tokens}


class Engine:
    """The pipeline and its thread. `submit` is called by the event loop, everything else by the thread."""

    def __init__(self, model: Path, cache_gib: int) -> None:
        # Named at run time: the project's environment, in which types are checked, has no OpenVINO.
        self._genai: Any = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._new: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._running: list[Request] = []
        self._count = 0
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: Request) -> None:
        """Adds a request before the next step. Its `pieces` are put in by the event loop."""
        self._new.put(request)

    def _run(self) -> None:
        try:
            while True:
                while not (self._running and self._new.empty()):
                    self._add(self._new.get())
                self._pipeline.step()
                self._deliver()
        except Exception:
            # The process ends with the event loop, and would not wait for a thread that still writes the error.
            traceback.print_exc()
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _add(self, request: Request) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, True, False
        tokens = self._tokenizer.encode(request.prompt, add_special_tokens=False).input_ids
        request.prompt_tokens = tokens.shape[1]
        request.handle = self._pipeline.add_request(self._count, tokens, config)
        self._count += 1
        self._running.append(request)

    def _deliver(self) -> None:
        read = [request for request in self._running if request.handle.can_read()]
        tokens = [request.handle.read()[0].generated_ids for request in read]
        texts = self._tokenizer.decode(tokens) if tokens else []
        ended: list[Request] = []
        for request, new in zip(read, tokens, strict=True):
            request.output_tokens += len(new)
            if request.output_tokens >= request.max_tokens:
                ended.append(request)
        self._running = [request for request in self._running if request not in ended]
        self._loop.call_soon_threadsafe(_put, list(zip(read, texts, strict=True)), ended)


def _put(texts: list[tuple[Request, str]], ended: list[Request]) -> None:
    for request, text in texts:
        request.pieces.put_nowait(text)
    for request in ended:
        request.pieces.put_nowait(None)


class Connections:
    """Answers HTTP requests, one for each connection."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads a request and writes its answer."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            await self._route(head[0].split(" ")[1], body, writer)
        finally:
            writer.close()

    async def _route(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/completions":
            wanted = json.loads(body)
            request = Request(prompt=wanted["prompt"], max_tokens=wanted["max_tokens"])
            self._engine.submit(request)
            await self._stream(request, writer)
        elif path in ("/health", "/v1/models"):
            _write_head(writer, "200 OK", "application/json")
            writer.write(json.dumps({"data": [{"id": self._name}]}).encode())
        else:
            _write_head(writer, "404 Not Found", "text/plain")
        await writer.drain()

    async def _stream(self, request: Request, writer: asyncio.StreamWriter) -> None:
        _write_head(writer, "200 OK", "text/event-stream")
        while (text := await request.pieces.get()) is not None:
            _write_event(writer, {"choices": [{"index": 0, "text": text}]})
            await writer.drain()
        _write_event(writer, {"choices": [], "usage": request.usage()})
        writer.write(b"data: [DONE]\n\n")


def _write_head(writer: asyncio.StreamWriter, status: str, kind: str) -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())


def _write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def serve(model: Path, port: int, cache_gib: int) -> None:
    """Serves until the process is ended."""
    connections = Connections(Engine(model, cache_gib), model.name)
    server = await asyncio.start_server(connections.answer, HOST, port, limit=SEEN_MAX)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model with OpenVINO GenAI.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cache-gib", type=int, default=4)
    options = parser.parse_args()
    asyncio.run(serve(options.model, options.port, options.cache_gib))


if __name__ == "__main__":
    main()
