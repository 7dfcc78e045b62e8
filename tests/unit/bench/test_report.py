"""Medians, ratios within rounds, and tables."""

from dataclasses import replace

import pytest

from bench.harness import report
from bench.harness.sample import Sample, percentile, spread
from bench.limits_of_machine.cpu_accounting import Cpu


def sample(round: int, server: str, wall_s: float, load: str = "c1", foreign: float = 0.0) -> Sample:
    cpu = Cpu(client=0.1, parts={server: 1.5, "other": 0.25}, foreign=foreign)
    return Sample(round, load, server, 7, wall_s, 1.0, 1.2, 0.6 + 0.2 * round, 100, 60, cpu, ttft_ms_p50=10.0 * wall_s)


SAMPLES = [
    sample(0, "ours", 2.0), sample(0, "peer", 4.0),
    sample(1, "peer", 30.0), sample(1, "ours", 10.0),
    sample(2, "ours", 3.0), sample(2, "peer", 3.0, foreign=0.2),
    sample(3, "ours", 1.0),
]  # fmt: skip


def test_a_ratio_is_taken_within_rounds() -> None:
    # 2, 3 and 1 in the rounds that have both; of the medians over all rounds it would be 1.6.
    assert report.ratio(SAMPLES, "c1", "ours", "peer") == pytest.approx(2.0)
    assert report.ratio(SAMPLES, "c8", "ours", "peer") is None


def test_a_ratio_of_shares_leaves_out_that_one_had_the_better_moments() -> None:
    even = [sample(0, "ours", 2.0), replace(sample(0, "peer", 4.0), own_floor_s=1.2)]
    assert report.ratio(even, "c1", "ours", "peer") == pytest.approx(2.0)
    assert report.summary(even, "ours")[1]["ours_over_it_in_moments"] == pytest.approx(1.0)


def test_the_summary_has_a_record_for_each_load_and_server_in_order() -> None:
    records = report.summary([*SAMPLES, sample(0, "ours", 1.0, load="c8")], ours="ours")
    assert [(r["load"], r["server"]) for r in records] == [("c1", "ours"), ("c1", "peer"), ("c8", "ours")]
    ours, peer = records[:2]
    assert ours["rounds"] == 4
    assert ours["output_tok_per_s"] == pytest.approx((60 / 2 + 60 / 3) / 2)
    assert ours["share_of_floor"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert report.floor_shares(ours) == "32% / 42% / 50%"
    assert ours["ours_over_it"] is None
    assert peer["ours_over_it"] == pytest.approx(2.0)
    assert ours["ours_over_it_in_moments"] is None
    assert peer["noisy"] == 1
    assert peer["server_cores"] == pytest.approx(1.75)
    assert ours["part_cores"] == {"other": 0.25, "ours": 1.5}


def test_a_record_of_a_sample_has_the_rates() -> None:
    record = SAMPLES[0].record()
    assert (record["output_tok_per_s"], record["total_tok_per_s"], record["share_of_floor"]) == (30.0, 80.0, 0.5)
    assert record["cpu"]["parts"] == {"ours": 1.5, "other": 0.25}


def test_percentiles_lie_between_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile([], 0.5) == 0.0
    assert spread([1.0, 2.0, 4.0]) == 1.5


def test_tables_say_what_was_noisy_and_what_is_not_known() -> None:
    lines = report.loads_table(report.summary(SAMPLES, "ours")).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "–" in lines[2]
    assert lines[3].rstrip(" |").endswith("0.00*")


def test_the_limits_are_a_median_and_a_range() -> None:
    turns = [
        {"read_model_gb_s": v, "read_large_gb_s": 1.0, "read_sum_gb_s": 1.0, "gemm_gflop_s": 2.0}
        for v in (3.0, 9.0, 4.0)
    ]
    assert [cell.strip() for cell in report.limits_table(turns).splitlines()[2].split("|")[2:5]] == [
        "4.0",
        "3.0",
        "9.0",
    ]
