"""`antiphon models`: lists the versions of models, starts a new version, and returns to the former one."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from antiphon.client import Client
from antiphon.shared.flags import SettingsError

POLL_S = 0.1
FAILED, STILL_STARTING = 1, 2
"""Exit codes of `models set`: the version could not start; it is not ready after the timeout."""


def show(client: Client) -> int:
    """Prints the models with their versions."""
    versioned = {one["id"]: one for one in client.get("/admin/models")["data"]}
    for card in client.get("/v1/models")["data"]:
        if card.get("parent"):
            continue
        if card["id"] in versioned:
            print("\n".join(lines(versioned[card["id"]])))
        else:
            print(f"{card['id']}\n  version 1  active    {card['root']}")
    return 0


def lines(model: dict[str, Any]) -> Iterator[str]:
    """Yields the lines about one model of `GET /admin/models`."""
    yield model["id"]
    for one in model["versions"]:
        state = "active" if one["number"] == model["active"] else one["state"]
        if one["shadow_share"] and state == "ready":
            state = "shadow"
        reason = f"  ({one['reason']})" if one["reason"] else ""
        yield f"  version {one['number']}  {state:<8}  {one['directory']}{reason}"
        if (copies := one["copies"]) is not None:
            counts = ", ".join(f"{copies[result]} {result}" for result in ("equal", "different", "failed", "skipped"))
            last = copies["last_difference"]
            where = f"; the latest differed at position {last['position']}, request {last['request']}" if last else ""
            yield f"    copies of requests on the asked gateway: {counts}{where}"


def set_version(
    client: Client, name: str, directory: str, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Starts a version and waits until it serves or has failed, at most `timeout_s`. Returns an exit code."""
    version = started(client, "/admin/models", {"model": name, "directory": directory}, directory)
    return wait(client, name, version, timeout_s, sleep)


def shadow(
    client: Client,
    name: str,
    directory: str,
    share: float,
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Starts a version that computes copies of a share of the requests, and waits until it is ready or has failed."""
    body = {"model": name, "directory": directory, "share": share}
    return wait(client, name, started(client, "/admin/models/shadow", body, directory), timeout_s, sleep)


def end_shadow(client: Client, name: str) -> int:
    """Ends the version that computes copies of requests, and prints how many equalled the originals."""
    print("\n".join(lines(client.post("/admin/models/shadow", {"model": name}))))
    return 0


def roll_back(client: Client, name: str) -> int:
    """Returns to the former version. Raises SettingsError if it is no longer running."""
    found = client.post("/admin/models/rollback", {"model": name})
    print("\n".join(lines(found)))
    return 0


def started(client: Client, path: str, body: dict[str, Any], directory: str) -> int:
    """Orders the start of a version from a directory, and returns the version's number."""
    found = client.post(path, body)
    numbers = [one["number"] for one in found["versions"] if one["directory"] == directory]
    return max(numbers)


def wait(client: Client, name: str, number: int, timeout_s: float, sleep: Callable[[float], None]) -> int:
    """Waits until a version is ready or has failed, and prints the result."""
    deadline = time.monotonic() + timeout_s
    while True:
        model = next((one for one in client.get("/admin/models")["data"] if one["id"] == name), None)
        version = next((one for one in model["versions"] if one["number"] == number), None) if model else None
        if model is None or version is None:
            raise SettingsError(f"version {number} of {name} is not listed any more")
        if version["state"] != "starting":
            break
        if time.monotonic() > deadline:
            print(f"version {number} of {name} is still starting; `antiphon models list` tells when it serves")
            return STILL_STARTING
        sleep(POLL_S)
    print("\n".join(lines(model)))
    if version["state"] == "failed":
        print(f"version {number} could not start, and {name} is served as before: {version['reason']}")
        return FAILED
    return 0


def pair(word: str) -> tuple[str, str]:
    """Returns name and directory of a word `NAME=DIR`. Raises SettingsError."""
    name, _, directory = word.partition("=")
    if not name or not directory:
        raise SettingsError(f"{word!r} is not NAME=DIR, a model's served name and the directory of its new version")
    return name, directory
