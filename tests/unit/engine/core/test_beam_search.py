"""The rules of beam search on made-up log probabilities; `tests/model/test_beams.py` compares with transformers."""

import pytest

from antiphon.services.engine.core.beams.beam_search import BeamSearch, num_candidates
from antiphon.services.engine.core.plan import SampledLogprobs
from antiphon.services.engine.core.stopping import StopRules
from antiphon.shared.parameters.sampling import BeamParams

EOS = 2


def rules(max_tokens: int = 10, min_tokens: int = 0) -> StopRules:
    return StopRules(frozenset({EOS}), frozenset({9}), min_tokens, max_tokens)


def candidates(**logprobs: float) -> SampledLogprobs:
    """Candidates by token (`t7=-1.0`), best first."""
    ranked = sorted(logprobs.items(), key=lambda item: -item[1])
    return SampledLogprobs(0.0, tuple(int(name[1:]) for name, _ in ranked), tuple(value for _, value in ranked))


def running(search: BeamSearch) -> list[tuple[int, ...]]:
    return [hypothesis.tokens()[0] for hypothesis in search.running]


def test_the_best_extensions_run_on_whichever_hypothesis_they_extend() -> None:
    search = BeamSearch(BeamParams(2), rules())
    assert search.advance([candidates(t5=-1.0, t6=-1.5, t7=-2.0, t8=-4.0)]) == [0, 0]
    assert running(search) == [(5,), (6,)]
    sources = search.advance([candidates(t5=-3.0, t6=-4.0), candidates(t7=-0.1, t8=-0.2)])
    assert sources == [1, 1]
    assert running(search) == [(6, 7), (6, 8)]
    assert [hypothesis.total for hypothesis in search.running] == pytest.approx([-1.6, -1.7])


def test_an_end_among_the_best_is_finished_and_one_below_them_is_dropped() -> None:
    search = BeamSearch(BeamParams(2), rules())
    search.advance([candidates(t2=-1.0, t5=-2.0, t9=-3.0, t6=-4.0)])
    assert running(search) == [(5,), (6,)]
    assert [one.hypothesis.tokens()[0] for one in search.finished] == [(EOS,)]
    assert search.finished[0].verdict.reason == "stop"
    assert num_candidates(BeamParams(2), rules()) == 4


def test_min_tokens_forbids_ends() -> None:
    search = BeamSearch(BeamParams(2), rules(min_tokens=1))
    search.advance([candidates(t2=-1.0, t9=-1.1, t5=-2.0, t6=-4.0)])
    assert running(search) == [(5,), (6,)]
    assert not search.finished


def test_at_the_maximum_length_the_search_is_over_with_all_hypotheses() -> None:
    search = BeamSearch(BeamParams(2), rules(max_tokens=2))
    search.advance([candidates(t5=-1.0, t6=-2.0, t7=-3.0, t8=-4.0)])
    assert search.advance([candidates(t5=-1.0, t6=-3.0), candidates(t7=-1.0, t8=-5.0)]) == []
    assert search.over
    assert [one.hypothesis.tokens()[0] for one in search.finished] == [(5, 5), (6, 7)]
    assert [one.score for one in search.finished] == [-1.0, -1.5]
    assert {one.verdict.reason for one in search.finished} == {"length"}


@pytest.mark.parametrize(("early_stopping", "over"), [(True, True), (False, False), ("never", False)])
def test_early_stopping_ends_the_search_when_enough_are_finished(early_stopping: bool, over: bool) -> None:
    search = BeamSearch(BeamParams(2, early_stopping=early_stopping), rules())
    search.advance([candidates(t2=-3.0, t5=-3.1, t9=-4.0, t6=-4.1)])
    search.advance([candidates(t2=-3.0, t5=-0.5, t7=-9.0, t8=-9.5), candidates(t5=-5.0, t6=-5.1, t7=-5.2, t8=-5.3)])
    assert len(search.finished) == 2
    assert search.over is over


def test_a_length_penalty_above_zero_prefers_long_hypotheses() -> None:
    orders: list[list[int]] = []
    for length_penalty in (0.0, 2.0):
        search = BeamSearch(BeamParams(2, length_penalty=length_penalty), rules(max_tokens=3))
        search.advance([candidates(t2=-2.0, t5=-2.1, t6=-9.0, t7=-9.1)])
        search.advance([candidates(t5=-1.0, t6=-9.0), candidates(t5=-9.0, t6=-9.1)])
        while not search.over:
            search.advance([candidates(t5=-1.0, t6=-9.0, t7=-9.5, t8=-9.6)] * 2)
        orders.append([one.hypothesis.length for one in search.finished])
    assert orders == [[1, 3], [3, 3]]
