"""Tells in plain words what a request has spent its time on. Pure.

The phases of a request (`timeline.phases_of`) follow its first placement. Here the time from its arrival to its end is
divided among causes, so that the time of a move or a preemption, which lies within the phase `decode`, is shown
separately. If a request has several sequences, only the one that ended last is explained, because the request waited
for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from shared.batch_rows import num_reserved_rows

MOST, ALSO = 0.5, 0.2
"""Shares of the request's whole time. A cause from the first share on took "most of the time"; a further cause from the
second share on is named too."""
FEW_STEPS = 10
"""A long step is reported only among at least this many steps: of fewer, one may well take a fifth of the time."""

UNKNOWN_LACK = "Its batch had no place, or too few KV blocks were free."
NO_LACK = (
    "The batch had a place and enough KV blocks were free: the prompts of others came first, or the engine stood still."
)
TWO_QUEUES = (
    "It waited twice because an engine takes more sequences than its batch has places: the next ones are there already "
    "when a place becomes free."
)

TOKENIZER_CALL_S, TOKENS_PER_S = 0.1, 10_000
"""Duration of one call in seconds, and a rate, which slow machines reach too. Tokenizing that takes longer than both
allow has another cause than the length of the prompt."""

ENDINGS = {
    "client_closed_request": "the client closed the connection",
    "client_stopped_reading": "the client did not read the answer",
    "cancelled_by_api": "a call of the API cancelled it",
    "stream_taken": "another connection or gateway continued it, or a call of the API cancelled it",
    "draining": "the gateway was shutting down",
    "batch_stopped": "its batch was cancelled, has expired, or goes on at another gateway",
    "deadline_exceeded": "it did not end within its timeout",
    "server_is_overloaded": "the server had no room for it",
    "no_engine": "no engine of the model was running",
    "no_tokenizer": "no tokenizer of the model answered",
    "engine_failure": "its engine failed",
}
"""Causes of an early end in words: codes of errors, and of cancellations (`Generation.cancel`)."""


@dataclass(slots=True, kw_only=True)
class _Cause:
    """One cause. `where`: the engine, or the tokenizer; of a move: both engines.

    `num_tokens`: for `decode`, the number of tokens that arrived in this time.
    """

    name: str
    where: str = ""
    duration_s: float = 0.0
    num_tokens: int = 0
    why: str = ""
    attempt: dict[str, Any] | None = None
    """Of `engine_queue`: the placement on the engine, if its first step is known."""
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(slots=True)
class _Span:
    """A part of the time without a gap, in seconds since the arrival of the request, and its cause."""

    cause: _Cause
    start_s: float
    end_s: float


class _Division:
    """Divides the time up to now among causes. `until` assigns the time since its previous call to a cause."""

    def __init__(self) -> None:
        self.causes: list[_Cause] = []
        self.spans: list[_Span] = []
        """The divided time as intervals in order, without gaps."""
        self._at_s = 0.0

    def until(self, time_s: float | None, name: str, where: str = "", why: str = "") -> _Cause | None:
        """Assigns the time up to `time_s` to the one cause with this name and place, and returns the cause.

        Returns None if `time_s` is None, because that time is not reached yet.
        """
        if time_s is None:
            return None
        found = next((one for one in self.causes if (one.name, one.where) == (name, where)), None)
        if found is None:
            found = _Cause(name=name, where=where)
            self.causes.append(found)
        found.why = found.why or why
        if time_s > self._at_s:
            found.duration_s += time_s - self._at_s
            if self.spans and self.spans[-1].cause is found:
                self.spans[-1].end_s = time_s
            else:
                self.spans.append(_Span(found, self._at_s, time_s))
            self._at_s = time_s
        return found


def explain(timeline: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a timeline that tell where the time went.

    `explanation`: sentences, the most important one first. `causes`: the parts of the time, in their order, with
    `cause`, `where`, `text` and `duration_s` in seconds; they add up to `duration_s` of the timeline. `spans`: which
    cause each moment belongs to: `cause`, `where`, `start_s`, `end_s`, without gaps from the arrival to the end.
    """
    sequence = max(timeline["sequences"], key=_last_moment, default=None)
    division = _divided(timeline, sequence)
    causes = [one for one in division.causes if one.duration_s > 0]
    return {
        "explanation": list(_sentences(timeline, sequence, causes)),
        "causes": [
            {
                "cause": one.name,
                "where": one.where or None,
                "text": _text(one, timeline),
                "duration_s": round(one.duration_s, 6),
            }
            for one in causes
        ],
        "spans": [
            {
                "cause": one.cause.name,
                "where": one.cause.where or None,
                "start_s": round(one.start_s, 6),
                "end_s": round(one.end_s, 6),
            }
            for one in division.spans
        ],
    }


def _last_moment(sequence: dict[str, Any]) -> float:
    pieces, attempts = sequence["pieces"], sequence["attempts"]
    return pieces[-1]["arrived_s"] if pieces else attempts[-1]["placed_s"] if attempts else 0.0


def _divided(timeline: dict[str, Any], sequence: dict[str, Any] | None) -> _Division:
    division, total = _Division(), timeline["duration_s"]
    has_ended = timeline["state"] != "running"
    division.until(timeline["turn_s"], "turn")
    for name in ("admission", "tokenization"):
        where = _tokenizer(timeline) if name == "tokenization" else ""
        if division.until(timeline["admitted_s" if name == "admission" else "tokenized_s"], name, where) is None:
            division.until(total, name, where)
            return division
    before: dict[str, Any] | None = None
    for attempt in sequence["attempts"] if sequence else ():
        _divide_attempt(division, attempt, before, sequence["pieces"] if sequence else [], total, has_ended)
        before = attempt
    if before is None or (before["lost_s"] is not None and not has_ended):
        division.until(total, "gateway_queue")
    division.until(total, "delivery")
    return division


def _tokenizer(timeline: dict[str, Any]) -> str:
    """Returns the tokenizer that had the request; empty if it is unknown, or if several had it."""
    answered, silent = timeline["tokenizer"], set(_silent(timeline))
    if not timeline["silent_tokenizers"]:
        return answered or ""
    return silent.pop() if len(silent) == 1 and answered in (None, *silent) else ""


def _divide_attempt(
    division: _Division,
    attempt: dict[str, Any],
    before: dict[str, Any] | None,
    pieces: list[dict[str, Any]],
    total: float,
    has_ended: bool,
) -> None:
    engine, placed, lost = attempt["engine"], attempt["placed_s"], attempt["lost_s"]
    end = total if lost is None else lost
    arrived = [one for one in pieces if placed <= one["arrived_s"] <= end]
    first = arrived[0]["arrived_s"] if arrived else None
    steps = attempt["steps"]
    if before is not None and any(one["arrived_s"] < placed for one in pieces):
        # The client waits from the last token on one engine to the first on the other.
        where = f"{before['engine']} to {engine}"
        division.until(placed, "move", where, before["reason"] or "")
        division.until(end if first is None else first, "move", where)
    else:
        division.until(placed, "gateway_queue")
        if steps:
            cause = division.until(min(steps[0]["start_s"], end if first is None else first), "engine_queue", engine)
            assert cause is not None
            cause.attempt = attempt
        began = bool(steps) or first is not None
        cause = division.until(end if first is None else first, "prefill" if began else "engine_queue", engine)
        if cause is not None and began:
            cause.steps = [one for one in steps if first is None or one["start_s"] < first]
    if first is None:
        return
    _divide_output(division, engine, steps, arrived)
    if lost is None and not has_ended:
        division.until(total, "decode", engine)


def _divide_output(
    division: _Division, engine: str, steps: list[dict[str, Any]], arrived: list[dict[str, Any]]
) -> None:
    """Divides the time from the first to the last output of one placement."""
    first, last = arrived[0]["arrived_s"], arrived[-1]["arrived_s"]
    for one in steps:
        if one["preempted_before"] and one["start_s"] > first:
            began, ended = max(first, one["end_s"] - one["gap_s"]), min(one["end_s"], last)
            division.until(min(began, ended), "decode", engine)
            division.until(ended, "preemption", engine)
    decode = division.until(last, "decode", engine)
    assert decode is not None
    decode.num_tokens += sum(one["num_tokens"] for one in arrived[1:])
    decode.steps = [one for one in steps if one["end_s"] > first]


def _sentences(timeline: dict[str, Any], sequence: dict[str, Any] | None, causes: list[_Cause]) -> Iterator[str]:
    total = timeline["duration_s"]
    by_time = sorted(causes, key=lambda one: one.duration_s, reverse=True)
    if by_time:
        first = by_time[0]
        begin = "Most of the time" if first.duration_s >= MOST * total else "The longest part of the time"
        if timeline["state"] == "running":
            begin = f"So far, {begin[0].lower()}{begin[1:]}"
        yield f"{begin}: {_text(first, timeline)} ({_s(first.duration_s)} of {_s(total)})."
        yield from _detail(first, timeline)
    named = [one for at, one in enumerate(by_time) if at and (one.duration_s >= ALSO * total or _is_event(one))]
    for one in named:
        text = _text(one, timeline)
        yield f"{text[0].upper()}{text[1:]} took {_s(one.duration_s)}."
        if one.duration_s >= ALSO * total:
            yield from _detail(one, timeline)
    if {"gateway_queue", "engine_queue"} <= {one.name for one in causes if one.duration_s >= ALSO * total}:
        yield TWO_QUEUES
    yield from _early_losses(sequence)
    if timeline["state"] in ("failed", "cancelled"):
        yield _ending(timeline)
    if sequence is not None and len(timeline["sequences"]) > 1:
        yield f"These are the times of output {sequence['index']}, which ended last."


def _early_losses(sequence: dict[str, Any] | None) -> Iterator[str]:
    """Yields which engines were lost before the first output; later losses are causes of their own (`move`)."""
    pieces, attempts = (sequence["pieces"], sequence["attempts"]) if sequence else ([], [])
    for one in attempts:
        if one["lost_s"] is not None and not any(piece["arrived_s"] <= one["lost_s"] for piece in pieces):
            yield f"It had to leave {one['engine']} after {_s(one['lost_s'])}: {one['reason']}."


def _is_event(cause: _Cause) -> bool:
    """Whether something happened that a reader should know of, however short it was."""
    return cause.name in ("move", "preemption")


def _text(cause: _Cause, timeline: dict[str, Any]) -> str:
    name, where = cause.name, cause.where
    if name == "prefill":
        cached = timeline["cached_tokens"]
        known = f", {cached} of them from the cache," if cached else ""
        return f"computing the prompt of {_count(timeline['prompt_tokens'], 'token')}{known} on {where}"
    if name == "tokenization":
        return "turning the text into tokens" + (f" on {where}" if where else "")
    if name == "move":
        return f"moving from {where}" + (f" ({cause.why})" if cause.why else "")
    return {
        "turn": "waiting until the gateway began with the request",
        "admission": "reading and checking the request, and waiting for the limits of its key",
        "gateway_queue": "waiting in the gateway for an engine with room",
        "engine_queue": f"waiting in the queue of {where}",
        "decode": f"generating {_count(cause.num_tokens, 'token')} on {where}",
        "preemption": f"waiting on {where}, which needed the KV blocks for others",
        "delivery": "writing the rest of the answer to the client",
    }[name]


def _detail(cause: _Cause, timeline: dict[str, Any]) -> Iterator[str]:
    """Yields sentences that explain a cause that took a large part of the time."""
    if cause.name == "turn":
        yield "Many requests arrived at the same time: a gateway begins few at a time, and the keys take turns."
    if cause.name == "tokenization":
        yield from _tokenization_detail(cause, timeline)
    if cause.name == "engine_queue":
        yield from _engine_queue_detail(cause.attempt)
    if cause.name == "prefill":
        others = sum(one["batch_tokens"] - one["num_tokens"] for one in cause.steps)
        if others > sum(one["num_tokens"] for one in cause.steps):
            yield f"The same steps computed {_count(others, 'token')} of other sequences."
    if cause.name == "gateway_queue":
        yield "All engines of the model had as many sequences as they take: more engines shorten this."
    if cause.name == "decode" and cause.num_tokens and cause.steps:
        sizes = sum(one["batch_size"] for one in cause.steps) / len(cause.steps)
        shared = "alone in its batch" if sizes < 1.5 else f"in batches of about {sizes:.0f} sequences"
        usual_s = timeline["usual_token_s"]
        usual = f" (usual: {_s(usual_s)})" if usual_s else ""
        yield f"That is {_s(cause.duration_s / cause.num_tokens)} for each token{usual}, {shared}."
        longest = max(one["end_s"] - one["start_s"] for one in cause.steps)
        if longest >= ALSO * cause.duration_s and len(cause.steps) >= FEW_STEPS:
            yield f"One step alone took {_s(longest)}: the engine stood still, or its machine was busy."
    if cause.name == "move":
        yield "What had been computed was computed again there."


def _engine_queue_detail(attempt: dict[str, Any] | None) -> Iterator[str]:
    if attempt is None:
        yield UNKNOWN_LACK
        return
    yield _full_batch(attempt) or _blocks(attempt) or UNKNOWN_LACK
    if behind := attempt["steps"][0]["num_waiting"]:
        yield f"{behind} more waited when it began."


def _full_batch(attempt: dict[str, Any]) -> str:
    """Returns a sentence on the full batch for which a sequence waited; empty if it was not full, or if unknown."""
    places, taken = attempt["batch_places"] or 0, attempt["batch_size_before"]
    if taken is None:  # the sequence's own first step had about as many
        taken = attempt["steps"][0]["batch_size"]
    if not places or taken < places - num_reserved_rows(places):
        return ""
    if taken < places:
        return f"{taken} of the {places} places of its batch were taken; the rest is kept for API keys that have none."
    return f"All {places} places of its batch were taken." if places > 1 else "Its batch takes one sequence at a time."


def _blocks(attempt: dict[str, Any]) -> str:
    """Returns a sentence on whether a sequence that had a place waited for KV blocks; empty if that is unknown."""
    free, size = attempt["free_blocks_before"], attempt["block_size"]
    num_tokens = 0
    for one in attempt["steps"]:
        num_tokens += one["num_tokens"]
        if one["num_output"]:
            break
    if free is None or not size or not attempt["batch_places"]:
        return ""
    needed = -(-num_tokens // size)
    return (
        f"Too few KV blocks were free: its prompt needs {needed}, and {free} were free." if needed > free else NO_LACK
    )


def _tokenization_detail(cause: _Cause, timeline: dict[str, Any]) -> Iterator[str]:
    """Yields why the prompt's tokens took so long, if the length of the prompt is not the reason."""
    silent, tries = " and ".join(_silent(timeline)), timeline["silent_tokenizers"]
    if timeline["tokenized_s"] is None:
        yield f"{silent} did not answer." if silent else "No tokenizer has answered."
        if tries:
            yield f"The request went {_asked(tries)}."
    elif cause.duration_s > TOKENIZER_CALL_S + timeline["prompt_tokens"] / TOKENS_PER_S:
        count = _count(timeline["prompt_tokens"], "token")
        if timeline["tokenizer"] is None:
            yield f"{count} need far less: the tokenizers had other work, stood still or were being started."
            return
        who = silent or ("a tokenizer" if tries else timeline["tokenizer"])
        yield f"{count} need far less: {who} stood still or had other work."
        if tries:
            again = " again" if tries[-1]["tokenizer"] == timeline["tokenizer"] else ""
            yield f"The request went {_asked(tries)}, then to {timeline['tokenizer']}{again}, which answered."


def _silent(timeline: dict[str, Any]) -> list[str]:
    """Returns the known tokenizers that did not answer in time, each once."""
    return list(dict.fromkeys(one["tokenizer"] for one in timeline["silent_tokenizers"] if one["tokenizer"]))


def _asked(tries: list[dict[str, Any]]) -> str:
    """Returns which tokenizers were asked in turn without an answer."""
    parts: list[str] = []
    for name, group in groupby(tries, key=lambda one: one["tokenizer"]):
        waits = [one["waited_s"] for one in group]
        often, together = (f"{len(waits)} times ", " in all") if len(waits) > 1 else ("", "")
        parts.append(
            f"{often}to {name or 'one of the tokenizers'}, which did not answer for {_s(sum(waits))}{together}"
        )
    return ", then ".join(parts)


def _ending(timeline: dict[str, Any]) -> str:
    """Returns a sentence on the end of a request that was not completed."""
    code, how = timeline["error_code"], "failed" if timeline["state"] == "failed" else "was cancelled"
    why = f": {ENDINGS[code]} ({code})" if code in ENDINGS else f": {code}" if code else ""
    return f"It {how} after {_s(timeline['duration_s'])}{why}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _s(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
