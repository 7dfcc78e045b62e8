"""What records cost: the order of the runs, and the figures of pairs."""

from antiphon.services.gateway.apis.openai.serving import RESUMABLE
from bench.reliability.record_cost import ASKING, GOALS_PERCENT, Run, flags, order, summary


def test_the_side_that_runs_first_alternates():
    assert list(order(3)) == [(0, "on"), (0, "off"), (1, "off"), (1, "on"), (2, "on"), (2, "off")]


def test_the_figures_are_medians_over_pairs():
    on = [Run(99.0, {"gateway": 11.0, "engine": 91.0}, 0.5), Run(50.0, {"gateway": 11.0, "engine": 90.0}, 1.5)]
    off = [Run(100.0, {"gateway": 10.0, "engine": 90.0}, 0.5), Run(50.0, {"gateway": 10.0, "engine": 90.0}, 1.5)]
    found = summary(4, [*on, on[0]], [*off, off[0]])
    assert (found["pairs"], found["ratio"], found["cost_percent"], found["cpu_cost_percent"]) == (3, 0.99, 1.0, 2.0)
    assert found["on_cpu_us_per_token"] == {"engine": 91.0, "gateway": 11.0, "all": 102.0}
    assert found["cost_percent_quartiles"] == [0.0, 1.0]
    assert found["foreign_cores"] == 0.5


def test_flags_of_each_kind_of_record() -> None:
    assert len({tuple(flags(kind, "/kept")) for kind in GOALS_PERCENT}) == len(GOALS_PERCENT)
    assert flags("streams-in-files", "/kept") == ["--stream-store=file", "--bus-directory=/kept"]


def test_the_header_of_the_benchmark_asks_for_a_stream_that_can_be_resumed() -> None:
    assert [name.lower() for name in ASKING] == [RESUMABLE]
