"""The result of a run in numbers, as a table and as JSON. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from antiphon.chaos.stalls import STALL_AFTER_S, STALL_BEFORE_S, Stall, divide, means, slowest, stalls
from antiphon.chaos.streams import Outcome
from antiphon.chaos.targets import Injection

CALM = ("none", "calm")
"""Kind and group of the row for moments without a fault. The stalls of this row are the usual gaps between tokens."""
PROBLEMS_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFault:
    """One fault: seconds since the start, its processes, and the stalls of the streams that it affected.

    `alone`: whether no other fault was active. `parts`: as those of a row.
    """

    at_s: float
    targets: tuple[str, ...]
    alone: bool
    stall_p50_s: float
    stall_p99_s: float
    stall_max_s: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """The faults of one kind on one group. Stalls: for each affected stream, its longest silence in seconds.

    `alone`: number of faults during which no other fault was active; `alone_p50_s` and `alone_p99_s` are the stalls of
    the streams that these faults affected.
    """

    kind: str
    group: str
    count: int
    verified: int
    stall_p50_s: float
    stall_p99_s: float
    stall_max_s: float
    alone: int = 0
    alone_p50_s: float = 0.0
    alone_p99_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Mean seconds of each part (`stalls.PARTS`) of the longest tenth of the stalls; empty without timelines."""
    each: list[OneFault] = field(default_factory=list[OneFault])
    """Only in the JSON report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All numbers of one run. `problems` explains each failed stream, unverified fault and violated invariant."""

    seed: int
    duration_s: float
    faults: list[FaultRow]
    streams: int
    tokens: int
    lost: int
    repeated: int
    differing: int
    hung: int
    retried: int
    resumed: int
    refused: int
    breaches: list[str]
    problems: list[str]

    @property
    def passed(self) -> bool:
        """Whether all streams were correct, all faults took effect and all invariants held."""
        return not self.problems and not self.breaches

    def as_json(self) -> dict[str, Any]:
        """Returns the report as an object for JSON."""
        return {**asdict(self), "passed": self.passed}


def make_report(
    seed: int,
    duration_s: float,
    injections: Sequence[Injection],
    outcomes: Sequence[Outcome],
    breaches: Sequence[str],
    *,
    calm: Sequence[Injection] = (),
    offset_s: float = 0.0,
) -> Report:
    """Counts faults and outcomes.

    `calm`: moments without a fault, as faults of the kind and group `CALM`. `offset_s`: see `stalls.divide`.
    """
    rows = [_row(*CALM, calm, outcomes, offset_s)] if calm else []
    rows += [_row(kind, group, injections, outcomes, offset_s) for kind, group in _kinds(injections)]
    return Report(
        seed=seed,
        duration_s=duration_s,
        faults=rows,
        streams=len(outcomes),
        tokens=sum(len(one.answer.token_ids) for one in outcomes),
        lost=sum(one.difference.lost for one in outcomes),
        repeated=sum(one.difference.repeated for one in outcomes),
        differing=sum(one.difference.differing for one in outcomes),
        hung=sum(one.hung for one in outcomes),
        retried=sum(one.retried for one in outcomes),
        resumed=sum(one.resumed for one in outcomes),
        refused=sum(one.refused for one in outcomes),
        breaches=list(breaches),
        problems=[*_unverified(injections), *_wrong(outcomes, injections)],
    )


def lines(report: Report) -> Iterator[str]:
    """Yields the lines of the table."""
    yield f"{'FAULT':<7} {'TARGET':<13} {'COUNT':>5} {'VERIFIED':>8} {'STALL P50':>10} {'P99':>8} {'LONGEST':>8} " + (
        f"{'ALONE':>6} {'P50':>8} {'P99':>8}"
    )
    for row in report.faults:
        text = f"{row.stall_p50_s:>8.2f} s {row.stall_p99_s:>6.2f} s {row.stall_max_s:>6.2f} s"
        text += f" {row.alone:>6} {row.alone_p50_s:>6.2f} s {row.alone_p99_s:>6.2f} s" if row.alone else f" {0:>6}"
        yield f"{row.kind:<7} {row.group:<13} {row.count:>5} {row.verified:>8} {text}"
    yield ""
    for row in report.faults:
        if row.parts:
            parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in row.parts.items())
            yield f"LONGEST TENTH after {row.kind} {row.group}: {parts}"
    yield ""
    yield f"{'STREAMS':>8} {'TOKENS':>9} {'LOST':>6} {'REPEATED':>8} {'DIFFERING':>9} {'HUNG':>5} " + (
        f"{'RESUMED':>8} {'RETRIED':>8} {'REFUSED':>8}"
    )
    yield f"{report.streams:>8} {report.tokens:>9} {report.lost:>6} {report.repeated:>8} {report.differing:>9} " + (
        f"{report.hung:>5} {report.resumed:>8} {report.retried:>8} {report.refused:>8}"
    )
    yield ""
    for text in [*report.breaches, *report.problems][:PROBLEMS_SHOWN]:
        yield f"PROBLEM  {text}"
    if (more := len(report.breaches) + len(report.problems) - PROBLEMS_SHOWN) > 0:
        yield f"         and {more} more"
    found = sum(row.count for row in report.faults if (row.kind, row.group) != CALM)
    what = "passed" if report.passed else "FAILED"
    yield f"{what}: {found} faults in {report.duration_s:.0f} s, seed {report.seed}"


def _kinds(injections: Sequence[Injection]) -> list[tuple[str, str]]:
    return sorted({(one.fault.kind, one.fault.group) for one in injections}, key=lambda pair: (pair[1], pair[0]))


def _row(
    kind: str, group: str, injections: Sequence[Injection], outcomes: Sequence[Outcome], offset_s: float
) -> FaultRow:
    own = [one for one in injections if (one.fault.kind, one.fault.group) == (kind, group)]
    found, alone = stalls(own, outcomes), [one for one in own if _is_alone(one, injections)]
    seconds = [one.duration_s for one in found]
    own_seconds = [one.duration_s for one in stalls(alone, outcomes)]
    return FaultRow(
        kind=kind,
        group=group,
        count=len(own),
        verified=sum(one.verified for one in own),
        stall_p50_s=percentile(seconds, 0.5),
        stall_p99_s=percentile(seconds, 0.99),
        stall_max_s=max(seconds, default=0.0),
        alone=len(alone),
        alone_p50_s=percentile(own_seconds, 0.5),
        alone_p99_s=percentile(own_seconds, 0.99),
        parts=_parts(found, offset_s),
        each=[_one(one, one in alone, outcomes, offset_s) for one in own],
    )


def _one(injection: Injection, is_alone: bool, outcomes: Sequence[Outcome], offset_s: float) -> OneFault:
    fault, found = injection.fault, stalls([injection], outcomes)
    seconds = [one.duration_s for one in found]
    p50_s, p99_s = percentile(seconds, 0.5), percentile(seconds, 0.99)
    parts = _parts(found, offset_s)
    return OneFault(
        at_s=fault.at_s,
        targets=fault.targets,
        alone=is_alone,
        stall_p50_s=p50_s,
        stall_p99_s=p99_s,
        stall_max_s=max(seconds, default=0.0),
        parts=parts,
    )


def _parts(found: Sequence[Stall], offset_s: float) -> dict[str, float]:
    longest = slowest(found)
    if not any(one.outcome.timeline for one in longest):
        return {}
    return means([divide(one.began_s, one.ended_s, one.outcome.timeline, offset_s) for one in longest])


def _is_alone(injection: Injection, injections: Sequence[Injection]) -> bool:
    """Whether no other fault was active from `STALL_BEFORE_S` before this one until `STALL_AFTER_S` after it."""
    first_s, last_s = injection.began_s - STALL_BEFORE_S, _end_s(injection) + STALL_AFTER_S
    return not any(
        one.began_s <= last_s and _end_s(one) + STALL_AFTER_S >= first_s for one in injections if one is not injection
    )


def _end_s(injection: Injection) -> float:
    return max(injection.ended_s, injection.began_s + injection.fault.duration_s)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least `share` of the sorted values do not exceed; 0 if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _unverified(injections: Sequence[Injection]) -> Iterator[str]:
    for one in injections:
        if not one.verified:
            yield f"{one.fault.kind} of {', '.join(one.fault.targets)} at {one.fault.at_s:.1f} s: {one.problem}"


def _wrong(outcomes: Sequence[Outcome], injections: Sequence[Injection]) -> Iterator[str]:
    """Yields a line for each stream that was not as it should be, with the faults of its time."""
    for one in outcomes:
        if one.difference or one.hung or one.problem:
            size = f"{len(one.answer.token_ids)} of {len(one.known.token_ids)} tokens"
            why = one.problem or "ended normally"
            beside = ", ".join(_beside(one, injections)) or "no fault"
            yield f"stream of {one.ended_s - one.began_s:.1f} s, {size}: {', '.join(_faults_of(one))} ({why}; {beside})"


def _beside(stream: Outcome, injections: Sequence[Injection]) -> Iterator[str]:
    """Yields the faults whose effect may reach into the time of a stream, with seconds after its beginning."""
    for one in injections:
        if one.began_s <= stream.ended_s and _end_s(one) + STALL_AFTER_S >= stream.began_s:
            yield f"{one.fault.kind} of {' and '.join(one.fault.targets)} at {one.began_s - stream.began_s:+.1f} s"


def _faults_of(one: Outcome) -> Iterator[str]:
    difference = one.difference
    if difference.lost:
        yield f"{difference.lost} lost"
    if difference.repeated:
        yield f"{difference.repeated} repeated"
    if difference.differing:
        yield "differs"
    if one.hung:
        yield "hung"
    if not (difference or one.hung):
        yield "no proper end"
