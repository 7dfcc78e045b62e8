"""The times of a request's phases, as an answer shows them."""

from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.answers.timings import timings
from antiphon.services.gateway.path.generation import RequestTimes
from tests.unit.gateway.request_contexts import state, update


def accumulated(*counts: int, cached: int = 0) -> ChoiceAccumulator:
    """One choice for each count, with that many tokens."""
    accumulator = ChoiceAccumulator(1, len(counts))
    for index, count in enumerate(counts):
        accumulator.choices[index].add(update(token_ids=(1,) * count, num_cached_tokens=cached))
    return accumulator


def test_phases_follow_each_other_and_rates_are_tokens_per_second():
    assert timings(state(accumulated(5, 5, cached=1))) == {
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "decode_s": 4.0,
        "total_s": 8.0,
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "completion_tokens": 10,
        "prefill_tokens_per_s": 1.0,
        "decode_tokens_per_s": 2.0,
    }


def test_a_rate_without_anything_to_measure_is_null():
    shown = timings(state(accumulated(1, cached=3)))
    assert (shown["prefill_tokens_per_s"], shown["decode_tokens_per_s"]) == (None, None)


def test_a_request_whose_placement_is_not_known_has_no_time_in_the_queue():
    shown = timings(state(accumulated(2), RequestTimes()))
    assert (shown["queue_s"], shown["prefill_s"]) == (0.0, 3.0)
