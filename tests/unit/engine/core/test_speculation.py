"""Whether guessing pays: on made-up machines, what wrong guesses cost in all and how soon right ones are noticed."""

from collections.abc import Callable

import pytest

from antiphon.services.engine.core.policy.speculation import (
    COST_SHARE,
    FREE_PROMPTS,
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


class LayerMachine:
    """Steps of a second whose draft layer takes `layer_s`; drafts take `draft_s` more, and a `share` of them is right.

    All sequences of the batch draft if any does.
    """

    def __init__(self, batch: int, layer_s: float, draft_s: float, share: float) -> None:
        self.times = StepTimes()
        self.speculation = SpeculationController(self.times, predicts=True)
        self.batch, self.layer_s, self.draft_s, self.share = batch, layer_s, draft_s, share
        self.now_s, self.step, self.tokens, self.prompts_s, self.right = 1.0, 0, 0, 0.0, 0.0
        self.has_drafts = False
        self.num_prompts = 0
        self.num_drafted: list[bool] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            predicts = self.speculation.predicts(self.batch, self.now_s)
            drafts = self.has_drafts and self.speculation.num_drafting(self.batch, self.now_s) >= self.batch
            self.times.planned(self.step, self.now_s, self.batch, self.batch * drafts)
            self.right += self.share * self.batch if drafts else 0
            accepted, self.right = int(self.right), self.right % 1
            layer_s = self.layer_s if predicts else 0.0
            self.now_s += 1.0 + layer_s + self.draft_s * drafts
            self.tokens += self.batch + accepted
            ended = self.times.ended(self.step, self.now_s, layer_s)
            self.speculation.step_ended(ended, accepted, layer_s)
            self.has_drafts = predicts
            self.num_drafted.append(drafts)

    def prompt(self, plain_s: float, layer_s: float) -> None:
        """A step with a prompt, of which the layer takes its share in two places."""
        self.step += 1
        self.times.planned(self.step, self.now_s, 1, 0, decodes=False)
        takes_part = self.speculation.predicts_prompts(self.now_s)
        self.now_s += plain_s + 2 * layer_s * takes_part
        self.prompts_s += plain_s
        ended = self.times.ended(self.step, self.now_s, layer_s)
        self.speculation.step_ended(ended, 0, layer_s * takes_part)
        self.num_prompts += takes_part

    @property
    def plain_s(self) -> float:
        return self.tokens / self.batch + self.prompts_s


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize(("layer_s", "draft_s", "share"), [(0.3, 0.1, 0.0), (0.05, 1.0, 0.7), (0.4, 0.2, 0.3)])
def test_a_layer_that_does_not_pay_costs_a_small_share_of_the_time(
    batch: int, layer_s: float, draft_s: float, share: float
) -> None:
    machine = LayerMachine(batch, layer_s, draft_s, share)
    machine.run(3000)
    assert any(machine.num_drafted), "it never tries"
    assert machine.now_s <= (1 + COST_SHARE + 0.002) * machine.plain_s + 2


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_layer_that_pays_is_noticed_in_batches_of_every_size(batch: int) -> None:
    machine = LayerMachine(batch, 0.2, 0.1, 0.75)
    machine.run(300)
    assert machine.num_drafted.index(True) < 60
    assert sum(machine.num_drafted[60:]) >= 240 * (1 - 2 / REFRESH_STEPS)
    assert machine.now_s < 0.9 * machine.plain_s


def test_what_the_layer_computes_of_prompts_is_paid_by_what_drafts_have_saved() -> None:
    """With much saved all prompts are computed; with nothing saved, the first ones and then a few."""
    saving, losing = (LayerMachine(8, 0.2, 0.1, share) for share in (0.75, 0.1))
    for machine in (saving, losing):
        for _ in range(100):
            machine.prompt(40.0, 2.0)
            machine.run(100)
    assert saving.num_prompts >= 95
    assert FREE_PROMPTS <= losing.num_prompts <= 30
    assert saving.now_s < 0.95 * saving.plain_s
    assert losing.now_s <= (1 + COST_SHARE + 0.002) * losing.plain_s + FREE_PROMPTS * 4 + 8


def test_prompts_without_answers_cost_a_small_share() -> None:
    machine = LayerMachine(8, 0.2, 0.1, 0.75)
    for _ in range(1000):
        machine.prompt(40.0, 2.0)
    assert machine.num_prompts > FREE_PROMPTS + 50
    assert machine.now_s <= (1 + COST_SHARE) * machine.plain_s + FREE_PROMPTS * 4 + 4


def test_without_a_clock_the_layer_always_predicts() -> None:
    speculation = SpeculationController(StepTimes(), predicts=True)
    assert speculation.predicts(8, 0.0)
    assert speculation.predicts_prompts(0.0)
    speculation = SpeculationController(StepTimes())
    assert not speculation.predicts(8, 0.0)
    assert not speculation.predicts_prompts(1.0)


def test_steps_that_take_less_than_the_clock_can_tell_say_nothing() -> None:
    balance = Balance()
    for step in range(2 * PLAIN_TIMES_MIN):
        balance.planned(step, 1.0, 1, 0)
        balance.ended(step, 1.0, 0)
    assert balance.times.usual_s(1) is None
    balance.planned(-1, 1.0, 1, 1)
    balance.ended(-1, 2.0, 1)
    assert balance.draft_cost == 0.0
