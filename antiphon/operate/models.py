"""`antiphon models`: lists the versions of models, starts and changes them, loads and unloads models."""

import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
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
    """Returns the models in the form of `GET /admin/models`; one that was never changed has version 1 alone.

    Models that are not served come last: those that are being loaded, and those that were unloaded.
    """
    changed = {one["id"]: one for one in client.get("/admin/models")["data"]}
    cards = [card for card in client.get("/v1/models")["data"] if not card.get("parent")]
    served = [changed.pop(card["id"], None) or _unchanged(card) for card in cards]
    return [*served, *changed.values()]


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
    version = started(client, "/admin/models", {"model": name, "directory": directory, "load": False}, directory)
    return wait_for(client, name, version, wait, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Load:
    """A model to load: its name, directory and settings, as texts by the name of a flag."""

    name: str
    directory: str
    settings: dict[str, str]


def load(client: Client, model: Load, wait: Wait, *, as_json: bool = False) -> int:
    """Loads a model beside those that are served, and waits until it serves or has failed. Returns an exit code."""
    body = {"model": model.name, "directory": model.directory, "settings": model.settings, "load": True}
    version = started(client, "/admin/models", body, model.directory)
    return wait_for(client, model.name, version, wait, as_json=as_json)


def unload(client: Client, name: str, wait: Wait, *, as_json: bool = False) -> int:
    """Withdraws a model from clients, and waits until its processes have ended. Returns 1 if they go on too long."""
    began, status = time.monotonic(), StatusLine()
    model = client.delete(f"/admin/models/{urllib.parse.quote(name)}")
    while (running := _running(model)) and (waited_s := time.monotonic() - began) <= wait.timeout_s:
        status.show(f"{name} gets no requests any more and ends those that it has: {waited_s:.0f} s")
        wait.sleep(POLL_S)
        found = client.get("/admin/models")["data"]
        model = next((one for one in found if one["id"] == name), {**model, "versions": []})
    status.clear()
    show(model, lines(model), as_json=as_json)
    if running:
        tell(f"{name} still has requests; `antiphon models list` tells when it has ended")
    return Exit.FAILED if running else Exit.OK


def _running(model: Model) -> bool:
    return any(one["state"] in ("starting", "ready") for one in model["versions"])


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
        rest = f"{name} is served as before" if model["active"] else f"{name} is not served"
        tell(f"version {number} could not start, and {rest}: {version['reason']}")
    elif version["state"] == "ended":
        tell(f"version {number} of {name} was ended: {version['reason']}")
    return Exit.OK if version["state"] == "ready" else Exit.FAILED


def pair(word: str) -> tuple[str, str]:
    """Returns name and directory of a word `NAME=DIR`. Raises SettingsError."""
    name, _, directory = word.partition("=")
    if not name or not directory:
        raise SettingsError(f"{word!r} is not NAME=DIR, a model's served name and the directory of its new version")
    return name, directory


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """Returns settings from words `FLAG=VALUE`, without the dashes of the flags. Raises SettingsError."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not name or not equals:
            raise SettingsError(f"--set: {word!r} is not FLAG=VALUE, such as max-model-len=4096")
        found[name] = value
    return found
