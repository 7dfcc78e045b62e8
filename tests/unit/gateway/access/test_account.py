"""The arithmetic of a key's limits: no mix of gateways, clocks and returns gives more than the limit allows."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.edge.access.account import (
    SKEW_S,
    Account,
    Amounts,
    Need,
    exchange,
    full,
    refilled,
    seconds_until_full,
)
from antiphon.shared import limits
from antiphon.shared.security.api_keys import ApiKey

KEY = ApiKey(name="k", requests_per_minute=60, tokens_per_minute=6000, concurrent_requests=3)
NOTHING = Amounts()


def test_a_need_is_met_with_a_share_for_a_second():
    account, grant = exchange(full(KEY, 0.0), KEY, 0.0, "a", NOTHING, 0, Need(Amounts(1, 500), 1))
    assert (grant.lacking, grant.amounts) == (None, Amounts(2, 600))
    assert (account.requests, account.tokens, account.held["a"].count) == (58, 5400, 1)


def test_a_bucket_fills_in_a_minute_and_not_beyond():
    empty = Account(0, -3000, 10.0, {})
    half = refilled(empty, KEY, 40.0)
    assert (half.requests, half.tokens) == (30, 0)
    assert refilled(empty, KEY, 1000.0).requests == 60
    assert seconds_until_full(empty, KEY) == Amounts(60, 90)


@pytest.mark.parametrize(
    ("level", "lacking", "wait_s"),
    [((0.25, 6000), "requests", 0.75), ((60, 100), "tokens", 4.0), ((0, 0), "tokens", 5.0)],
)
def test_the_limit_that_needs_longest_is_told_with_the_time_until_it_has_room(level, lacking, wait_s):
    requests, tokens = level
    account = Account(requests, tokens, 0.0, {})
    after, grant = exchange(account, KEY, 0.0, "a", NOTHING, 0, Need(Amounts(1, 500), 1))
    assert (grant.lacking, grant.amounts) == (lacking, NOTHING)
    assert grant.wait_s == pytest.approx(wait_s)
    assert (after.requests, after.tokens, after.held) == (*level, {})
    assert exchange(after, KEY, wait_s + 1e-6, "a", NOTHING, 0, Need(Amounts(1, 500), 1))[1].lacking is None


def test_requests_in_progress_count_at_all_gateways_until_one_is_silent():
    account, now = full(KEY, 0.0), 0.0
    for gateway, running in (("a", 0), ("a", 1), ("b", 0)):
        account, grant = exchange(account, KEY, now, gateway, NOTHING, running, Need(Amounts(1, 1), 1))
        assert grant.lacking is None
    assert exchange(account, KEY, now, "b", NOTHING, 1, Need(Amounts(1, 1), 1))[1].lacking == "concurrent"
    # Gateway a dies; b confirms its request in the meantime.
    account, _ = exchange(account, KEY, limits.QUOTA_HOLD_S - 1, "b", NOTHING, 1, None)
    assert exchange(account, KEY, limits.QUOTA_HOLD_S, "b", NOTHING, 1, Need(Amounts(1, 1), 1))[1].lacking is None
    account, _ = exchange(account, KEY, now, "b", NOTHING, 0, None)
    assert "b" not in account.held


def test_a_clock_far_ahead_does_not_stop_the_others():
    ahead = refilled(Account(0, 0, 0.0, {}), KEY, 3600.0)
    assert refilled(msgspec.structs.replace(ahead, requests=0), KEY, 10.0).at == 10.0
    near = Account(0, 0, 10.0 + SKEW_S, {})
    assert refilled(near, KEY, 10.0).at == 10.0 + SKEW_S


STEP = st.tuples(
    st.integers(0, 2),  # gateway
    st.floats(0, 5),  # time that passes
    st.floats(0, 2),  # error of the gateway's clock
    st.integers(1, 7000),  # estimated tokens
    st.floats(0, 1),  # share of them that is used
)


@given(st.lists(STEP, max_size=80))
def test_no_gateways_together_use_more_than_a_full_bucket_and_what_it_got(steps):
    account, now = full(KEY, 0.0), 0.0
    left = [NOTHING] * 3
    used = NOTHING
    for gateway, passed, skew, tokens, share in steps:
        now += passed
        need = Need(Amounts(1, min(tokens, KEY.tokens_per_minute)), 1)
        if not left[gateway].covers(need.amounts):
            account, grant = exchange(account, KEY, now + skew, str(gateway), left[gateway], 0, need)
            account = msgspec.structs.replace(account, held={})
            left[gateway] = grant.amounts
            if grant.lacking is not None:
                continue
        spent = Amounts(1, need.amounts.tokens * share)
        left[gateway] -= spent
        used += spent
    # Clocks that differ by up to 2 s may bring forward what the buckets get in this time.
    got = Amounts(KEY.requests_per_minute, KEY.tokens_per_minute) + Amounts((now + 2) * 1, (now + 2) * 100)
    assert used.requests <= got.requests + 1e-6
    assert used.tokens <= got.tokens + 1e-3
