"""Which requests of a list are marked as slow, and with which phase."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.services.gateway.ops.timeline.slowness import (
    ALARM_MIN,
    OUTLIERS_MAX,
    mark_outliers,
    mark_slow,
    usual_token_s,
)

BUSY = Path(__file__).parents[2] / "golden" / "requests_of_a_busy_machine.json"
"""Requests that a small model answered on two processors. After 20, ten other programs began to compute all the time;
the last four came when these had ended."""


def request(decode_s: float = 0.3, tokens: int = 40, prompt: int = 4, **more: Any) -> dict[str, Any]:
    """A request whose phases all take their usual time, except those in `more`."""
    usual = {"admission": 0.002, "tokenization": 0.003, "gateway_queue": 0.0004, "engine_queue": 0.0004}
    usual |= {"prefill": 0.01, "decode": decode_s, "delivery": 0.002}
    phases = {**usual, **{name: value for name, value in more.items() if name in (*usual, "turn")}}
    phases |= {name: more[name] for name in ("move", "preemption") if name in more}
    facts = {name: value for name, value in more.items() if name not in phases}
    summary: dict[str, Any] = {"model": "toy", "state": "completed", "phases": phases, "created": 1000.0}
    summary |= {"prompt_tokens": prompt, "cached_tokens": 0, "completion_tokens": tokens}
    return summary | {"duration_s": sum(phases.values())} | facts


def marks(*requests: dict[str, Any]) -> list[str | None]:
    mark_slow(list(requests))
    return [one["slow"] and one["slow"]["phase"] for one in requests]


def test_a_request_with_one_long_phase_stands_out_with_its_name():
    slow = request(tokenization=2.4)
    assert marks(*[request() for _ in range(20)], slow) == [None] * 20 + ["tokenization"]
    assert slow["slow"] == {"phase": "tokenization", "duration_s": 2.4, "usual_s": 0.003, "excess_s": 2.397}


@pytest.mark.parametrize("phase", ["turn", "admission", "gateway_queue", "engine_queue", "prefill", "delivery"])
def test_every_phase_can_be_the_slow_one(phase: str):
    more: dict[str, Any] = {phase: 3.0}
    assert marks(*[request() for _ in range(ALARM_MIN)], request(**more))[-1] == phase


def test_of_several_slow_phases_the_longest_is_named_and_all_count():
    slow = request(gateway_queue=7.0, engine_queue=3.8)
    assert marks(*[request() for _ in range(ALARM_MIN)], slow)[-1] == "gateway_queue"
    assert slow["slow"]["excess_s"] == pytest.approx(10.8, abs=0.01)


def test_many_tokens_take_long_without_being_slow_and_few_can_be_slow():
    usual = [request(decode_s=0.005 * count, tokens=count) for count in 4 * (20, 40, 80, 40, 20, 80)]
    long, slow = request(decode_s=5.0, tokens=1000), request(decode_s=5.0, tokens=40)
    assert marks(*usual, long, slow) == [None] * 25 + ["decode"]
    prompt = request(prefill=2.0, prompt=1500)
    assert marks(*usual, prompt)[-1] is None
    assert marks(*usual, request(prefill=2.0, prompt=1500, cached_tokens=1490))[-1] == "prefill"


def test_short_times_and_small_shares_are_not_slow():
    usual = [request() for _ in range(ALARM_MIN)]
    assert marks(*usual, request(tokenization=0.45))[-1] is None, "less than half a second"
    assert marks(*usual, request(decode_s=20.0, tokens=3000, tokenization=2.0))[-1] is None, "a tenth of its time"
    assert marks(*[request(tokenization=1.0) for _ in range(ALARM_MIN)], request(tokenization=2.5))[-1] is None, (
        "not 3 times"
    )


def test_waiting_stays_slow_while_most_requests_wait():
    first = [request() for _ in range(ALARM_MIN)]
    waiting = [request(gateway_queue=2.0 + number) for number in range(16)]
    assert marks(*first, *waiting) == [None] * ALARM_MIN + ["gateway_queue"] * 16


def test_requests_in_progress_and_failed_ones_are_marked_but_do_not_tell_what_is_usual():
    running = [request(tokenization=9.0, state="running") for _ in range(20)]
    failed = request(gateway_queue=30.0, state="failed")
    found = marks(*[request() for _ in range(ALARM_MIN)], *running, failed)
    assert found == [None] * ALARM_MIN + ["tokenization"] * 20 + ["gateway_queue"]


def test_without_enough_finished_requests_of_the_model_nothing_is_usual():
    few = [request() for _ in range(ALARM_MIN - 2)]
    assert marks(*few, request(tokenization=5.0)) == [None] * (ALARM_MIN - 1)
    others = [request(model="other") for _ in range(20)]
    assert marks(*others, request(tokenization=5.0)) == [None] * 21
    assert marks() == []


@pytest.mark.parametrize("phase", ["move", "preemption"])
def test_a_move_or_a_preemption_within_the_output_is_named_with_its_own_time(phase: str):
    usual = [request() for _ in range(ALARM_MIN)]
    long: dict[str, Any] = {phase: 3.0}
    brief: dict[str, Any] = {phase: 0.6}
    slow = request(decode_s=2.0, tokens=260, **long)
    assert marks(*usual, slow)[-1] == phase
    assert (slow["slow"]["duration_s"], slow["slow"]["usual_s"]) == (3.0, 0.0)
    short = request(decode_s=14.0, tokens=2000, **brief)
    assert marks(*usual, short)[-1] is None, "a small share of the request"


# --- a busy machine ---------------------------------------------------------------------------------------------------


def at(created: float, **more: Any) -> dict[str, Any]:
    return request(created=created, **more)


def test_what_is_slow_for_all_at_the_same_time_is_no_alarm():
    before = [at(1000.0 + number) for number in range(40)]
    busy = [at(2000.0 + number, decode_s=4.0 + 0.1 * number, tokenization=0.9, prefill=1.2) for number in range(8)]
    assert marks(*before, *busy) == [None] * 48


def test_one_that_is_slow_beside_others_that_are_not_is_told():
    before = [at(1000.0 + number) for number in range(40)]
    beside = [at(2000.0 + number) for number in range(8)]
    assert marks(*before, *beside, at(2004.0, prefill=4.0)) == [None] * 48 + ["prefill"]


def test_one_that_is_far_slower_than_the_slow_ones_around_it_is_told():
    before = [at(1000.0 + number) for number in range(40)]
    busy = [at(2000.0 + number, prefill=1.2) for number in range(8)]
    assert marks(*before, *busy, at(2004.0, prefill=9.0)) == [None] * 48 + ["prefill"]


def test_times_that_always_vary_are_usual():
    varying = [at(100.0 * number, tokenization=0.01 + 0.2 * (number % 10)) for number in range(40)]
    assert marks(*varying) == [None] * 40
    assert marks(*varying, at(5000.0, tokenization=9.0))[-1] == "tokenization"


def test_requests_of_a_busy_machine_give_no_alarm_and_a_planted_one_does():
    recorded = json.loads(BUSY.read_text())
    found = marks(*recorded)
    [started] = [one for one, phase in zip(recorded, found, strict=True) if phase]
    assert started["slow"]["phase"] == "tokenization", "it waited for a process that its tokenizer started"
    assert started["created"] < 5, "before the machine was busy"
    planted = copy.deepcopy(recorded[-10])
    planted["phases"]["prefill"] += 6.0
    planted["duration_s"] += 6.0
    assert marks(*recorded, planted) == [*found, "prefill"]


# --- those that stand out ---------------------------------------------------------------------------------------------


def outliers(*requests: dict[str, Any]) -> list[bool]:
    mark_slow([*[request() for _ in range(ALARM_MIN)], *requests])
    mark_outliers(list(requests))
    return [one["slow"]["stands_out"] for one in requests]


def test_a_single_slow_request_stands_out():
    assert outliers(request(tokenization=2.4)) == [True]
    usual = request()
    mark_outliers([usual, {**usual, "slow": None}])
    assert "slow" not in usual


def test_of_many_slow_requests_only_those_that_lost_most_stand_out():
    assert outliers(*[request(gateway_queue=2.0**number) for number in range(1, 8)]) == [False] * 6 + [True]
    alike = outliers(*[request(gateway_queue=9.0 + 0.01 * number) for number in range(20)])
    assert alike == [False] * (20 - OUTLIERS_MAX) + [True] * OUTLIERS_MAX, "few stand out, however alike all are"


def test_of_requests_that_waited_equally_long_the_short_one_stands_out():
    long = [request(gateway_queue=9.0, decode_s=8.0, tokens=1000) for _ in range(6)]
    assert outliers(*long, request(gateway_queue=9.0, tokens=4, decode_s=0.03)) == [False] * 6 + [True]


def test_the_time_for_each_token_is_told_beside_the_usual_one():
    usual = [request(decode_s=0.005 * (tokens - 1), tokens=tokens) for tokens in (21, 41, 81, 41, 21, 81)]
    long, none = request(decode_s=4.9, tokens=80), request(tokens=1, decode_s=0.0)
    mark_slow([*usual, long, none])
    assert (long["token_s"], long["usual_token_s"]) == (pytest.approx(4.9 / 79, abs=1e-6), 0.005)
    assert none["token_s"] is None, "no token came after the first one"
    assert usual_token_s([*usual, long, none]) == 0.005
    assert usual_token_s(usual[:3]) is None
    few = [request(tokens=1, decode_s=0.0) for _ in range(ALARM_MIN)]
    mark_slow(few)
    assert few[0]["usual_token_s"] is None


def test_outputs_of_one_token_do_not_change_what_a_token_usually_takes():
    short = [request(tokens=1, decode_s=0.0) for _ in range(20)]
    usual = [request(decode_s=4.0, tokens=41) for _ in range(20)]
    assert marks(*short, *usual, request(decode_s=40.0, tokens=401))[-1] is None
