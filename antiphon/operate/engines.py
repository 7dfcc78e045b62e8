"""`antiphon drain`, `move` and `resume`: take an engine out of service, while its process keeps running, and back."""

import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from antiphon.client import Client

POLL_S = 0.1
STILL_THERE = 1
"""Exit code of `drain` if the engine still has sequences after the timeout."""


def drain(
    client: Client, engine: str, *, force: bool, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Takes an engine out of service. Prints the moved sequences when the engine has none left, or after the timeout.

    Raises SettingsError if the server refuses.
    """
    path = f"/admin/engines/{quote(engine, safe='')}"
    before = client.get(path)["sequences"]
    client.post(f"{path}/drain", {"force": force})
    deadline = time.monotonic() + timeout_s
    while True:
        found = client.get(path)
        if (found["state"] != "ready" and not found["sequences"]) or time.monotonic() > deadline:
            break
        sleep(POLL_S)
    print("\n".join(lines(found, before)))
    return STILL_THERE if found["sequences"] else 0


def resume(client: Client, engine: str) -> int:
    """Takes an engine back into service. Raises SettingsError if the server refuses."""
    client.post(f"/admin/engines/{quote(engine, safe='')}/resume", {})
    print(f"{engine} takes requests again")
    return 0


def lines(found: dict[str, Any], before: int) -> Iterator[str]:
    """Yields the lines about an engine after a drain. `before`: its sequences before the drain."""
    engine, moved = found["id"], found["moved"]
    for move in moved:
        where = f"to {move['to']}" if move["to"] else "waits for an engine with room"
        yield f"{move['sequence']}  after {move['position']} tokens  {where}"
    yield f"{engine} is out of service until `antiphon resume {engine}`: {before} sequences before, {len(moved)} moved"
    if found["sequences"]:
        why = "other engines have no room for them" if found["others"] else "the model has no other engine"
        yield f"{found['sequences']} sequences are still there ({why}); they move when there is room, or end there"
