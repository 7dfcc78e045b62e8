"""Whether guessing pays: on made-up machines, what wrong guesses cost in all and how soon right ones are noticed."""

from collections.abc import Callable

import pytest

from antiphon.services.engine.core.policy.speculation import (
    COST_SHARE,
    REFRESH_STEPS,
    SAVED_STEPS_MAX,
    SpeculationController,
)
from antiphon.services.engine.core.policy.step_times import PLAIN_TIMES_MIN, StepTimes

REACH = 4


class Balance(SpeculationController):
    """The controller with the times that it judges by, as the scheduler uses them."""

    def __init__(self) -> None:
        self.times = StepTimes()
        super().__init__(self.times)

    def planned(self, step: int, now_s: float, num_sequences: int, num_draft_tokens: int) -> None:
        self.times.planned(step, now_s, num_sequences, num_draft_tokens)

    def ended(self, step: int, now_s: float, num_accepted: int) -> None:
        self.step_ended(self.times.ended(step, now_s), num_accepted)


class Machine:
    """Steps of a second, and `guess_s` more for each sequence that guesses; `num_accepted` of its guesses are right."""

    def __init__(self, batch: int, guess_s: float, num_accepted: Callable[[int], int]) -> None:
        self.speculation = Balance()
        self.batch, self.guess_s, self.num_accepted = batch, guess_s, num_accepted
        self.now_s = 1.0
        self.step = 0
        self.tokens = 0
        self.num_drafting: list[int] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            num_drafting = min(self.batch, self.speculation.num_drafting(self.batch, self.now_s))
            self.speculation.planned(self.step, self.now_s, self.batch, REACH * num_drafting)
            right = num_drafting * self.num_accepted(self.step)
            self.now_s += 1.0 + self.guess_s * num_drafting
            self.tokens += self.batch + right
            self.speculation.ended(self.step, self.now_s, right)
            self.num_drafting.append(num_drafting)

    @property
    def plain_s(self) -> float:
        """What these tokens take without guesses."""
        return self.tokens / self.batch


@pytest.mark.spec("S-SRV-057")
@pytest.mark.parametrize("batch", [1, 8, 32, 256])
@pytest.mark.parametrize("guess_s", [0.02, 0.3, 2.0])
def test_wrong_guesses_cost_a_small_share_of_the_time_whatever_a_guess_costs(batch: int, guess_s: float) -> None:
    machine = Machine(batch, guess_s, lambda step: 0)
    machine.run(3000)
    assert any(machine.num_drafting), "it never tries"
    assert machine.now_s <= (1 + COST_SHARE + 0.002) * machine.plain_s + guess_s


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_right_guesses_are_noticed_and_then_everybody_guesses(batch: int) -> None:
    machine = Machine(batch, 0.5 / batch, lambda step: REACH)
    machine.run(PLAIN_TIMES_MIN)
    assert not any(machine.num_drafting)
    machine.run(200)
    assert machine.num_drafting.index(batch) < 60
    assert machine.num_drafting[60:].count(batch) >= 140 * (1 - 2 / REFRESH_STEPS)
    assert machine.now_s < 0.6 * machine.plain_s


def test_guesses_that_are_right_too_seldom_for_what_they_cost_are_not_made() -> None:
    machine = Machine(32, 0.2, lambda step: 1)
    machine.run(2000)
    assert machine.now_s <= (1 + COST_SHARE + 0.002) * machine.plain_s


def test_what_luck_has_saved_up_is_soon_lost_when_the_text_changes() -> None:
    machine = Machine(8, 0.05, lambda step: REACH if step < 500 else 0)
    machine.run(500)
    lucky_s = machine.now_s - machine.plain_s
    machine.run(2000)
    lost_s = machine.now_s - machine.plain_s - lucky_s
    assert lost_s <= 2000 * (COST_SHARE + 0.002) + SAVED_STEPS_MAX + 1


def test_a_step_that_something_else_held_up_is_not_held_against_its_guesses() -> None:
    machine = Machine(1, 0.1, lambda step: 1)
    machine.run(50)
    assert machine.num_drafting[-1]
    machine.speculation.planned(99, machine.now_s, 1, REACH)
    machine.speculation.ended(99, machine.now_s + 1000.0, 0)
    machine.run(400)
    assert sum(map(bool, machine.num_drafting[-200:])) > 150


def test_without_a_clock_everybody_may_guess() -> None:
    speculation = Balance()
    for step in range(5):
        speculation.planned(step, 0.0, 16, 0)
        speculation.ended(step, 0.0, 0)
        assert speculation.num_drafting(16, 0.0) == 16


def test_of_steps_planned_ahead_the_time_between_results_counts() -> None:
    speculation = Balance()
    for step in range(40):
        guesses = REACH if speculation.num_drafting(1, step + 1.0) else 0
        speculation.planned(step, step + 1.0, 1, guesses)
        if step:
            speculation.ended(step - 1, step + 1.5, 0)
    assert speculation.num_drafting(1, 50.0) == 1
    speculation.planned(40, 50.0, 1, REACH)
    speculation.ended(39, 50.5, 0)
    speculation.ended(40, 53.5, 0)
    assert speculation.num_drafting(1, 54.0) == 0
