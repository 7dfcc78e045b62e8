"""Waits until a started system answers, and tells the user where it is."""

import asyncio
import json
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from antiphon.http_probe import Answer, get
from antiphon.processes import Sink

POLL_S = 0.05
REMINDER_S = 15.0
"""Between two messages that it is still not ready."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a system listens. `token`: a key that it accepts, if it needs one."""

    host: str
    port: int
    token: str = ""
    https: bool = False

    def reachable(self) -> "ServerAddress":
        """The same with an address that this machine can connect to."""
        return replace(self, host={"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host))

    async def get(self, path: str) -> Answer:
        """One GET."""
        return await get(self.host, self.port, path, token=self.token, https=self.https)


async def announce(place: ServerAddress, pids: Callable[[], Mapping[str, int]], sink: Sink) -> None:
    """Returns after the ready message has been printed to standard output."""
    started = time.monotonic()
    place = place.reachable()
    reminders = 0
    while (answer := await place.get("/readyz")).status != 200:
        waited = time.monotonic() - started
        if waited > REMINDER_S * (reminders + 1):
            reminders += 1
            sink("antiphon", f"not ready after {waited:.0f} s: {_reason(answer.body)}")
        await asyncio.sleep(POLL_S)
    model = await _model(place)
    print(ready_message(place, model, pids(), time.monotonic() - started), flush=True)


def ready_message(place: ServerAddress, model: str, pids: Mapping[str, int], seconds: float) -> str:
    """The one block that tells a newcomer what to do next."""
    host, needs_key = place.host, bool(place.token)
    url = f"http{'s' * place.https}://{f'[{host}]' if ':' in host else host}:{place.port}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    key = " -H 'Authorization: Bearer YOUR-KEY'" if needs_key else ""
    processes = "  ".join(f"{name} {pid}" for name, pid in pids.items())
    rows = [
        ("URL", f"{url}/v1"),
        ("model", model),
        ("try", f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"),
        ("chat", f"antiphon chat --server {url}{' --token YOUR-KEY' if needs_key else ''}"),
        ("processes", processes),
        ("stop", "Ctrl-C"),
    ]
    lines = [f"  {name:<10} {text}" for name, text in rows]
    return "\n".join(["", f"Antiphon is ready ({seconds:.1f} s).", "", *lines, ""])


async def _model(place: ServerAddress) -> str:
    answer = await place.get("/v1/models")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return "model"


def _reason(body: bytes) -> str:
    """What the gateway says is missing."""
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, LookupError, TypeError):
        return "the gateway does not answer yet"
