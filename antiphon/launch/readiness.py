"""Waits until a started server can serve all its models, and then prints its address and example commands."""

import asyncio
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from antiphon.async_client import Answer, get
from antiphon.launch import output
from antiphon.shared.observability.logs import json_line, stamp_of
from antiphon.supervision.processes import Sink

POLL_S = 0.05
REMINDER_S = 15.0
"""Interval of the messages that the server is not ready yet, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of a server. `token` is an API key that the server accepts, empty if it needs none.

    `openai`: whether the server has OpenAI's API. Without this API it is ready when one of its models can be used.
    """

    host: str
    port: int
    token: str = ""
    https: bool = False
    openai: bool = True

    def reachable(self) -> "ServerAddress":
        """Returns the same address with the wildcard hosts 0.0.0.0 and :: replaced by the loopback address."""
        return replace(self, host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"http{'s' * self.https}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    async def get(self, path: str) -> Answer:
        """Sends one GET request to `path`; see `antiphon.async_client.get`."""
        return await get(self.host, self.port, path, token=self.token, https=self.https)

    async def get_json(self, path: str) -> Any:
        """Returns the decoded answer to a GET request; None if there is none, or if its gateway dies meanwhile."""
        answer = await self.get(path)
        try:
            return json.loads(answer.body) if answer.status == 200 else None
        except ValueError:  # the body is incomplete
            return None


async def announce(
    place: ServerAddress, models: Sequence[str], pids: Callable[[], Mapping[str, int]], sink: Sink, engines: int = 0
) -> None:
    """Waits until all models can be used, then prints the ready message to standard output and returns.

    `models` has the served names, the default model first; `engines` is the number of engines that must also be ready.
    `pids` returns the process ids of the children by name. While it waits, a message every `REMINDER_S` says through
    `sink` why the server is not ready.
    """
    started = time.monotonic()
    place = place.reachable()
    reminders = 0
    while lacking := await _lacking(place, models, engines):
        waited = time.monotonic() - started
        if waited > REMINDER_S * (reminders + 1):
            reminders += 1
            sink("antiphon", f"not ready after {waited:.0f} s: {lacking}")
        await asyncio.sleep(POLL_S)
    show_ready(place, models, pids(), time.monotonic() - started)


def say_hosted(models: Sequence[str], sink: Sink) -> None:
    """Says through `sink` which models are started here for gateways elsewhere."""
    sink("antiphon", f"no gateway here: those on the bus list {', '.join(models)} when each service below is ready")


def show_ready(place: ServerAddress, models: Sequence[str], pids: Mapping[str, int], seconds: float) -> None:
    """Prints the ready message, see `ready_message`; as one line if lines are JSON objects."""
    if not output.is_json():
        print(ready_message(place, models, pids, seconds), flush=True)
        return
    fields = {"url": place.url, "models": [*models], "processes": {**pids}, "seconds": round(seconds, 3)}
    line = json_line(stamp_of(time.time()), "INFO", "antiphon", __name__, "Antiphon is ready", **fields)
    print(line, flush=True)


def ready_message(place: ServerAddress, models: Sequence[str], pids: Mapping[str, int], seconds: float) -> str:
    """Returns the ready message: URL, models, example commands (for the first model) and process ids.

    `seconds` is the time since the start.
    """
    url = place.url
    rows = [
        ("URL", f"{url}/v1" if place.openai else f"{url}/generate"),
        ("console", f"{url}/"),
        ("model" if len(models) == 1 else "models", ", ".join(models)),
        ("try", _example(url, place, models[0])),
    ]
    if place.openai:
        rows.append(("chat", f"antiphon chat --server {url}{' --api-key YOUR-KEY' if place.token else ''}"))
    rows += [("processes", "  ".join(f"{name} {pid}" for name, pid in pids.items())), ("stop", "Ctrl-C")]
    lines = [f"  {name:<10} {text}" for name, text in rows]
    return "\n".join(["", f"Antiphon is ready ({seconds:.1f} s).", "", *lines, ""])


def _example(url: str, place: ServerAddress, model: str) -> str:
    """Returns a command that sends a first request."""
    path, body = "/generate", json.dumps({"prompt": "Hello", "max_tokens": 32})
    if place.openai:
        path = "/v1/chat/completions"
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    key = " -H 'Authorization: Bearer YOUR-KEY'" if place.token else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


async def _lacking(place: ServerAddress, models: Sequence[str], engines: int) -> str:
    """Returns the reason why the server cannot serve every model yet; empty if it can."""
    answer = await place.get("/readyz")
    if answer.status != 200:
        return _reason(answer.body)
    if engines:
        lines = (await place.get("/metrics")).body.splitlines()
        ready = sum(line.startswith(b"antiphon:engine_stalled{") for line in lines)
        if ready < engines:
            return f"waiting for engines: {ready} of {engines} are ready"
    if not place.openai:
        return ""
    if (found := await place.get_json("/v1/models")) is None:
        return "the gateway does not list its models yet"
    listed = {str(model["id"]) for model in found["data"]}
    waiting = [repr(name) for name in models if name not in listed]
    return f"waiting for the model {', '.join(waiting)}" if waiting else ""


def _reason(body: bytes) -> str:
    """Returns the reason in the body of an answer to `/readyz`."""
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, LookupError, TypeError):
        return "the gateway does not answer yet"
