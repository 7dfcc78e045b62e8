"""Invariants of a running system, checked on consecutive answers of `GET /admin/topology`; `antiphon watch`.

Each breach is reported as one line. The checks are pure, and are also made at the end of `antiphon chaos`.
"""

import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from antiphon.client import Client, ServerError
from antiphon.shared import limits
from antiphon.terminal.output import StatusLine, in_json_line, styled, tell

OWNERLESS_S = limits.ORPHAN_S + 1.0
"""Time in seconds without any request after which remaining work counts as work without an owner."""
ONCE_S = OWNERLESS_S + 1.0
"""Duration of `antiphon watch --once`, seconds: work without an owner is detected after `OWNERLESS_S`."""
Topology = dict[str, Any]
Member = dict[str, Any]
COUNTERS = {
    "engine": (
        "step",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "preemptions",
        "cached_tokens",
    ),
    "detokenizer": ("text_events", "resends"),
    "tokenizer": ("num_requests", "num_tokens"),
    "gateway": ("accepted_requests", "ended_requests"),
}
"""Fields of a member's load that never decrease while the process lives."""
REPLY_S = 0.5
"""Tolerance for the age of a heartbeat in seconds: a busy gateway reports the age late."""


class Invariants:
    """Checks answers of one system in the order in which they were asked for."""

    def __init__(self) -> None:
        self._before: Topology | None = None
        self._no_requests_since_s: float | None = None

    @property
    def is_new(self) -> bool:
        """Whether nothing was checked yet."""
        return self._before is None

    def check(self, now: Topology) -> list[str]:
        """Returns every breach in this answer, compared with the previous one."""
        found = list(missing_services(now))
        earlier = {one["instance_id"]: one for one in (self._before or {"members": []})["members"]}
        for one in now["members"]:
            old = earlier.get(one["instance_id"])
            # Gateways answer in turn, and this gateway may have an older heartbeat than the one that answered before.
            old = (
                old if old is not None and old.get("heartbeat_sequence", 0) < one.get("heartbeat_sequence", 1) else None
            )
            found += _heartbeat(one)
            if one["service"] == "engine":
                found += _blocks(one, old)
            if one["service"] == "gateway":
                found += _requests(one)
            if old is not None:
                found += _counters(old, one)
        found += self._ownerless(now)
        self._before = now
        return found

    def _ownerless(self, now: Topology) -> Iterator[str]:
        """Yields processes that still have work although no gateway has had a request for `OWNERLESS_S`."""
        if any(_work(one) for one in now["members"] if one["service"] == "gateway"):
            self._no_requests_since_s = None
            return
        if self._no_requests_since_s is None:
            self._no_requests_since_s = now["now_s"]
        quiet_s = now["now_s"] - self._no_requests_since_s
        for one in now["members"]:
            if quiet_s > OWNERLESS_S and _work(one):
                yield f"{one['id']}: has {_work(one)} sequences, and no gateway had a request for {quiet_s:.1f} s"


def missing_services(now: Topology) -> Iterator[str]:
    """Yields the services of which no member is ready."""
    ready = {one["service"] for one in now["members"] if one["state"] == "ready"}
    for service in ("gateway", "tokenizer", "engine", "detokenizer"):
        if service not in ready:
            yield f"{service}: no process is ready"


def is_idle(now: Topology) -> bool:
    """Whether no request, sequence or stream is in progress."""
    return not any(_work(one) for one in now["members"])


def _work(one: Member) -> int:
    load = one["load"]
    match one["service"]:
        case "engine":
            return load["num_running"] + load["num_waiting"]
        case "gateway":
            return load["num_requests"]
        case "detokenizer":
            return load["num_streams"]
        case _:
            return 0


def _heartbeat(one: Member) -> Iterator[str]:
    lease_s = max(limits.LEASE_S, limits.LEASE_INTERVALS * one["heartbeat_interval_s"]) + REPLY_S
    if one["heartbeat_age_s"] > lease_s:
        yield f"{one['id']}: its last heartbeat is {one['heartbeat_age_s']:.2f} s old, more than its lease"
    if one["state"] == "stalled":
        yield f"{one['id']}: its work stands still"


def _blocks(one: Member, old: Member | None) -> Iterator[str]:
    load = one["load"]
    free, total = load["num_free_blocks"], load["num_blocks"]
    if not 0 <= free <= total:
        yield f"{one['id']}: {free} of {total} KV blocks are free"
    if old is not None and old["load"]["num_blocks"] != total:
        yield f"{one['id']}: it had {old['load']['num_blocks']} KV blocks and has {total}"
    idle = not _work(one) and old is not None and not _work(old) and old["load"]["step"] == load["step"]
    # A prefill engine keeps blocks for a while after its sequences have ended, because other engines fetch them.
    if idle and free != total and load["role"] != "prefill":
        yield f"{one['id']}: idle, but only {free} of {total} KV blocks are free"


def _requests(one: Member) -> Iterator[str]:
    load = one["load"]
    accepted, ended, live = load["accepted_requests"], load["ended_requests"], load["num_requests"]
    if accepted != ended + live:
        yield f"{one['id']}: {accepted} requests accepted, but {ended} ended and {live} in progress"


def _counters(old: Member, one: Member) -> Iterator[str]:
    for name in COUNTERS[one["service"]]:
        before, now = old["load"].get(name, 0), one["load"].get(name, 0)
        if now < before:
            yield f"{one['id']}: the counter {name} fell from {before} to {now}"


def watch(client: Client, *, interval_s: float, once: bool, as_json: bool = False) -> int:
    """Polls every `interval_s` until Ctrl-C, or for `ONCE_S`. Returns 1 if `once` and there was a breach, else 0.

    Prints each breach. While all is well, a terminal shows a status line. `as_json`: each look is a line with a JSON
    object.
    """
    invariants, status = Invariants(), StatusLine()
    if not once and not as_json:
        tell(f"looks every {interval_s:g} s, and prints a line for each breach")
    began, found, looks = time.monotonic(), 0, 0
    while True:
        breaches, num_processes = _look(client, invariants)
        looks += 1
        found += len(breaches)
        clock = time.strftime("%H:%M:%S")
        status.clear()
        if as_json:
            print(in_json_line({"time": clock, "processes": num_processes, "breaches": breaches}), flush=True)
        else:
            for breach in breaches:
                print(f"{clock}  {styled(breach, 'red')}", flush=True)
        status.show(f"{clock}  look {looks}: {num_processes} processes, {found} breaches so far; Ctrl-C ends")
        if once and time.monotonic() - began >= ONCE_S:
            status.clear()
            if not as_json:
                print(
                    f"{found} breaches in {looks} looks" if found else f"nothing is wrong ({looks} looks)", flush=True
                )
            return 1 if found else 0
        time.sleep(interval_s)


def _look(client: Client, invariants: Invariants) -> tuple[list[str], int]:
    """Returns the breaches and the number of processes."""
    try:
        topology = client.get("/admin/topology")
    except ServerError as error:
        # A refusal, such as of the API key, will not change; and a first look must find a server.
        if 0 < error.status < HTTPStatus.INTERNAL_SERVER_ERROR or invariants.is_new:
            raise
        return [f"the server does not answer: {error}"], 0
    return invariants.check(topology), len(topology["members"])
