"""What a client got, beside what it should have got."""

import pytest

from antiphon.chaos.streams import Difference, compare

KNOWN = list(range(100, 140))


def test_equal_answers_do_not_differ():
    assert not compare(KNOWN, KNOWN)
    assert not compare([], [])


@pytest.mark.parametrize("begin", [0, 1, 17, 36, 39])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_tokens_that_are_missing_are_lost(begin: int, count: int):
    got = KNOWN[:begin] + KNOWN[begin + count :]
    assert compare(KNOWN, got) == Difference(lost=len(KNOWN) - len(got))


@pytest.mark.parametrize("begin", [0, 5, 30, 39])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_tokens_that_come_again_are_repeated(begin: int, count: int):
    again = KNOWN[begin : begin + count]
    assert compare(KNOWN, KNOWN[: begin + len(again)] + KNOWN[begin:]) == Difference(repeated=len(again))


def test_losses_and_repetitions_add_up():
    assert compare(KNOWN, KNOWN[:10] + KNOWN[12:30] + KNOWN[25:]) == Difference(lost=2, repeated=5)


@pytest.mark.parametrize("at", [0, 20, 39])
def test_other_tokens_differ(at: int):
    got = [*KNOWN]
    got[at] = 7
    assert compare(KNOWN, got).differing
