"""`antiphon top`: every process with its load, and the requests in progress, refreshed in the terminal."""

import sys
import time
from collections.abc import Iterator
from typing import Any

from antiphon.client import Client
from antiphon.terminal.output import in_json_line, styled
from antiphon.terminal.screen import Screen

REQUESTS_SHOWN = 15


def run(client: Client, *, interval_s: float, once: bool, as_json: bool = False) -> int:
    """Prints the services and their load every `interval_s` seconds until Ctrl-C, or a single time. Returns 0.

    On a terminal each look replaces the one before, on the terminal's second screen, and the key `q` ends it too.
    `as_json`: each look is a line with a JSON object.
    """
    if once or as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        return _print(client, interval_s, once=once, as_json=as_json)
    with Screen() as screen:
        before = client.get("/admin/topology")
        screen.draw(["Looking …"])
        while not screen.wait(interval_s):
            now, running = _look(client)
            screen.draw([*lines(before, now, running), "", styled("q or Ctrl-C ends", "dim")])
            before = now
    return 0


def _print(client: Client, interval_s: float, *, once: bool, as_json: bool) -> int:
    before = client.get("/admin/topology")
    while True:
        time.sleep(interval_s)
        now, running = _look(client)
        if as_json:
            print(in_json_line({**now, "requests": running}), flush=True)
        else:
            print("\n".join(lines(before, now, running)), flush=True)
        if once:
            return 0
        before = now


def _look(client: Client) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    now = client.get("/admin/topology")
    return now, client.get(f"/v1/requests?state=running&all=true&sort=slowest&limit={REQUESTS_SHOWN}")["data"]


def lines(before: dict[str, Any], now: dict[str, Any], running: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines for two answers of `GET /admin/topology` and the requests in progress."""
    elapsed_s = max(1e-6, now["now_s"] - before["now_s"])
    earlier = {one["instance_id"]: one for one in before["members"]}
    yield f"{'PROCESS':<24} {'STATE':<9} {'HEARTBEAT':>9} {'MSG/S':>8}  LOAD"
    for one in now["members"]:
        old = earlier.get(one["instance_id"], one)
        messages = (_messages(one) - _messages(old)) / elapsed_s
        age = f"{one['heartbeat_age_s']:.2f} s"
        yield f"{one['id']:<24} {one['state']:<9} {age:>9} {messages:>8.1f}  {_load(one, old, elapsed_s)}"
    yield ""
    yield f"{'REQUEST':<24} {'MODEL':<20} {'AGE':>9} {'PROMPT':>7} {'OUTPUT':>7}  PHASE"
    for one in running:
        age = f"{one['duration_s']:.2f} s"
        yield (
            f"{one['id']:<24} {one['model'][:20]:<20} {age:>9} {one['prompt_tokens']:>7} "
            f"{one['completion_tokens']:>7}  {one['longest_phase']}"
        )
    if not running:
        yield "(none in progress)"


def _messages(one: dict[str, Any]) -> int:
    return one["messages_received"] + one["messages_sent"]


def _load(one: dict[str, Any], old: dict[str, Any], elapsed_s: float) -> str:
    load = one["load"]
    match one["service"]:
        case "engine":
            tokens = (load["generation_tokens"] - old["load"]["generation_tokens"]) / elapsed_s
            used = 1 - load["num_free_blocks"] / load["num_blocks"] if load["num_blocks"] else 0.0
            return f"{load['num_running']} running, {load['num_waiting']} waiting, {tokens:.0f} tokens/s, KV {used:.0%}"
        case "gateway":
            return f"{load['num_requests']} requests, {load['num_waiting']} waiting"
        case "detokenizer":
            return f"{load['num_streams']} streams"
        case _:
            return f"{(load['num_tokens'] - old['load']['num_tokens']) / elapsed_s:.0f} tokens/s"
