"""The history of a gateway: the ring of points, rates of counters, quantiles of histograms, and what a point has."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.edge.metrics import FIRST_TOKEN_BOUNDS_S, GatewayMetrics
from antiphon.services.gateway.ops.history.differences import Distribution, Rates, Seen
from antiphon.services.gateway.ops.history.guest import History
from antiphon.services.gateway.ops.history.points import Points
from antiphon.services.gateway.path.liveness.changes import MemberChanges
from antiphon.shared import limits
from antiphon.shared.messages import GatewayStatus, Heartbeat, HistogramCounts
from tests.support.heartbeats import engine_status, heartbeat

CAPACITY = 5


class HeldClock:
    """Stands where it is put; the Unix time is 1,000 s later."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int((1000 + self.now) * 1e9)


# --- points -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 17), st.integers(-1, 20))
def test_the_ring_has_the_latest_points_in_order_whatever_its_position(added: int, since: int):
    points = Points(["a"], ["b"], capacity=CAPACITY, groups_max=2)
    for number in range(added):
        points.add(float(number), {"a": number + 0.5}, {"one": {"b": -number}})
    times, series, groups = points.since(float(since))
    expected = [float(number) for number in range(max(0, added - CAPACITY), added) if number > since]
    assert times == expected
    assert series == {"a": [one + 0.5 for one in expected]}
    assert groups == ({"one": {"b": [-one for one in expected]}} if added else {})


def test_what_was_not_measured_is_not_a_number_and_columns_of_new_groups_begin_so():
    points = Points(["a"], ["b"], capacity=CAPACITY, groups_max=2)
    points.add(1.0, {"a": None}, {})
    points.add(2.0, {"a": 3.0}, {"late": {"b": 1.0}})
    points.add(3.0, {"a": 3.0}, {})
    _, series, groups = points.since(0.0)
    assert math.isnan(series["a"][0])
    assert series["a"][1:] == [3.0, 3.0]
    assert [math.isnan(one) for one in groups["late"]["b"]] == [True, False, True]


def test_the_groups_gone_longest_give_way():
    points = Points([], ["b"], capacity=CAPACITY, groups_max=2)
    points.add(1.0, {}, {"gone": {}, "stays": {}})
    points.add(2.0, {}, {"stays": {}})
    points.add(3.0, {}, {"stays": {}, "new": {}})
    assert set(points.since(0.0)[2]) == {"stays", "new"}
    points.add(4.0, {}, {"stays": {}, "new": {}, "beyond": {}})
    assert set(points.since(0.0)[2]) == {"stays", "new"}


# --- differences ------------------------------------------------------------------------------------------------------


def test_a_rate_is_the_difference_over_the_time_between_two_heartbeats():
    rates = Rates()
    assert rates.of({"e": Seen("i", 10.0, {"tokens": 100})}) == {}
    assert rates.of({"e": Seen("i", 12.0, {"tokens": 150})}) == {"e": {"tokens": 25.0}}
    assert rates.of({"e": Seen("i", 12.0, {"tokens": 150})}) == {}, "no heartbeat since: nothing is known"


def test_counters_of_a_new_process_begin_with_zero_and_never_go_backwards():
    rates = Rates()
    rates.of({"e": Seen("first", 10.0, {"tokens": 1000})})
    assert rates.of({"e": Seen("second", 12.0, {"tokens": 40})}) == {"e": {"tokens": 20.0}}
    assert rates.of({"e": Seen("second", 14.0, {"tokens": 30})}) == {"e": {"tokens": 0.0}}


def test_a_quantile_is_interpolated_in_its_bucket():
    found = Distribution([1.0, 2.0, 4.0])
    found.add(HistogramCounts((0, 10, 10, 0), 40.0))
    assert found.mean() == 2.0
    assert found.quantile(0.25) == 1.5
    assert found.quantile(0.5) == 2.0
    assert found.quantile(0.95) == pytest.approx(2.0 + 2.0 * 9 / 10)
    found.add(HistogramCounts((4, 10, 10, 0), 42.0))
    assert found.quantile(0.5) == 0.5, "only what came since"
    assert found.mean() == 0.5
    found.add(HistogramCounts((4, 10, 10, 3), 342.0))
    assert found.quantile(0.95) == 4.0, "above all bounds: the last bound"
    found.add(HistogramCounts((4, 10, 10, 3), 342.0))
    assert (found.mean(), found.quantile(0.95)) == (None, None)


def test_the_bounds_and_counts_of_the_metrics_fit_together():
    metrics = GatewayMetrics()
    for model, seconds in (("a", 0.002), ("b", 0.3), ("b", 9999.0)):
        metrics.first_token.labels(model).observe(seconds)
        metrics.tokens.models[model].gaps_s.observe(seconds)
    counts = metrics.first_token_counts()
    assert len(counts.counts) == len(FIRST_TOKEN_BOUNDS_S) + 1
    assert [index for index, count in enumerate(counts.counts) if count] == [
        FIRST_TOKEN_BOUNDS_S.index(0.005),
        FIRST_TOKEN_BOUNDS_S.index(0.5),
        len(FIRST_TOKEN_BOUNDS_S),
    ]
    assert counts.sum == pytest.approx(9999.302)
    assert sum(metrics.tokens.gap_counts().counts) == 3


# --- the gateway's history --------------------------------------------------------------------------------------------


class Server:
    """What a gateway hears of an engine and of two gateways."""

    def __init__(self) -> None:
        self.clock = HeldClock()
        self.members: list[tuple[Heartbeat, float]] = []
        self.changes = MemberChanges(self.clock)
        self.metrics = GatewayMetrics()
        self.history = History(self.clock, lambda: self.members, self.changes)
        self.history.follow(self.metrics)

    def step(self, accepted: int, **engine: Any) -> None:
        self.clock.now += limits.HISTORY_INTERVAL_S
        gateway = GatewayStatus(accepted_requests=accepted, num_waiting=1, errors=accepted)
        self.members = [
            (heartbeat("gateway", "g-1", "i", gateway), 0.0),
            (heartbeat("gateway", "g-2", "i", gateway), 0.0),
            (heartbeat("engine", "e-1", "i", engine_status(**engine)), 0.0),
        ]
        self.history.tick()


def test_a_point_has_rates_of_the_whole_server_and_of_each_engine():
    server = Server()
    server.step(0)
    server.step(
        2,
        num_free_blocks=75,
        num_running=3,
        num_waiting=2,
        generation_tokens=50,
        step=10,
        prefix_cache_queries=8,
        prefix_cache_hits=6,
    )
    server.metrics.first_token.labels("toy").observe(0.03)
    server.step(2, num_free_blocks=75, generation_tokens=50, step=10, prefix_cache_queries=8, prefix_cache_hits=6)
    found = server.history.since(0.0)
    assert found["time"] == [1002.0, 1004.0, 1006.0]
    assert found["now"] == 1006.0
    series, engine = found["series"], found["engines"]["e-1"]
    assert series["requests_per_s"][1:] == [2.0, 0.0], "of both gateways"
    assert series["generated_tokens_per_s"][1:] == engine["generated_tokens_per_s"][1:] == [25.0, 0.0]
    assert math.isnan(series["generated_tokens_per_s"][0])
    assert (series["running"][1], series["waiting"][1]) == (3, 4)
    assert (engine["used_blocks"][1], engine["free_blocks"][1], series["kv_cache_share"][1]) == (25, 75, 0.25)
    assert engine["prefix_hit_share"][1] == 0.75
    assert math.isnan(engine["prefix_hit_share"][2])
    assert math.isnan(series["ttft_mean_s"][1])
    assert series["ttft_mean_s"][2] == 0.03
    assert 0.02 < series["ttft_p95_s"][2] <= 0.04
    assert server.history.since(1004.0)["time"] == [1006.0]


def test_no_point_is_added_before_it_is_due():
    server = Server()
    server.step(0)
    for _ in range(10):
        server.history.tick()
    assert len(server.history.since(0.0)["time"]) == 1


def test_the_history_is_bounded_by_an_hour():
    server = Server()
    for _ in range(limits.HISTORY_POINTS + 3):
        server.step(0)
    times = server.history.since(0.0)["time"]
    assert len(times) == limits.HISTORY_POINTS
    assert times[-1] - times[0] == pytest.approx(3600 - limits.HISTORY_INTERVAL_S)


# --- changes of the members -------------------------------------------------------------------------------------------


def engine_beat(instance: str, sequence: int = 1, state: Any = "ready") -> Heartbeat:
    return heartbeat("engine", "e-1", instance, engine_status(), sequence=sequence, interval_s=0.15, state=state)


def test_a_lost_member_that_comes_back_is_told_twice_and_one_that_drains_is_not_lost():
    clock = HeldClock()
    changes = MemberChanges(clock)
    first = engine_beat("first")
    assert not changes.observe(first, None)
    clock.now = 5.0
    changes.lost(first, "its process has ended")
    clock.now = 8.0
    second = engine_beat("second")
    assert changes.observe(second, None)
    changes.observe(draining := engine_beat("second", 2, "draining"), second)
    changes.observe(engine_beat("second", 3, "draining"), draining)
    changes.lost(draining, "it has sent nothing")
    assert [(one.kind, one.at_s) for one in changes.events] == [
        ("joined", 0.0), ("lost", 5.0), ("joined", 8.0), ("draining", 8.0),
    ]  # fmt: skip
    [lost] = changes.recently_lost()
    assert (lost.id, lost.instance_id, lost.reason) == ("e-1", "first", "its process has ended")
    clock.now = 5.0 + limits.LOST_MEMBERS_S + 1
    assert changes.recently_lost() == []


def test_members_that_ran_before_the_gateway_have_not_joined():
    changes = MemberChanges(HeldClock())
    changes.observe(engine_beat("old", 4000), None)
    assert not changes.events


def test_lost_members_are_bounded_and_the_newest_come_first():
    clock = HeldClock()
    changes = MemberChanges(clock)
    for number in range(limits.LOST_MEMBERS_MAX + 5):
        clock.now = float(number)
        changes.lost(engine_beat(str(number)), "gone")
    found = changes.recently_lost()
    assert len(found) == limits.LOST_MEMBERS_MAX
    assert found[0].instance_id == str(limits.LOST_MEMBERS_MAX + 4)
