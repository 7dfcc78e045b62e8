"""Which requests of a list were slow, and by which phase. Pure.

A phase is compared with the same phase of the other finished requests of the model. What a quarter of them stays below
is its usual time; the quarter is taken, not the middle, so that the usual time remains usual while most requests wait.
Phases that take longer with more tokens are also compared by their time for each token.
"""

from collections.abc import Callable, Iterable
from typing import Any

SLOW_S = 0.5
"""Seconds that a slow phase takes at least beyond its usual time."""
SLOW_FACTOR = 3.0
"""Multiple of its usual time that a slow phase takes at least."""
SLOW_SHARE = 0.2
"""Share of the request's whole time that the seconds beyond the usual time are at least."""
SIMILAR_MIN = 5
"""Fewest finished requests of a model that tell what is usual."""
QUARTER = 0.25

_TOKENS: dict[str, Callable[[dict[str, Any]], int]] = {
    "tokenization": lambda one: one["prompt_tokens"],
    "prefill": lambda one: one["prompt_tokens"] - one["cached_tokens"],
    "decode": lambda one: one["completion_tokens"] - 1,
}
"""The number of tokens with which a phase grows."""


def mark_slow(summaries: list[dict[str, Any]]) -> None:
    """Sets the field `slow` of each summary (`timeline.summary_of`): None, or why the request is slow.

    `phase`: the phase that took most beyond its usual time; `move` or `preemption` for a `decode` with one.
    `duration_s`: of this phase; `usual_s`: its usual time; `excess_s`: seconds beyond the usual times, of all phases
    that took SLOW_FACTOR times as long as usual.
    """
    by_model: dict[str, list[dict[str, Any]]] = {}
    for one in summaries:
        by_model.setdefault(one["model"], []).append(one)
    for similar in by_model.values():
        usual = _Usual([one for one in similar if one["state"] == "completed"])
        for one in similar:
            one["slow"] = _slow(one, usual)


class _Usual:
    """The usual time of each phase among finished requests of one model."""

    def __init__(self, finished: list[dict[str, Any]]) -> None:
        self._is_known = len(finished) >= SIMILAR_MIN
        self._durations_s: dict[str, float] = {}
        self._per_token_s: dict[str, float] = {}
        for phase in {phase for one in finished for phase in one["phases"]}:
            self._durations_s[phase] = _quarter(one["phases"].get(phase, 0.0) for one in finished)
            if phase in _TOKENS:
                ones = (one for one in finished if phase in one["phases"])
                rates = (one["phases"][phase] / max(1, _TOKENS[phase](one)) for one in ones)
                self._per_token_s[phase] = _quarter(rates)

    def of(self, phase: str, request: dict[str, Any]) -> float | None:
        """Returns the usual seconds of a phase for a request with these numbers of tokens; None if unknown."""
        if not self._is_known:
            return None
        usual = self._durations_s.get(phase, 0.0)
        if phase in self._per_token_s:
            usual = max(usual, self._per_token_s[phase] * _TOKENS[phase](request))
        return usual


def _quarter(values: Iterable[float]) -> float:
    """Returns the value that a quarter of the values do not exceed."""
    ordered = sorted(values)
    return ordered[int(QUARTER * (len(ordered) - 1))]


def _slow(request: dict[str, Any], usual: _Usual) -> dict[str, Any] | None:
    found, most, excess_s = None, max(SLOW_S, SLOW_SHARE * request["duration_s"]), 0.0
    for phase, duration_s in request["phases"].items():
        usual_s = usual.of(phase, request)
        if usual_s is None:
            return None
        if duration_s < SLOW_FACTOR * usual_s:
            continue
        excess_s += duration_s - usual_s
        if duration_s - usual_s >= most:
            most = duration_s - usual_s
            found = {"phase": _event(phase, request), "duration_s": duration_s, "usual_s": round(usual_s, 6)}
    return found and {**found, "excess_s": round(excess_s, 6)}


def _event(phase: str, request: dict[str, Any]) -> str:
    """Returns the name of what happened within a slow phase, or the phase."""
    if phase == "decode" and (request["moves"] or request["preemptions"]):
        return "move" if request["moves"] else "preemption"
    return phase
