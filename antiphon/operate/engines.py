"""`antiphon drain` and `resume`: an engine out of service and back; `sleep` and `wake`: without its memory and back."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from antiphon.client import Client
from antiphon.terminal.exit_codes import Exit
from antiphon.terminal.output import StatusLine, show

POLL_S = 0.1
"""Time between two looks at an engine that is drained, seconds."""


def drain(client: Client, engine: str, *, force: bool, timeout_s: float, as_json: bool = False) -> int:
    """Takes an engine out of service. Prints the moved sequences when the engine has none left, or after the timeout.

    Returns 1 if it still has sequences then. Raises ServerError if the server refuses.
    """
    path, status = _path(engine), StatusLine()
    before = client.get(path)["sequences"]
    client.post(f"{path}/drain", {"force": force})
    deadline = time.monotonic() + timeout_s
    while True:
        found = client.get(path)
        if (found["state"] != "ready" and not found["sequences"]) or time.monotonic() > deadline:
            break
        status.show(f"{engine} has {found['sequences']} sequences, {len(found['moved'])} moved")
        time.sleep(POLL_S)
    status.clear()
    show({**found, "sequences_before": before}, moves(found, before), as_json=as_json)
    return Exit.FAILED if found["sequences"] > 0 else Exit.OK


def resume(client: Client, engine: str, *, as_json: bool = False) -> int:
    """Lets an engine take requests again. Raises ServerError if there is no such engine."""
    found = client.post(f"{_path(engine)}/resume", {})
    show(found, [f"{engine} takes requests again"], as_json=as_json)
    return Exit.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """How an engine shall sleep: fields of the body of `/admin/engines/{id}/sleep`."""

    level: int
    mode: str
    on_demand: bool


def sleep(client: Client, engine: str, how: Sleep, *, timeout_s: float, as_json: bool = False) -> int:
    """Puts an engine to sleep. Prints its level when it sleeps. Returns 1 if it does not within the timeout.

    Raises ServerError if the server refuses.
    """
    client.post(f"{_path(engine)}/sleep", {"level": how.level, "mode": how.mode, "on_demand": how.on_demand})
    found, done = _wait(client, engine, lambda one: one["sleep"]["level"] >= how.level, timeout_s)
    line = f"{engine} sleeps at level {found['sleep']['level']}"
    until = "the next request" if found["sleep"]["on_demand"] else f"`antiphon wake {engine}`"
    text = f"{line} until {until}" if done else f"{engine} still has {found['sequences']} sequences, and sleeps then"
    show(found, [text], as_json=as_json)
    return Exit.OK if done else Exit.FAILED


def wake(client: Client, engine: str, *, timeout_s: float, as_json: bool = False) -> int:
    """Wakes an engine. Returns 1 if it does not take requests within the timeout. Raises ServerError if it refuses."""
    client.post(f"{_path(engine)}/wake", {})
    found, done = _wait(client, engine, lambda one: one["state"] != "sleeping", timeout_s)
    took = f" (it woke in {found['sleep']['last_wake_s']:.2f} s)" if found["sleep"]["num_wakes"] else ""
    text = f"{engine} takes requests{took}" if done else f"{engine} has not woken yet"
    show(found, [text], as_json=as_json)
    return Exit.OK if done else Exit.FAILED


def _wait(
    client: Client, engine: str, is_done: Callable[[dict[str, Any]], bool], timeout_s: float
) -> tuple[dict[str, Any], bool]:
    """Looks at an engine until it is as wanted. Returns what was seen last, and whether it is."""
    deadline, status = time.monotonic() + timeout_s, StatusLine()
    while not (done := is_done(found := client.get(_path(engine)))) and time.monotonic() < deadline:
        status.show(f"{engine} is {found['state']}, {found['sequences']} sequences")
        time.sleep(POLL_S)
    status.clear()
    return found, done


def moves(found: dict[str, Any], before: int) -> Iterator[str]:
    """Yields the lines about an engine after a drain. `before`: its sequences before the drain."""
    engine, moved = found["id"], found["moved"]
    for move in moved:
        where = f"to {move['to']}" if move["to"] else "waits for an engine with room"
        yield f"{move['sequence']}  after {move['position']} tokens  {where}"
    yield f"{engine} is out of service until `antiphon resume {engine}`: {before} sequences before, {len(moved)} moved"
    if found["sequences"]:
        why = "other engines have no room for them" if found["others"] else "the model has no other engine"
        yield f"{found['sequences']} sequences are still there ({why}); they move when there is room, or end there"


def _path(engine: str) -> str:
    return f"/admin/engines/{quote(engine, safe='')}"
