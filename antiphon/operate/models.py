"""`antiphon models`: lists the versions of models, starts a new version, and returns to the former one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from antiphon.client import Client
from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import Exit, NotFoundError
from antiphon.terminal.output import StatusLine, show, tell

POLL_S = 0.1
Model = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wait:
    """How long to wait for a version."""

    timeout_s: float
    sleep: Callable[[float], None] = time.sleep


def show_all(client: Client, *, as_json: bool = False) -> int:
    """Prints the models with their versions."""
    found = listed(client)
    show(found, (line for model in found for line in lines(model)), as_json=as_json)
    return Exit.OK


def listed(client: Client) -> list[Model]:
    """Returns the models in the form of `GET /admin/models`; one that was never changed has version 1 alone."""
    versioned = {one["id"]: one for one in client.get("/admin/models")["data"]}
    cards = [card for card in client.get("/v1/models")["data"] if not card.get("parent")]
    return [versioned.get(card["id"]) or _unchanged(card) for card in cards]


def _unchanged(card: dict[str, Any]) -> Model:
    version = {"number": 1, "state": "ready", "directory": card["root"]}
    return {"id": card["id"], "active": 1, "versions": [{**version, "shadow_share": 0, "reason": "", "copies": None}]}


def lines(model: Model) -> Iterator[str]:
    """Yields the lines about one model of `GET /admin/models`."""
    yield model["id"]
    for one in model["versions"]:
        state = "active" if one["number"] == model["active"] else one["state"]
        if one["shadow_share"] and state == "ready":
            state = "shadow"
        reason = f"  ({one['reason']})" if one["reason"] else ""
        directory = one["directory"] or "(as the server was started)"
        yield f"  version {one['number']}  {state:<8}  {directory}{reason}"
        if (copies := one["copies"]) is not None:
            counts = ", ".join(f"{copies[result]} {result}" for result in ("equal", "different", "failed", "skipped"))
            last = copies["last_difference"]
            where = f"; the latest differed at position {last['position']}, request {last['request']}" if last else ""
            yield f"    copies of requests on the asked gateway: {counts}{where}"


def set_version(client: Client, name: str, directory: str, wait: Wait, *, as_json: bool = False) -> int:
    """Starts a version and waits until it serves or has failed, at most for the timeout. Returns an exit code."""
    version = started(client, "/admin/models", {"model": name, "directory": directory}, directory)
    return wait_for(client, name, version, wait, as_json=as_json)


def shadow(client: Client, name: str, directory: str, share: float, wait: Wait, *, as_json: bool = False) -> int:
    """Starts a version that computes copies of a share of the requests, and waits until it is ready or has failed."""
    body = {"model": name, "directory": directory, "share": share}
    version = started(client, "/admin/models/shadow", body, directory)
    return wait_for(client, name, version, wait, as_json=as_json)


def end_shadow(client: Client, name: str, *, as_json: bool = False) -> int:
    """Ends the version that computes copies of requests, and prints how many equalled the originals."""
    found = client.post("/admin/models/shadow", {"model": name})
    show(found, lines(found), as_json=as_json)
    return Exit.OK


def roll_back(client: Client, name: str, *, as_json: bool = False) -> int:
    """Returns to the former version. Raises ServerError if it is no longer running."""
    found = client.post("/admin/models/rollback", {"model": name})
    show(found, lines(found), as_json=as_json)
    return Exit.OK


def started(client: Client, path: str, body: dict[str, Any], directory: str) -> int:
    """Orders the start of a version from a directory, and returns the version's number."""
    found = client.post(path, body)
    numbers = [one["number"] for one in found["versions"] if one["directory"] == directory]
    return max(numbers)


def wait_for(client: Client, name: str, number: int, wait: Wait, *, as_json: bool = False) -> int:
    """Waits until a version is ready or has failed, and prints the result.

    Returns 1 if it has failed, or is still starting after the timeout.
    """
    began, status = time.monotonic(), StatusLine()
    while True:
        model = next((one for one in client.get("/admin/models")["data"] if one["id"] == name), None)
        version = next((one for one in model["versions"] if one["number"] == number), None) if model else None
        if model is None or version is None:
            raise NotFoundError(f"version {number} of {name} is not listed any more")
        waited_s = time.monotonic() - began
        if version["state"] != "starting" or waited_s > wait.timeout_s:
            break
        status.show(f"version {number} of {name} is starting: {waited_s:.0f} s")
        wait.sleep(POLL_S)
    status.clear()
    show(model, lines(model), as_json=as_json)
    if version["state"] == "starting":
        tell(f"version {number} of {name} is still starting; `antiphon models list` tells when it serves")
    elif version["state"] == "failed":
        tell(f"version {number} could not start, and {name} is served as before: {version['reason']}")
    return Exit.OK if version["state"] not in ("starting", "failed") else Exit.FAILED


def pair(word: str) -> tuple[str, str]:
    """Returns name and directory of a word `NAME=DIR`. Raises SettingsError."""
    name, _, directory = word.partition("=")
    if not name or not directory:
        raise SettingsError(f"{word!r} is not NAME=DIR, a model's served name and the directory of its new version")
    return name, directory
