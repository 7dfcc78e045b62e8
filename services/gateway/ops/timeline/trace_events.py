"""Converts a timeline to the Trace Event Format, which Perfetto and speedscope open. Pure.

One process stands for the gateway, with a thread for the phases of the request and one for each sequence's output; one
process for each engine, with a thread for each placement. Times are microseconds since the request's arrival, as in the
timeline (see `timeline.timeline` about clocks).
"""

from collections.abc import Iterator
from typing import Any

from antiphon.shared.version import __version__

_GATEWAY, _FIRST_ENGINE = 1, 2
_PHASES = 1
_STEP_FACTS = (
    "step", "position", "num_tokens", "num_output", "batch_size", "batch_tokens", "num_waiting", "num_free_blocks"
)  # fmt: skip


def trace_events_of(timeline: dict[str, Any]) -> dict[str, Any]:
    """Returns the trace of one request from its timeline (`timeline_of`)."""
    summary = ("id", "model", "state", "error_code", "prompt_tokens", "cached_tokens", "completion_tokens")
    return {
        "traceEvents": [*_phases(timeline), *_sequences(timeline)],
        "displayTimeUnit": "ms",
        "otherData": {"producer": f"antiphon {__version__}", **{name: timeline[name] for name in summary}},
    }


def _phases(timeline: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield _name("process_name", _GATEWAY, 0, f"gateway {timeline['gateway']}".strip())
    yield _name("thread_name", _GATEWAY, _PHASES, "phases")
    yield _slice(f"request {timeline['id']}", _GATEWAY, _PHASES, 0.0, timeline["duration_s"], {})
    began = 0.0
    for name, duration in timeline["phases"].items():
        yield _slice(name.replace("_", " "), _GATEWAY, _PHASES, began, began + duration, {})
        began += duration


def _sequences(timeline: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pids: dict[str, int] = {}
    for sequence in timeline["sequences"]:
        thread = _PHASES + 1 + sequence["index"]
        yield _name("thread_name", _GATEWAY, thread, f"output of sequence {sequence['index']}")
        for piece in sequence["pieces"]:
            yield from _piece(piece, thread)
        for attempt in sequence["attempts"]:
            engine = attempt["engine"]
            if engine not in pids:
                pids[engine] = _FIRST_ENGINE + len(pids)
                yield _name("process_name", pids[engine], 0, f"engine {engine}")
            yield from _attempt(attempt, sequence["index"], pids[engine], timeline["duration_s"])


def _piece(piece: dict[str, Any], thread: int) -> Iterator[dict[str, Any]]:
    count = piece["num_tokens"]
    name = f"token {piece['position']}" if count == 1 else f"tokens {piece['position']}–{piece['position'] + count - 1}"
    facts = {"position": piece["position"], "num_tokens": count}
    arrived, written = piece["arrived_s"], piece["written_s"]
    if written is None:
        yield {**_event("i", f"{name} arrived", _GATEWAY, thread, arrived, facts), "s": "t"}
    else:
        yield _slice(f"{name} to the client", _GATEWAY, thread, arrived, written, facts)


def _attempt(attempt: dict[str, Any], index: int, pid: int, request_s: float) -> Iterator[dict[str, Any]]:
    # Trace viewers distinguish threads by number, so each placement has its own, even if a sequence comes back to an
    # engine.
    thread = 1000 * index + attempt["attempt"]
    yield _name("thread_name", pid, thread, f"sequence {index}, placement {attempt['attempt']}")
    steps, placed = attempt["steps"], attempt["placed_s"]
    ended = max((one["end_s"] for one in steps), default=request_s)
    if attempt["lost_s"] is not None:
        ended = attempt["lost_s"]
    facts = {"detokenizer": attempt["detokenizer"], "lost": attempt["reason"]}
    yield _slice("placed", pid, thread, placed, max(placed, ended), facts)
    for step in steps:
        if step["preempted_before"]:
            yield {**_event("i", "preempted", pid, thread, step["start_s"], {}), "s": "t"}
        yield _slice(step["kind"], pid, thread, step["start_s"], step["end_s"], {one: step[one] for one in _STEP_FACTS})


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, start_s: float, end_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    return {**_event("X", name, pid, tid, start_s, facts), "dur": round(1e6 * max(0.0, end_s - start_s), 3)}


def _event(kind: str, name: str, pid: int, tid: int, time_s: float, facts: dict[str, Any]) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": pid, "tid": tid, "ts": round(1e6 * time_s, 3), "args": facts}
