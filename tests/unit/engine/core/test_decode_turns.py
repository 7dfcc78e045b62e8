"""Clients whose many sequences would slow down another client's: how many take turns, and that each gets its turn."""

import dataclasses
import random
from collections import Counter

import pytest

from antiphon.services.engine.core import invariants
from antiphon.services.engine.core.core import Core
from antiphon.services.engine.core.policy.decode_turns import DecodeTurns
from antiphon.services.engine.core.policy.step_times import StepTimes
from tests.unit.engine.core.factories import answer, make_core, prompt_of, spec

MANY, FEW = 96, 2


class Machine:
    """An engine whose decoding steps take `fixed_s`, and `row_s` more for each sequence."""

    def __init__(self, fixed_s: float, row_s: float, num_blocks: int = 4000) -> None:
        longest = min(4 * num_blocks, 4000)
        self.core: Core = make_core(num_blocks, max_num_seqs=MANY + FEW + 30, budget=2000, max_model_len=longest)
        self.fixed_s, self.row_s = fixed_s, row_s
        self.now_s = 1.0
        self.tokens = Counter[str]()

    def add(self, client: str, count: int) -> None:
        known = sum(name.startswith(client) for name in self.core.sequences)
        for number in range(known, known + count):
            one = spec(f"{client}{number}", prompt_of(4, first=200), max_tokens=3000)
            self.core.add(dataclasses.replace(one, client=client))

    def run(self, steps: int) -> list[int]:
        """Returns the number of sequences of each step, and counts the tokens of each sequence anew."""
        self.tokens.clear()
        sizes = list[int]()
        for _ in range(steps):
            plan = self.core.schedule(self.now_s)
            invariants.check(self.core)
            self.now_s += self.fixed_s + self.row_s * len(plan.scheduled)
            for outcome in self.core.apply(plan, answer(plan, *((7,) * len(plan.scheduled))), self.now_s):
                self.tokens[outcome.sequence_id] += len(outcome.token_ids)
            sizes.append(len(plan.scheduled))
        return sizes

    def pace(self, client: str, seconds: float) -> float:
        """Tokens per second of a client's sequences, all together."""
        return sum(count for name, count in self.tokens.items() if name.startswith(client)) / seconds


@pytest.mark.parametrize("many_first", [True, False])
@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.001, 0.001), (0.008, 0.001), (0.0, 0.001), (0.03, 0.001)])
def test_a_client_with_few_sequences_keeps_half_of_its_tokens(fixed_s: float, row_s: float, many_first: bool) -> None:
    machine = Machine(fixed_s, row_s)
    alone = FEW / (fixed_s + row_s * FEW)
    for client, count in [("many", MANY), ("few", FEW)][:: 1 if many_first else -1]:
        machine.add(client, count)
        machine.run(12)
    machine.run(20)
    begin = machine.now_s
    machine.run(300)
    assert machine.pace("few", machine.now_s - begin) >= 0.49 * alone
    counts = [machine.tokens[f"many{number}"] for number in range(MANY)]
    assert max(counts) - min(counts) <= 1, "they take turns"
    assert min(counts) >= 3


def test_the_first_token_of_a_client_does_not_wait_for_all_sequences_of_another_one() -> None:
    machine = Machine(0.001, 0.001)
    for _ in range(4):  # so that the times of steps of different sizes are known
        machine.add("many", MANY // 4)
        machine.run(12)
    machine.core.add(dataclasses.replace(spec("one", prompt_of(4, first=200), max_tokens=3000), client="one"))
    [size] = machine.run(1)
    assert machine.tokens["one"] == 1
    assert size <= 6


def test_where_further_sequences_cost_nothing_all_take_part() -> None:
    machine = Machine(0.01, 0.000001)
    machine.add("few", FEW)
    machine.run(10)
    machine.add("many", MANY)
    machine.run(20)
    assert machine.run(50) == [FEW + MANY] * 50


@pytest.mark.parametrize("clients", [("", ""), ("a", "a")])
def test_sequences_of_one_client_do_not_wait(clients: tuple[str, str]) -> None:
    machine = Machine(0.001, 0.001)
    for client, count in zip(clients, (MANY, FEW), strict=True):
        for number in range(count):
            one = spec(f"{client}{count}-{number}", prompt_of(4, first=200), max_tokens=3000)
            machine.core.add(dataclasses.replace(one, client=client))
    machine.run(5)
    assert machine.run(20) == [FEW + MANY] * 20


def test_three_clients_have_equal_shares_and_what_one_leaves_goes_to_the_others() -> None:
    machine = Machine(0.0, 0.001)
    for client, count in (("a", 60), ("b", 40), ("c", 2)):
        machine.add(client, count)
        machine.run(12)
    machine.run(20)
    assert set(machine.run(60)) == {6}
    shares = [sum(count for name, count in machine.tokens.items() if name[0] == client) for client in "abc"]
    assert shares == [120, 120, 120]


def test_without_a_clock_nobody_waits() -> None:
    machine = Machine(0.0, 0.0)
    machine.now_s = 0.0
    machine.add("a", MANY)
    machine.add("b", FEW)
    machine.run(3)
    assert machine.run(5) == [FEW + MANY] * 5


def test_a_turn_that_was_not_used_is_kept() -> None:
    machine = Machine(0.001, 0.001)
    for client, count in (("many", 6), ("few", 1)):
        machine.add(client, count)
    machine.run(3)
    turns, running = DecodeTurns(StepTimes()), machine.core.residency.running
    rows = {one.row for one in running}
    rests = turns.resting(running, None, machine.now_s)
    turns.used(set())
    assert turns.resting(running, None, machine.now_s) == rests, "blocks ran out"
    turns.used(rows - rests)
    assert rows - turns.resting(running, None, machine.now_s) - {running[-1].row} <= rests, "then others have theirs"


@pytest.mark.parametrize("seed", [91, 220, 677, 1671, 2770, *range(20)])
def test_if_blocks_run_out_for_those_whose_turn_it_is_others_go_on(seed: int) -> None:
    """In the first seeds' steps, the sequences that had a turn were preempted."""
    draw = random.Random(seed)
    machine = Machine(1.0, 1.0, draw.randint(8, 24))
    count, later, length = draw.randint(2, 8), draw.randint(0, 30), draw.randint(1, 9)

    def add(name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        machine.core.add(dataclasses.replace(spec(name, prompt, max_tokens=max_tokens), client=name[:-1]))

    for number in range(count):
        add(f"many{number}", prompt_of(draw.randint(1, 8), first=100 + 20 * number), draw.randint(4, 20))
    while machine.core.sequences or later >= 0:
        if later == 0:
            add("few0", prompt_of(length, first=20), 8)
        later -= 1
        assert not machine.core.sequences or machine.run(1) != [0]
