"""The invariants of a live system, on answers of `GET /admin/topology`: right ones and each way to be wrong."""

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from antiphon.inspect.invariants import OWNERLESS_S, Invariants, is_idle
from antiphon.services.gateway.ops.console.topology import TopologyEndpoint
from antiphon.services.gateway.path.liveness.changes import MemberChanges
from antiphon.shared.clock import SystemClock
from antiphon.shared.messages import GatewayStatus, Heartbeat, PoolStatus, StreamStatus
from tests.support.heartbeats import engine_status, heartbeat

STATUSES = {
    "gateway": GatewayStatus(accepted_requests=9, ended_requests=9),
    "tokenizer": PoolStatus(num_requests=9, num_tokens=90),
    "engine": engine_status(num_blocks=40, num_free_blocks=40, step=70, generation_tokens=50),
    "detokenizer": StreamStatus(text_events=40),
}


async def _topology(beats: list[Heartbeat]) -> dict[str, Any]:
    from starlette.requests import Request

    request = Request({"type": "http", "query_string": b"", "headers": []})
    endpoint = TopologyEndpoint(lambda: [(beat, 0.1) for beat in beats], MemberChanges(SystemClock()))
    response = await endpoint.topology(request)
    return msgspec.json.decode(response.body)


@pytest.fixture
async def good() -> dict[str, Any]:
    """What a gateway answers about an idle system."""
    beats = [
        heartbeat(service, f"{service}-1", f"i-{service}", status, sequence=5, interval_s=0.15)  # pyright: ignore[reportArgumentType]
        for service, status in STATUSES.items()
    ]
    return await _topology(beats)


def _later(topology: dict[str, Any], seconds: float = 1.0) -> dict[str, Any]:
    later = copy.deepcopy(topology)
    later["now_s"] += seconds
    for one in later["members"]:
        one["heartbeat_sequence"] += 5
    return later


def _member(topology: dict[str, Any], service: str) -> dict[str, Any]:
    return next(one for one in topology["members"] if one["service"] == service)


def test_an_idle_system_has_no_breach(good: dict[str, Any]):
    invariants = Invariants()
    assert is_idle(good)
    for count in range(12):
        assert invariants.check(_later(good, count)) == []


BREACHES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "service": (lambda now: now["members"].remove(_member(now, "tokenizer")), "no process is ready"),
    "heartbeat": (lambda now: _member(now, "engine").update(heartbeat_age_s=2.0), "more than its lease"),
    "stalled": (lambda now: _member(now, "engine").update(state="stalled"), "stands still"),
    "leak": (lambda now: _member(now, "engine")["load"].update(num_free_blocks=39), "idle, but only 39 of 40"),
    "too many": (lambda now: _member(now, "engine")["load"].update(num_free_blocks=41), "41 of 40"),
    "pool": (lambda now: _member(now, "engine")["load"].update(num_blocks=50, num_free_blocks=50), "had 40 KV blocks"),
    "counter": (lambda now: _member(now, "engine")["load"].update(generation_tokens=49), "fell from 50 to 49"),
    "accounts": (lambda now: _member(now, "gateway")["load"].update(accepted_requests=10), "10 requests accepted"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_each_breach_is_found(good: dict[str, Any], name: str):
    change, text = BREACHES[name]
    invariants, now = Invariants(), _later(good)
    assert invariants.check(good) == []
    change(now)
    found = invariants.check(now)
    assert any(text in line for line in found), found


def test_work_that_no_gateway_knows_is_found_after_a_while(good: dict[str, Any]):
    invariants = Invariants()
    for service, field in (("engine", "num_running"), ("detokenizer", "num_streams")):
        _member(good, service)["load"][field] = 2
    assert invariants.check(good) == []
    assert invariants.check(_later(good, OWNERLESS_S - 0.5)) == []
    assert len(invariants.check(_later(good, OWNERLESS_S + 0.5))) == 2


def test_an_older_heartbeat_of_another_gateway_is_no_breach(good: dict[str, Any]):
    invariants = Invariants()
    invariants.check(_later(good))
    _member(good, "engine")["load"].update(generation_tokens=49, step=69)
    assert invariants.check(good) == []


def test_a_restarted_process_counts_from_zero(good: dict[str, Any]):
    invariants = Invariants()
    invariants.check(good)
    now = _later(good)
    _member(now, "engine").update(instance_id="other")
    _member(now, "engine")["load"].update(generation_tokens=0, step=0)
    assert invariants.check(now) == []
