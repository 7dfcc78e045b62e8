"""`antiphon drain` and `resume`: an engine out of service and back."""

import time
from collections.abc import Iterator
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
