"""The benchmark of transfers of KV: every way moves all bytes between two processes."""

from bench import kv_transfer


def test_all_four_ways_are_measured_and_compared() -> None:
    results = kv_transfer.measure(rounds=1, num_blocks=3)
    assert all(rate > 0 for rate in results["gb_per_s"].values())
    assert set(results["gb_per_s"]) == set(results["cpu_s_per_gb"]) == set(kv_transfer.WAYS)
    assert set(results["share_of_plain"]) == {"KV over TCP", "KV shared"}
    text = kv_transfer.text(results)
    assert "% of plain TCP" in text
    assert "% of plain copy" in text


def test_the_shares_are_medians_of_the_rounds() -> None:
    found = {"plain copy": [10.0, 20.0, 10.0], "plain TCP": [2.0, 2.0, 2.0]}
    found |= {"KV over TCP": [1.0, 1.0, 2.0], "KV shared": [5.0, 4.0, 1.0]}
    assert kv_transfer.shares(found) == {"KV over TCP": 0.5, "KV shared": 0.2}
