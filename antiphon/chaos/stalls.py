"""Finds the silences that belong to a fault, and divides them into the parts that a client waited for. Pure.

The parts come from the timelines of the requests (the answers of `GET /v1/requests/{id}/timeline`), whose times are
seconds since the arrival of the request.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from antiphon.chaos.streams import Outcome
from antiphon.chaos.targets import Injection

STALL_BEFORE_S, STALL_AFTER_S = 0.5, 1.0
"""Seconds. A silence belongs to a fault if it ends after the fault's beginning, begins at most `STALL_BEFORE_S` before
this beginning, and begins at most `STALL_AFTER_S` after the fault's end. A silence may belong to several faults.
"""
SLOWEST_SHARE = 0.1
"""Share of a row's stalls whose parts are reported: the longest ones."""

PARTS = {
    "connecting": "until a gateway read the request of the client that connected again",
    "admission": "until the gateway had taken over the stream (its record and journal) and its limits admitted it",
    "tokenizing": "until the prompt was tokenized",
    "noticing": "until the gateway knew that the engine was lost",
    "placing": "in the gateway's queue, until an engine was chosen that had room",
    "engine queue": "from there until the engine's first step with the sequence began",
    "prefill": "steps of that engine until its first token",
    "step": "steps of an engine that was not lost, until its next token",
    "text": "from the end of the step until the text was at the gateway",
    "writing": "until the gateway had written it to the connection",
    "client": "until the client had read it",
    "unknown": "not known: no record of the request",
}
"""What each part of a silence is."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest silence of one stream around one fault. Times are monotonic seconds; both 0 if there was none."""

    outcome: Outcome
    began_s: float
    ended_s: float

    @property
    def duration_s(self) -> float:
        """Its length in seconds."""
        return self.ended_s - self.began_s


def stalls(injections: Sequence[Injection], outcomes: Sequence[Outcome]) -> list[Stall]:
    """Returns a stall for each fault and each stream that was open at its beginning, the longest one last."""
    found = (stall for one in injections for outcome in outcomes for stall in _stall(one, outcome))
    return sorted(found, key=lambda stall: stall.duration_s)


def slowest(ordered: Sequence[Stall]) -> list[Stall]:
    """Returns the longest of the stalls, at least one if there is one."""
    return list(ordered[len(ordered) - math.ceil(SLOWEST_SHARE * len(ordered)) :])


def _stall(injection: Injection, outcome: Outcome) -> Iterator[Stall]:
    if not outcome.began_s <= injection.began_s <= outcome.ended_s:
        return
    first_s = injection.began_s - STALL_BEFORE_S
    last_s = injection.began_s + injection.fault.duration_s + STALL_AFTER_S
    own = (gap for gap in outcome.gaps if gap[1] >= injection.began_s and first_s <= gap[0] <= last_s)
    yield Stall(outcome, *max(own, key=lambda gap: gap[1] - gap[0], default=(0.0, 0.0)))


def divide(began_s: float, ended_s: float, timeline: Mapping[str, Any] | None, offset_s: float) -> dict[str, float]:
    """Returns the seconds of each part of a silence; the parts add up to its duration.

    `began_s`, `ended_s`: monotonic seconds. `offset_s`: Unix time minus monotonic time, seconds.
    """
    if timeline is None:
        return {"unknown": ended_s - began_s}
    arrived_s = timeline["created"] - offset_s
    marks = [*_arrival(timeline, arrived_s), *chain(*(_sequence(one, arrived_s, began_s) for one in _of(timeline)))]
    parts: dict[str, float] = {}
    now_s = began_s
    for at_s, name in [*sorted(marks), (ended_s, "client")]:
        if now_s < at_s <= ended_s:
            parts[name] = parts.get(name, 0.0) + at_s - now_s
            now_s = at_s
    return parts


def means(all_parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean seconds of each part, in the order of `PARTS`."""
    sums = {name: sum(parts.get(name, 0.0) for parts in all_parts) for name in PARTS}
    return {name: total / len(all_parts) for name, total in sums.items() if total > 0}


def _of(timeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(timeline["sequences"])


def _arrival(timeline: Mapping[str, Any], arrived_s: float) -> Iterator[tuple[float, str]]:
    yield arrived_s, "connecting"
    for name, key in (("admission", "admitted_s"), ("tokenizing", "tokenized_s")):
        if timeline[key] is not None:
            yield arrived_s + timeline[key], name


def _sequence(sequence: dict[str, Any], arrived_s: float, began_s: float) -> Iterator[tuple[float, str]]:
    """Yields the end of each part, for one sequence of the request."""
    piece = next((one for one in sequence["pieces"] if arrived_s + (one["written_s"] or 0.0) > began_s), None)
    got_s = None if piece is None else arrived_s + piece["arrived_s"]
    if piece is not None and got_s is not None:
        yield got_s, "text"
        yield arrived_s + piece["written_s"], "writing"
    for attempt in sequence["attempts"]:
        moved = arrived_s + attempt["placed_s"] > began_s
        yield arrived_s + attempt["placed_s"], "placing"
        if attempt["lost_s"] is not None:
            yield arrived_s + attempt["lost_s"], "noticing"
        if moved and attempt["steps"]:
            yield arrived_s + attempt["steps"][0]["start_s"], "engine queue"
        ends = [arrived_s + one["end_s"] for one in attempt["steps"] if one["num_output"]]
        if got_s is not None and (before := [one for one in ends if one <= got_s]):
            yield before[-1], "prefill" if moved else "step"
