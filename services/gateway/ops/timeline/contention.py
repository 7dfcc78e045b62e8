"""Which requests an engine computed while another one waited for it. Pure.

The intervals of all requests, also those of other gateways, are compared by Unix time, so they are only as exact as the
clocks of the machines agree. They decide which requests are named, and for how long an engine computed each of them
during the wait.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

WAIT_S = 0.2
"""Shortest wait for engines, seconds, for which other requests are looked up."""
WAIT_SHARE = 0.1
"""The same as a share of the request's whole time."""
NAMED_MAX = 20
"""Maximum number of requests that are named; further ones are only counted."""

_BEFORE_ENGINE = ("turn", "admission", "tokenization", "gateway_queue", "engine_queue")
_WAITS = ("gateway_queue", "engine_queue")


@dataclass(frozen=True, slots=True)
class Wait:
    """A request's wait for engines, in seconds since its arrival. `engine`: empty for all engines of the model."""

    from_s: float
    to_s: float
    engine: str


def wait_of(timeline: dict[str, Any]) -> Wait | None:
    """Returns the wait for engines of a request with this timeline; None if it hardly waited."""
    spans = [one for one in timeline["spans"] if one["cause"] in _WAITS]
    waited_s = sum(one["end_s"] - one["start_s"] for one in spans)
    if not spans or waited_s < max(WAIT_S, WAIT_SHARE * timeline["duration_s"]):
        return None
    longest = max(spans, key=lambda one: one["end_s"] - one["start_s"])
    engines = {one["where"] for one in spans if one["end_s"] - one["start_s"] >= WAIT_SHARE * waited_s}
    # In the gateway, a request waits for any engine; in the queue of an engine, it waits for this engine.
    engine = longest["where"] if len(engines) == 1 else None
    return Wait(spans[0]["start_s"], spans[-1]["end_s"], engine or "")


def during(timeline: dict[str, Any], wait: Wait) -> tuple[float, float]:
    """Returns the Unix times between which the request waited."""
    return timeline["created"] + wait.from_s, timeline["created"] + wait.to_s


def contention(timeline: dict[str, Any], wait: Wait, others: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Returns what engines computed during the wait, the field `meanwhile` of a timeline; None if nothing is known.

    `others`: summaries of requests (`timeline.summary_of`), of all keys. `key`: requests of other keys are counted but
    not named; empty: all are named.

    The field has `num_requests`, of which `num_hidden` are of other keys; `requests`: up to NAMED_MAX of them, sorted
    by the seconds for which engines computed them during the wait (`overlap_s`), longest first; `from_s`, `to_s`,
    `engine`: the wait; `text`: all this in a sentence.
    """
    since, until = during(timeline, wait)
    others = [one for one in others if one["id"] != timeline["id"] and one["model"] == timeline["model"]]
    there = [one for one in others if not wait.engine or wait.engine in one["engines"]]
    found = [(overlap_s, one) for one in there if (overlap_s := _overlap_s(one, since, until)) > 0]
    if not found:
        return None
    found.sort(key=lambda each: each[0], reverse=True)
    seen = [(overlap_s, one) for overlap_s, one in found if key in ("", one["key"])]
    return {
        "from_s": wait.from_s,
        "to_s": wait.to_s,
        "engine": wait.engine or None,
        "num_requests": len(found),
        "num_hidden": len(found) - len(seen),
        "requests": [_named(one, overlap_s) for overlap_s, one in seen[:NAMED_MAX]],
        "text": _text(wait, [one for _, one in seen], len(found)),
    }


def _overlap_s(one: dict[str, Any], since: float, until: float) -> float:
    """Returns for how many of these seconds an engine computed a request."""
    phases = one["phases"]
    if "prefill" not in phases and "decode" not in phases:
        return 0.0
    began = one["created"] + sum(phases.get(name, 0.0) for name in _BEFORE_ENGINE)
    ended = one["created"] + one["duration_s"] - phases.get("delivery", 0.0)
    return min(ended, until) - max(began, since)


def _named(one: dict[str, Any], overlap_s: float) -> dict[str, Any]:
    facts = ("id", "client_request_id", "key", "state", "engines", "completion_tokens")
    return {**{name: one[name] for name in facts}, "overlap_s": round(overlap_s, 6)}


def _text(wait: Wait, seen: list[dict[str, Any]], count: int) -> str:
    who = f"{wait.engine} was" if wait.engine else "the engines were"
    [(key, most)] = Counter(one["key"] for one in seen).most_common(1) or [("", 0)]
    more = f", {count - len(seen)} of other API keys" if count > len(seen) else ""
    more = more or (f", {most} of the key {key}" if most < count else "")
    return f"Meanwhile, {who} computing {count} other request{'' if count == 1 else 's'}{more}."
