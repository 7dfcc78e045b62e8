"""What `make overload` computes from its answers."""

import itertools
import math
import statistics

import pytest

from antiphon.benchmark.load import arrivals
from bench.overload import Answer, Load, quantile


def test_arrivals_are_those_of_a_poisson_process():
    found = arrivals(10_000, 50.0, seed=1)
    assert found[-1] == pytest.approx(200.0, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.1)
    assert found == arrivals(10_000, 50.0, seed=1) != arrivals(10_000, 50.0, seed=2)


def test_only_answers_that_come_during_the_load_count():
    load = Load(10.0, [Answer(1.0, 2.0, 200), Answer(9.0, 2.0, 200), Answer(2.0, 0.01, 503, 1000), Answer(3.0, 1.0, 0)])
    assert load.goodput == 0.1
    assert (len(load.good), len(load.refused)) == (2, 1)


def test_the_told_time_is_compared_with_the_wait_of_requests_that_arrived_near():
    good = [Answer(0.0, 1.0, 200), Answer(5.0, 5.0, 200), Answer(5.2, 5.0, 200)]
    load = Load(10.0, [*good, Answer(5.1, 0.01, 503, 6000), Answer(8.0, 0.01, 503, 6000)])
    assert load.told_over_true() == [1.5]


def test_quantiles_are_those_of_the_values():
    assert (quantile([3.0, 1.0, 2.0], 0.5), quantile([3.0, 1.0, 2.0], 0.99)) == (2.0, 3.0)
    assert math.isnan(quantile([], 0.5))
