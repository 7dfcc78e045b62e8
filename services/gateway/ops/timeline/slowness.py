"""Which requests of a list were slow, and by which phase. Pure.

A phase is compared with the same phase of the other finished requests of the model. Its usual time is the lower
quartile of these, which a quarter of the requests do not exceed. The quartile is used in place of the median, so that
the usual time does not grow while most requests wait. Phases that take longer with more tokens are also compared by
their time for each token.
"""

from collections.abc import Callable
from typing import Any

SLOW_S = 0.5
"""A slow phase exceeds its usual time by at least this many seconds."""
SLOW_FACTOR = 3.0
"""A slow phase takes at least this many times its usual time."""
SLOW_SHARE = 0.2
"""A slow phase exceeds its usual time by at least this share of the request's whole time."""
SIMILAR_MIN = 5
"""Minimum number of finished requests of a model from which its usual times are computed."""
QUARTER = 0.25
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


def mark_slow(summaries: list[dict[str, Any]]) -> None:
    """Sets the field `slow` of each summary (`timeline.summary_of`): None, or why the request is slow.

    `phase`: the phase that exceeded its usual time most; if it is `decode` and had a move or a preemption, `move` or
    `preemption`. `duration_s`: of this phase; `usual_s`: its usual time; `excess_s`: sum of the seconds beyond the
    usual times of all phases that took at least SLOW_FACTOR times as long as usual.

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

    The excess is weighted with its share of the request's time. So among many requests that waited equally long, those
    stand out that needed the least time besides the wait.
    """
    slow = sorted((one for one in summaries if one.get("slow")), key=_weight, reverse=True)
    for number, one in enumerate(slow):
        one["slow"]["stands_out"] = number < OUTLIERS_MAX and _weight(one) >= MOST * _weight(slow[0])


def usual_token_s(summaries: list[dict[str, Any]]) -> float | None:
    """Returns the usual seconds of `decode` for each token of output, of requests of one model; None if unknown."""
    return _Usual([one for one in summaries if one["state"] == "completed"]).token_s


class _Usual:
    """The usual time of each phase among finished requests of one model. Unknown with too few of them."""

    def __init__(self, finished: list[dict[str, Any]]) -> None:
        self.is_known = len(finished) >= SIMILAR_MIN
        self._durations_s: dict[str, float] = {}
        self._per_token_s: dict[str, float] = {}
        for phase in {phase for one in finished for phase in one["phases"]}:
            self._durations_s[phase] = _quarter([one["phases"].get(phase, 0.0) for one in finished])
            if (count := _TOKENS.get(phase)) is not None:
                having = [one for one in finished if phase in one["phases"] and count(one) > 0]
                if having:
                    self._per_token_s[phase] = _quarter([one["phases"][phase] / count(one) for one in having])

    def of(self, phase: str, request: dict[str, Any]) -> float:
        """Returns the usual seconds of a phase for a request with these numbers of tokens."""
        count = _TOKENS[phase](request) if phase in self._per_token_s else 0
        return max(self._durations_s.get(phase, 0.0), self._per_token_s.get(phase, 0.0) * count)

    @property
    def token_s(self) -> float | None:
        """The usual seconds of `decode` for each token of output; None if unknown."""
        found = self._per_token_s.get("decode") if self.is_known else None
        return found and round(found, 6)


def _weight(request: dict[str, Any]) -> float:
    excess_s = request["slow"]["excess_s"]
    return excess_s * excess_s / max(request["duration_s"], excess_s)


def _token_s(request: dict[str, Any]) -> float | None:
    num_tokens = _TOKENS["decode"](request)
    return round(request["phases"].get("decode", 0.0) / num_tokens, 6) if num_tokens > 0 else None


def _quarter(values: list[float]) -> float:
    """Returns the value that a quarter of the values do not exceed."""
    return sorted(values)[int(QUARTER * (len(values) - 1))]


def _slow(request: dict[str, Any], usual: _Usual) -> dict[str, Any] | None:
    if not usual.is_known:
        return None
    excesses = {
        phase: duration_s - usual_s
        for phase, duration_s in request["phases"].items()
        if duration_s >= SLOW_FACTOR * (usual_s := usual.of(phase, request))
    }
    phase = max(excesses, key=excesses.__getitem__, default="")
    if excesses.get(phase, 0.0) < max(SLOW_S, SLOW_SHARE * request["duration_s"]):
        return None
    happened = "move" if request["moves"] else "preemption" if request["preemptions"] else phase
    return {
        "phase": happened if phase == "decode" else phase,
        "duration_s": request["phases"][phase],
        "usual_s": round(usual.of(phase, request), 6),
        "excess_s": round(sum(excesses.values()), 6),
    }
