"""Which requests of a list were slow, and by which phase. Pure.

A phase is compared with the same phase of the other finished requests of the model. Its usual time is the lower
quartile of these, which a quarter of the requests do not exceed. The quartile is used in place of the median, so that
the usual time does not grow while most requests wait. Phases that take longer with more tokens are also compared by
their time for each token.

A machine that is merely busy makes all requests slower, and by chance some much slower. So a phase in which something
computes (`_COMPUTING`) is slow only if it also lies far outside of the spread of these times, and took far longer than
for the requests that ran at about the same time. The other phases are waits for a place, a turn or another engine,
which have a cause of their own.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Any

SLOW_S = 0.5
"""A slow phase exceeds its usual time by at least this many seconds."""
SLOW_FACTOR = 3.0
"""A slow phase takes at least this many times its usual time."""
SLOW_SHARE = 0.2
"""A slow phase exceeds its usual time by at least this share of the request's whole time."""
SIMILAR_MIN = 5
"""Minimum number of finished requests of a model from which its usual times are told."""
ALARM_MIN = 20
"""Minimum number of them from which requests are called slow."""
QUARTER = 0.25
SPREAD_FACTOR = 3.0
"""A time is far outside if it exceeds the upper quartile by this many distances between the quartiles."""
NEAR_S = 30.0
"""Requests that were in progress at most this many seconds before or after another one ran at about the same time."""
NEAR_MIN = 3
"""With fewer requests at about the same time, these are not compared."""
NEAR_MAX = 32
"""Largest number of requests at about the same time that are compared: the nearest by their arrival."""
MOST = 0.75
"""A slow request stands out among the slow ones if its weight is at least this share of the largest weight."""
OUTLIERS_MAX = 5
"""Maximum number of requests that stand out."""

_TOKENS: dict[str, Callable[[dict[str, Any]], int]] = {
    "tokenization": lambda one: one["prompt_tokens"],
    "prefill": lambda one: one["prompt_tokens"] - one["cached_tokens"],
    "decode": lambda one: one["completion_tokens"] - 1,
}
"""For each phase that takes longer with more tokens: the number of these tokens."""
_COMPUTING = frozenset({"admission", "tokenization", "engine_queue", "prefill", "decode", "delivery"})
"""Phases that take longer on a busy machine; the wait in an engine's queue ends with the running step."""


def mark_slow(summaries: list[dict[str, Any]]) -> None:
    """Sets the field `slow` of each summary (`timeline.summary_of`): None, or why the request is slow.

    `phase`: the phase that exceeded its usual time most. `duration_s`: of this phase; `usual_s`: its usual time;
    `excess_s`: sum of the seconds beyond the usual times of all phases that were slow.

    Also sets `token_s`: the seconds of `decode` for each token of output after the first, None without such a token;
    and `usual_token_s`: what is usual for the model, None if unknown.
    """
    by_model: dict[str, list[dict[str, Any]]] = {}
    for one in summaries:
        by_model.setdefault(one["model"], []).append(one)
    for similar in by_model.values():
        finished = [one for one in similar if one["state"] == "completed"]
        usual, near = _Usual(finished), _Near(finished)
        token_s = usual.token_s
        for one in similar:
            one["slow"] = _slow(one, usual, near)
            one["token_s"], one["usual_token_s"] = _token_s(one), token_s


def mark_outliers(summaries: list[dict[str, Any]]) -> None:
    """Sets the field `stands_out` of each `slow`: whether the request is among the few slowest of these requests.

    The excess is weighted with its share of the request's time. So among many requests that waited equally long, those
    stand out that needed the least time besides the wait.
    """
    slow = sorted((one for one in summaries if one.get("slow")), key=_weight, reverse=True)
    for number, one in enumerate(slow):
        one["slow"]["stands_out"] = number < OUTLIERS_MAX and _weight(one) >= MOST * _weight(slow[0])


def usual_token_s(summaries: list[dict[str, Any]]) -> float | None:
    """Returns the usual seconds of `decode` for each token of output, of requests of one model; None if unknown."""
    return _Usual([one for one in summaries if one["state"] == "completed"]).token_s


class _Times:
    """The times of one phase in some requests: their quartiles, as durations and for each token."""

    def __init__(self, phase: str, requests: list[dict[str, Any]]) -> None:
        self._count = _TOKENS.get(phase)
        self.durations_s = sorted(one["phases"].get(phase, 0.0) for one in requests)
        self.per_token_s: list[float] = []
        if (count := self._count) is not None:
            having = (one for one in requests if phase in one["phases"] and count(one) > 0)
            self.per_token_s = sorted(one["phases"][phase] / count(one) for one in having)

    def usual_s(self, request: dict[str, Any]) -> float:
        """Returns the lower quartile for a request with these numbers of tokens."""
        count = self._num_tokens(request)
        return max(_quantile(self.durations_s, QUARTER), _quantile(self.per_token_s, QUARTER) * count if count else 0.0)

    def median_s(self, request: dict[str, Any]) -> float:
        """Returns the median for a request with these numbers of tokens."""
        count = self._num_tokens(request)
        return max(_quantile(self.durations_s, 0.5), _quantile(self.per_token_s, 0.5) * count if count else 0.0)

    def fence_s(self, request: dict[str, Any]) -> float:
        """Returns the time above which a request with these numbers of tokens is far outside of the spread."""
        if count := self._num_tokens(request):
            return _fence(self.per_token_s) * count
        return _fence(self.durations_s)

    def _num_tokens(self, request: dict[str, Any]) -> int:
        return max(0, self._count(request)) if self._count is not None and self.per_token_s else 0


class _Usual:
    """The usual time of each phase among finished requests of one model. Unknown with too few of them."""

    def __init__(self, finished: list[dict[str, Any]]) -> None:
        self.is_known, self.may_alarm = len(finished) >= SIMILAR_MIN, len(finished) >= ALARM_MIN
        self._times = {phase: _Times(phase, finished) for phase in {name for one in finished for name in one["phases"]}}

    def of(self, phase: str, request: dict[str, Any]) -> float:
        """Returns the usual seconds of a phase for a request with these numbers of tokens."""
        times = self._times.get(phase)
        return times.usual_s(request) if times is not None else 0.0

    def fence_s(self, phase: str, request: dict[str, Any]) -> float:
        """See `_Times`; 0 for a phase that no finished request had."""
        times = self._times.get(phase)
        return times.fence_s(request) if times is not None else 0.0

    @property
    def token_s(self) -> float | None:
        """The usual seconds of `decode` for each token of output; None if unknown."""
        times = self._times.get("decode")
        if not self.is_known or times is None or not times.per_token_s:
            return None
        return round(_quantile(times.per_token_s, QUARTER), 6)


class _Near:
    """Finds the finished requests of one model that ran at about the same time as another one."""

    def __init__(self, finished: list[dict[str, Any]]) -> None:
        self._by_arrival = sorted(finished, key=_arrival)
        self._arrivals = [_arrival(one) for one in self._by_arrival]

    def usual_s(self, phase: str, request: dict[str, Any]) -> float:
        """Returns the median seconds of a phase among these requests; 0 if there are fewer than NEAR_MIN."""
        near = [one for one in self._around(request) if one is not request]
        return _Times(phase, near).median_s(request) if len(near) >= NEAR_MIN else 0.0

    def _around(self, request: dict[str, Any]) -> Iterable[dict[str, Any]]:
        began, ended = _arrival(request) - NEAR_S, _arrival(request) + request["duration_s"] + NEAR_S
        here = bisect_left(self._arrivals, _arrival(request))
        first = max(0, here - NEAR_MAX)
        last = min(bisect_right(self._arrivals, ended), here + NEAR_MAX)
        found = (one for one in self._by_arrival[first:last] if _arrival(one) + one["duration_s"] >= began)
        return sorted(found, key=lambda one: abs(_arrival(one) - _arrival(request)))[: NEAR_MAX + 1]


def _arrival(request: dict[str, Any]) -> float:
    return request["created"]


def _quantile(ordered: list[float], share: float) -> float:
    """Returns the value that this share of the values does not exceed; 0 without values."""
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def _fence(ordered: list[float]) -> float:
    upper = _quantile(ordered, 1.0 - QUARTER)
    return upper + SPREAD_FACTOR * (upper - _quantile(ordered, QUARTER))


def _weight(request: dict[str, Any]) -> float:
    excess_s = request["slow"]["excess_s"]
    return excess_s * excess_s / max(request["duration_s"], excess_s)


def _token_s(request: dict[str, Any]) -> float | None:
    num_tokens = _TOKENS["decode"](request)
    return round(request["phases"].get("decode", 0.0) / num_tokens, 6) if num_tokens > 0 else None


def _slow(request: dict[str, Any], usual: _Usual, near: _Near) -> dict[str, Any] | None:
    if not usual.may_alarm:
        return None
    least_s = max(SLOW_S, SLOW_SHARE * request["duration_s"])
    excesses = {
        phase: duration_s - usual_s
        for phase, duration_s in request["phases"].items()
        if duration_s >= SLOW_FACTOR * (usual_s := usual.of(phase, request))
    }
    if max(excesses.values(), default=0.0) < least_s:
        return None  # most requests: the others need not be looked at
    for phase in [name for name in excesses if name in _COMPUTING]:
        duration_s = request["phases"][phase]
        if duration_s < max(usual.fence_s(phase, request), SLOW_FACTOR * near.usual_s(phase, request)):
            del excesses[phase]
    phase = max(excesses, key=excesses.__getitem__, default="")
    if excesses.get(phase, 0.0) < least_s:
        return None
    return {
        "phase": phase,
        "duration_s": request["phases"][phase],
        "usual_s": round(usual.of(phase, request), 6),
        "excess_s": round(sum(excesses.values()), 6),
    }
