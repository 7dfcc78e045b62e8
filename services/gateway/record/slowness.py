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
MOST = 0.75
"""Share of the largest weight from which a slow request stands out among the slow ones."""
OUTLIERS_MAX = 5
"""Requests that stand out at most."""

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

    Also sets `token_s`: the seconds of `decode` for each token of output after the first, None without such a token;
    and `usual_token_s`: what is usual for the model, None if unknown.
    """
    by_model: dict[str, list[dict[str, Any]]] = {}
    for one in summaries:
        by_model.setdefault(one["model"], []).append(one)
    for similar in by_model.values():
        usual = _Usual([one for one in similar if one["state"] == "completed"])
        token_s = usual.token_s
        for one in similar:
            one["slow"] = _slow(one, usual)
            one["token_s"], one["usual_token_s"] = _token_s(one), token_s


def mark_outliers(summaries: list[dict[str, Any]]) -> None:
    """Sets the field `stands_out` of each `slow`: whether the request is among the few slowest of these requests.

    The excess is weighted with its share of the request's time: among many requests that waited equally long, the one
    that would have been done first has lost most.
    """
    slow = sorted((one for one in summaries if one.get("slow")), key=_weight, reverse=True)
    for number, one in enumerate(slow):
        one["slow"]["stands_out"] = number < OUTLIERS_MAX and _weight(one) >= MOST * _weight(slow[0])


def usual_token_s(summaries: list[dict[str, Any]]) -> float | None:
    """Returns the usual seconds of `decode` for each token of output, of requests of one model; None if unknown."""
    return _Usual([one for one in summaries if one["state"] == "completed"]).token_s


class _Usual:
    """The usual time of each phase among finished requests of one model."""

    def __init__(self, finished: list[dict[str, Any]]) -> None:
        self._is_known = len(finished) >= SIMILAR_MIN
        self._durations_s: dict[str, float] = {}
        self._per_token_s: dict[str, float] = {}
        for phase in {phase for one in finished for phase in one["phases"]}:
            self._durations_s[phase] = _quarter(one["phases"].get(phase, 0.0) for one in finished)
            if phase in _TOKENS:
                counts = [(one["phases"].get(phase), _TOKENS[phase](one)) for one in finished]
                rates = [duration_s / count for duration_s, count in counts if duration_s is not None and count > 0]
                if rates:
                    self._per_token_s[phase] = _quarter(rates)

    def of(self, phase: str, request: dict[str, Any]) -> float | None:
        """Returns the usual seconds of a phase for a request with these numbers of tokens; None if unknown."""
        if not self._is_known:
            return None
        usual = self._durations_s.get(phase, 0.0)
        if phase in self._per_token_s:
            usual = max(usual, self._per_token_s[phase] * _TOKENS[phase](request))
        return usual

    @property
    def token_s(self) -> float | None:
        """The usual seconds of `decode` for each token of output; None if unknown."""
        found = self._per_token_s.get("decode") if self._is_known else None
        return found and round(found, 6)


def _weight(request: dict[str, Any]) -> float:
    excess_s = request["slow"]["excess_s"]
    return excess_s * excess_s / max(request["duration_s"], excess_s)


def _token_s(request: dict[str, Any]) -> float | None:
    num_tokens = _TOKENS["decode"](request)
    return round(request["phases"].get("decode", 0.0) / num_tokens, 6) if num_tokens > 0 else None


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
