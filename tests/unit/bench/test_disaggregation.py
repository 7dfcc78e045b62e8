"""The figures of the benchmark of prefill and decode apart."""

from bench import disaggregation
from bench.disaggregation import SERVERS, Measured


def test_the_ratio_is_that_of_the_99th_percentiles_apart_to_both_on_each_engine() -> None:
    both, apart = SERVERS
    found = {
        both: Measured([0.02] * 970 + [0.5] * 30, [0.6, 0.7, 0.8]),
        apart: Measured([0.03] * 995 + [0.1] * 5, [0.9]),
    }
    results = disaggregation.summary(found)
    assert results["servers"][both] == {"p50_ms": 20.0, "p99_ms": 500.0, "max_ms": 500.0, "first_ms": 700.0}
    assert results["servers"][apart] == {"p50_ms": 30.0, "p99_ms": 30.0, "max_ms": 100.0, "first_ms": 900.0}
    assert (results["p99_ratio"], results["goal"]) == (0.06, 0.5)
    told = disaggregation.text({**results, "streams": 8, "prompt": 192, "every_s": 1.2})
    assert "a prompt of 192 tokens every 1.2 s" in told
    assert "p99 apart / both: 0.06 (goal 0.5)" in told
