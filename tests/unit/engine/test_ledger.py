"""The engine's ledger: fencing by epoch, replay, stop strings, orphans."""

import pytest

from services.engine.ledger import Ledger, split
from shared import limits
from shared.messages import GatewayStatus, LiveRequest, Submit, TokenEvent, TokenLogprobs
from shared.sampling import SamplingParams


def submit(epoch: int = 1, request_id: str = "r-0") -> Submit:
    return Submit(request_id, epoch, "g", "boot", "sink", b"", SamplingParams())


def running(epoch: int = 1) -> Ledger:
    ledger = Ledger()
    ledger.enter(submit(epoch), 0, 0.0)
    return ledger


def test_a_submit_runs_once_for_each_epoch():
    ledger = running(2)
    assert ledger.judge(submit(2)) == "duplicate"
    assert ledger.judge(submit(1)) == "stale_epoch"
    assert ledger.judge(submit(3)) == "accepted"


def test_a_cancel_that_overtakes_its_submit_leaves_a_tombstone():
    ledger = Ledger()
    assert not ledger.bury("r-0", 1, 0.0)
    assert ledger.judge(submit(1)) == "tombstoned"
    assert ledger.judge(submit(2)) == "accepted"


def test_tombstones_expire():
    ledger = Ledger()
    ledger.bury("r-0", 1, 0.0)
    ledger.expire(limits.TOMBSTONE_S + 1, {})
    assert ledger.judge(submit(1)) == "accepted"


def test_tokens_can_be_replayed_from_any_position():
    ledger = running()
    for position in range(3):
        ledger.append(TokenEvent("r-0", 1, position, (position + 10,), "length" if position == 2 else None))
    entry = ledger.get("r-0", 1)
    assert entry is not None
    event = ledger.replay(entry, 1)
    assert event is not None
    assert (event.position, event.token_ids, event.finish_reason) == (1, (11, 12), "length")
    tail = ledger.replay(entry, 3)
    assert tail is not None
    assert (tail.position, tail.token_ids) == (3, ())


def test_carried_tokens_shift_positions():
    ledger = Ledger()
    ledger.enter(submit(), 5, 0.0)
    ledger.append(TokenEvent("r-0", 1, 5, (1,)))
    entry = ledger.get("r-0", 1)
    assert entry is not None
    event = ledger.replay(entry, 0)
    assert event is not None
    assert (event.position, event.token_ids, entry.high_water) == (5, (1,), 6)


def test_a_stop_string_ends_a_sequence_and_keeps_its_tokens():
    ledger = running()
    ledger.append(TokenEvent("r-0", 1, 0, (7,)))
    assert ledger.end_by_stop_string("r-0", 1)
    assert not ledger.end_by_stop_string("r-0", 1)
    assert ledger.append(TokenEvent("r-0", 1, 1, (8,))) is None
    assert ledger.num_live == 0
    assert ledger.marks()[0].finished


def test_what_a_living_gateway_no_longer_claims_is_an_orphan():
    ledger = running()
    heard = {("g", "boot"): 10.0}
    ledger.claim("g", "boot", GatewayStatus(1, (LiveRequest("r-0", 1),)), 10.0)
    assert ledger.expire(10.0, heard) == []
    heard["g", "boot"] = 10.0 + 3 * limits.LEASE_S
    assert [entry.request_id for entry in ledger.expire(heard["g", "boot"], heard)] == ["r-0"]


def test_what_a_silent_gateway_owned_is_an_orphan():
    ledger = running()
    heard = {("g", "boot"): 1.0}
    ledger.claim("g", "boot", GatewayStatus(1, (LiveRequest("r-0", 1),)), 1.0)
    assert ledger.expire(limits.ORPHAN_S, heard) == []
    assert len(ledger.expire(1.5 + limits.ORPHAN_S, heard)) == 1
    assert len(ledger.expire(1.5 + limits.ORPHAN_S, {})) == 1


def test_a_claim_of_another_incarnation_does_not_count():
    ledger = running()
    ledger.claim("g", "another", GatewayStatus(1, (LiveRequest("r-0", 1),)), 100.0)
    assert len(ledger.expire(2 * limits.ORPHAN_S, {("g", "another"): 100.0})) == 1


@pytest.mark.parametrize("count", [2, 3, 8])
def test_an_event_that_is_too_large_is_cut_between_tokens_and_says_the_same(count: int) -> None:
    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(1, count + 1))
    whole = TokenEvent("r", 1, 5, tuple(range(count)), "length", None, logprobs, 3, -100.0)
    halves = split((whole,))
    assert halves is not None
    (first,), (rest,) = halves
    assert first.position == 5
    assert rest.position == 5 + len(first.token_ids)
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert first.logprobs + rest.logprobs == whole.logprobs
    assert (first.finish_reason, rest.finish_reason) == (None, "length")
    assert first.cumulative_logprob + sum(each.logprob for each in rest.logprobs) == rest.cumulative_logprob == -100.0
    assert first.num_cached_tokens == rest.num_cached_tokens == 3


def test_several_events_are_cut_between_events_and_a_single_token_is_not() -> None:
    events = tuple(TokenEvent("r", 1, position, (7,)) for position in range(3))
    assert split(events) == (events[:1], events[1:])
    assert split(events[:1]) is None
