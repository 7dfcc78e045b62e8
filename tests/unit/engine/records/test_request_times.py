"""The engine's histograms of waiting, prefill and decoding."""

from antiphon.services.engine.core.request import Outcome
from antiphon.services.engine.records.request_times import RequestTimes
from antiphon.services.engine.steps.loop import StepReport
from tests.unit.engine.records.test_step_recorder import Hand


def report(
    *tokens: str,
    joined: tuple[str, ...] = (),
    num_tokens: int = 4,
    seconds: float = 0.5,
    preempted: tuple[str, ...] = (),
) -> StepReport:
    outcomes = tuple(Outcome(sequence_id=name, position=0, token_ids=(1,)) for name in tokens)
    return StepReport(
        step=1,
        outcomes=outcomes,
        refused=(),
        joined=joined,
        num_tokens=num_tokens,
        started_ns=0,
        ended_ns=round(seconds * 1e9),
        preempted=preempted,
    )


def test_the_phases_of_a_sequence_are_counted_when_it_ends():
    clock = Hand()
    times = RequestTimes(clock)
    times.submitted("a#1")
    clock.now += 2.5  # 2 s in the queue, 0.5 s the first half of the prompt
    times.step(report(joined=("a#1",), num_tokens=64))
    clock.now += 0.5
    times.step(report("a#1", num_tokens=32))
    clock.now += 4
    times.step(report("a#1", num_tokens=1))
    times.ended("a#1")
    times.ended("a#1")
    found = times.histograms()
    assert (found.queue_s.sum, found.prefill_s.sum, found.decode_s.sum, found.inference_s.sum) == (2, 1, 4, 5)
    assert sum(found.queue_s.counts) == 1
    assert (found.step_tokens.sum, sum(found.step_tokens.counts)) == (97, 3)


def test_the_preemptions_of_each_sequence_are_counted_when_it_ends():
    times = RequestTimes(Hand())
    for name in ("a#1", "b#1"):
        times.submitted(name)
        times.step(report(name, joined=(name,)))
    for _ in range(2):
        times.step(report("b#1", preempted=("a#1", "gone")))
    for name in ("a#1", "b#1"):
        times.ended(name)
    found = times.histograms().preemptions
    assert (found.sum, found.counts[:4]) == (2, (1, 0, 1, 0))


def test_a_sequence_that_never_ran_or_went_elsewhere_is_not_counted():
    times = RequestTimes(Hand())
    for name in ("a#1", "b#1"):
        times.submitted(name)
    times.ended("a#1")
    times.forget("b#1")
    times.step(report("b#1", joined=("b#1",)))
    assert sum(times.histograms().queue_s.counts) == 0
