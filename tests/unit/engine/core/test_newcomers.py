"""Steps in which newcomers are computed without the large batch of another client."""

import dataclasses
from typing import Any

import pytest

from services.engine.core.core import Core
from services.engine.core.lanes.newcomers import FEW_SHARE, OTHER_STEPS, RUNNING_MIN
from tests.unit.engine.core.factories import joined, make_core, prompt_of, shares, spec, step


def add(core: Core, name: str, client: str, length: int = 4, priority: int = 0) -> None:
    first = 100 * len(core.sequences) % 900
    core.add(dataclasses.replace(spec(name, prompt_of(length, first)), client=client, client_priority=priority))


def flooded(count: int = RUNNING_MIN, client: str = "flood", **options: Any) -> Core:
    """A core in which sequences of one client decode."""
    core = make_core(num_blocks=1024, budget=512, caching=False, **{"max_num_seqs": 128, **options})
    for number in range(count):
        add(core, f"f{number}", client)
    step(core)
    step(core)
    return core


def test_a_newcomer_gets_a_step_without_the_sequences_of_a_flood() -> None:
    core = flooded()
    add(core, "new", "other")
    plan, outcomes = step(core)
    assert list(joined(plan)) == ["new"]
    assert [len(plan.scheduled), [each.sequence_id for each in outcomes]] == [1, ["new"]]
    plan, outcomes = step(core)
    assert len(plan.scheduled) == RUNNING_MIN + 1


def test_newcomers_of_several_clients_share_the_step_as_far_as_they_are_short() -> None:
    core = flooded()
    for client, length in (("a", 10), ("b", 10), ("c", 10), ("d", 10)):
        add(core, client, client, length)
    plan, _ = step(core)
    assert list(joined(plan)) == ["a", "b", "c"]
    assert len(plan.scheduled) == 3
    plan, _ = step(core)
    assert list(joined(plan)) == ["d"]
    assert len(plan.scheduled) == RUNNING_MIN + 4


def test_a_client_with_few_running_sequences_has_newcomers() -> None:
    core = flooded()
    few = RUNNING_MIN // FEW_SHARE
    for number in range(few + 2):
        add(core, f"n{number}", "other")
    plan, _ = step(core)
    assert list(joined(plan)) == [f"n{number}" for number in range(few + 1)]
    assert len(plan.scheduled) == few + 1
    for _ in range(OTHER_STEPS):
        plan, _ = step(core)
    add(core, "last", "other")
    plan, _ = step(core)
    assert len(plan.scheduled) == RUNNING_MIN + few + 3


def test_the_last_rows_are_kept_for_clients_that_have_nothing_running() -> None:
    core = flooded(max_num_seqs=RUNNING_MIN + 2)
    for name, client in (("first", "other"), ("second", "other"), ("third", "new")):
        add(core, name, client)
        for _ in range(OTHER_STEPS + 1):
            step(core)
    assert {each.sequence_id for each in core.residency.running} >= {"first", "third"}
    assert core.residency.num_waiting == 1


def test_the_flood_is_left_out_of_few_steps_only() -> None:
    core = flooded()
    sizes = []
    for number in range(4 * (OTHER_STEPS + 1)):
        add(core, f"n{number}", f"c{number}")
        sizes.append(len(step(core)[0].scheduled))
    alone = [index for index, size in enumerate(sizes) if size == 1]
    assert alone == list(range(0, len(sizes), OTHER_STEPS + 1))


@pytest.mark.parametrize(
    ("count", "client", "length", "priority", "options"),
    [
        (RUNNING_MIN - 1, "other", 4, 0, {}),
        (RUNNING_MIN, "flood", 4, 0, {}),
        (RUNNING_MIN, "", 4, 0, {}),
        (RUNNING_MIN, "other", RUNNING_MIN + 1, 0, {}),
        (RUNNING_MIN, "other", 4, 1, {}),
        (RUNNING_MIN, "other", 4, 0, {"chunked": False}),
    ],
)
def test_others_join_the_running_sequences(
    count: int, client: str, length: int, priority: int, options: dict[str, Any]
) -> None:
    core = flooded(count, **options)
    add(core, "new", client, length, priority)
    plan, _ = step(core)
    assert list(joined(plan)) == ["new"]
    assert len(plan.scheduled) == count + 1


def test_where_no_client_has_most_of_the_sequences_newcomers_join_them() -> None:
    core = flooded(RUNNING_MIN)
    for number in range(RUNNING_MIN):
        add(core, f"o{number}", f"o{number % 4}")
    step(core)
    step(core)
    add(core, "new", "other")
    assert len(step(core)[0].scheduled) == 2 * RUNNING_MIN + 1


def test_a_newcomer_that_does_not_fit_delays_nobody() -> None:
    core = make_core(num_blocks=RUNNING_MIN * 2, max_num_seqs=128, budget=512, caching=False)
    for number in range(RUNNING_MIN):
        add(core, f"f{number}", "flood")
    step(core)
    step(core)
    add(core, "new", "other", 4)
    assert len(step(core)[0].scheduled) == RUNNING_MIN
    assert shares(step(core)[0])
