"""What a client waited for during a silence, by the timeline of its request."""

from typing import Any

import pytest

from antiphon.chaos.schedule import Fault
from antiphon.chaos.stalls import Stall, divide, means, slowest, stalls
from antiphon.chaos.streams import Answer, Known, Outcome
from antiphon.chaos.targets import Injection

OFFSET_S = 1000.0
"""What Unix time is ahead of the monotonic clock."""


def attempt(placed: float, lost: float | None = None, steps: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"placed_s": placed, "lost_s": lost, "steps": steps or []}


def step(start: float, end: float, num_output: int = 1) -> dict[str, Any]:
    return {"start_s": start, "end_s": end, "num_output": num_output}


def timeline(attempts: list[dict[str, Any]], pieces: list[tuple[float, float]]) -> dict[str, Any]:
    found = [{"arrived_s": arrived, "written_s": written} for arrived, written in pieces]
    return {
        "created": OFFSET_S + 50.0,
        "admitted_s": 0.1,
        "tokenized_s": 0.2,
        "sequences": [{"index": 0, "attempts": attempts, "pieces": found}],
    }


def rounded(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in parts.items()}


def test_a_silence_after_the_loss_of_an_engine_has_each_part_of_the_move() -> None:
    # The request arrived at 50; its engine died shortly before 52.
    first = attempt(0.3, lost=2.6, steps=[step(0.4, 0.5), step(1.8, 1.9)])
    second = attempt(2.7, steps=[step(3.2, 3.4, num_output=0), step(3.4, 3.7)])
    parts = divide(52.0, 54.0, timeline([first, second], [(1.95, 1.97), (3.8, 3.9)]), OFFSET_S)
    assert rounded(parts) == {
        "noticing": 0.6, "placing": 0.1, "engine queue": 0.5, "prefill": 0.5,
        "text": 0.1, "writing": 0.1, "client": 0.1,
    }  # fmt: skip
    assert sum(parts.values()) == pytest.approx(2.0)


def test_a_silence_over_the_death_of_a_gateway_begins_with_the_connection_to_another_one() -> None:
    only = attempt(0.3, steps=[step(0.5, 0.7)])
    parts = divide(49.0, 51.0, timeline([only], [(0.8, 0.9)]), OFFSET_S)
    assert rounded(parts) == {
        "connecting": 1.0, "admission": 0.1, "tokenizing": 0.1, "placing": 0.1, "engine queue": 0.2, "prefill": 0.2,
        "text": 0.1, "writing": 0.1, "client": 0.1,
    }  # fmt: skip


def test_a_silence_without_a_move_is_that_of_a_step() -> None:
    only = attempt(0.3, steps=[step(0.4, 0.5), step(1.9, 2.4)])
    parts = divide(52.0, 52.5, timeline([only], [(1.95, 1.97), (2.45, 2.5)]), OFFSET_S)
    assert rounded(parts) == {"step": 0.4, "text": 0.05, "writing": 0.05}


def test_a_silence_without_a_timeline_is_unknown() -> None:
    assert divide(52.0, 53.0, None, OFFSET_S) == {"unknown": 1.0}


def test_means_are_in_the_order_of_the_parts() -> None:
    assert list(means([{"client": 1.0, "noticing": 2.0}, {"client": 2.0}]).items()) == [
        ("noticing", 1.0),
        ("client", 1.5),
    ]


def test_the_longest_tenth_is_at_least_one() -> None:
    outcome = Outcome(known=Known({}, [], ""), began_s=0.0)
    assert slowest([]) == []
    found = [Stall(outcome, 0.0, float(number)) for number in range(20)]
    assert slowest(found[:3]) == [found[2]]
    assert slowest(found) == found[18:]


def test_a_stall_is_the_longest_silence_around_a_fault_of_a_stream_that_was_open() -> None:
    fault = Injection(Fault(at_s=0.0, kind="kill", group="engine", targets=("engine-1",)), 100.0, 101.0)
    stream = Outcome(
        known=Known({}, [], ""),
        began_s=90.0,
        ended_s=120.0,
        answer=Answer(),
        gaps=[(99.0, 99.9), (99.9, 100.4), (100.5, 102.0)],
    )
    earlier = Outcome(known=Known({}, [], ""), began_s=80.0, ended_s=99.0, answer=Answer(), gaps=[(98.0, 99.0)])
    assert [(one.began_s, one.ended_s) for one in stalls([fault], [stream, earlier])] == [(100.5, 102.0)]
