"""Tells in plain words what a request has spent its time on. Pure.

The phases of a request (`timeline.phases_of`) follow its first placement. Here the time from its arrival to its end is
divided among causes, so that the time of a move or a preemption, which lies within the phase `decode`, is shown
separately. If a request has several sequences, only the one that ended last is explained, because the request waited
for it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from antiphon.shared.batch_rows import num_reserved_rows
from antiphon.shared.messages import KvMiss

MOST, ALSO = 0.5, 0.2
"""Shares of the request's whole time. A cause from the first share on took "most of the time"; a further cause from the
second share on is named too."""
UNKNOWN_LACK = "Its batch had no place, or too few KV blocks were free."
NO_LACK = (
    "The batch had a place and enough KV blocks were free: the prompts of others came first, or the engine stood still."
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

ORIGINS = {
    "cache": "were in its KV cache",
    "disk": "were read from the disk",
    "prefill_engine": "came from a prefill engine",
}
"""Where KV came from, by the fields of a placement's `kv`."""
MISSES: dict[KvMiss, str] = {
    "last": "the last block always is",
    "new": "nobody had computed them, or what was computed is gone",
    "short": "so few are computed sooner than they are read",
    "no_room": "there was no host memory to read into (--swap-space)",
    "failed": "they could not be read",
    "no_state": "the state of the model at that place was not kept",
    "results": "the request needs results for each of them",
    "slow": "the disk takes longer than computing at present",
    "no_cache": "the engine has no prefix cache (--enable-prefix-caching)",
}


@dataclass(slots=True, kw_only=True)
class _Span:
    """A part of the time without a gap, in seconds since the arrival of the request.

    `where`: the engine, or the tokenizer; of a move: both engines. `attempt`: the placement on the engine.
    `num_tokens`: for `decode`, the number of tokens that arrived in this time.
    """

    cause: str
    where: str
    start_s: float
    end_s: float
    attempt: dict[str, Any] | None = None
    num_tokens: int = 0
    why: str = ""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class _Division:
    """Divides the time up to now among causes. `until` assigns the time since its previous call to a cause."""

    def __init__(self) -> None:
        self.spans: list[_Span] = []
        """The divided time as intervals in order, without gaps."""

    def until(self, time_s: float, cause: str, where: str = "", attempt: dict[str, Any] | None = None) -> _Span | None:
        """Assigns the time up to `time_s`, if there is any, and returns its span."""
        last = self.spans[-1] if self.spans else None
        began = last.end_s if last else 0.0
        if time_s <= began:
            return None
        if last is None or (last.cause, last.where) != (cause, where):
            last = _Span(cause=cause, where=where, start_s=began, end_s=time_s)
            self.spans.append(last)
        last.end_s, last.attempt = time_s, attempt
        return last


def explain(timeline: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a timeline that tell where the time went.

    `explanation`: sentences, the most important one first. `causes`: the parts of the time, in their order, with
    `cause`, `where`, `text` and `duration_s` in seconds; they add up to `duration_s` of the timeline. `spans`: which
    cause each moment belongs to: `cause`, `where`, `start_s`, `end_s`, without gaps from the arrival to the end.
    """
    sequence = max(timeline["sequences"], key=_last_moment, default=None)
    spans = _divided(timeline, sequence)
    causes = _causes(spans)
    return {
        "explanation": list(_sentences(timeline, sequence, causes)),
        "causes": [
            {**_place(one), "text": _text(one, timeline), "duration_s": _round(one.duration_s)} for one in causes
        ],
        "spans": [{**_place(one), "start_s": _round(one.start_s), "end_s": _round(one.end_s)} for one in spans],
    }


def _place(span: _Span) -> dict[str, Any]:
    return {"cause": span.cause, "where": span.where or None}


def _causes(spans: list[_Span]) -> list[_Span]:
    """Returns for each cause and place one span from its first moment, as long as all its spans together."""
    found: dict[tuple[str, str], _Span] = {}
    for one in spans:
        first = found.setdefault((one.cause, one.where), one)
        if first is not one:
            longer, num_tokens = first.end_s + one.duration_s, first.num_tokens + one.num_tokens
            found[one.cause, one.where] = replace(one, start_s=first.start_s, end_s=longer, num_tokens=num_tokens)
    return list(found.values())


def _last_moment(sequence: dict[str, Any]) -> float:
    pieces, attempts = sequence["pieces"], sequence["attempts"]
    return pieces[-1]["arrived_s"] if pieces else attempts[-1]["placed_s"] if attempts else 0.0


def _divided(timeline: dict[str, Any], sequence: dict[str, Any] | None) -> list[_Span]:
    division, total = _Division(), timeline["duration_s"]
    has_ended = timeline["state"] != "running"
    division.until(timeline["turn_s"] or 0.0, "turn")
    for name, until in (("admission", timeline["admitted_s"]), ("tokenization", timeline["tokenized_s"])):
        division.until(total if until is None else until, name, _tokenizer(timeline) if name == "tokenization" else "")
        if until is None:
            return division.spans
    before: dict[str, Any] | None = None
    for attempt in sequence["attempts"] if sequence else ():
        _divide_attempt(division, attempt, before, sequence["pieces"] if sequence else [], total, has_ended)
        before = attempt
    if before is None or (before["lost_s"] is not None and not has_ended):
        division.until(total, "gateway_queue")
    division.until(total, "delivery")
    return division.spans


def _tokenizer(timeline: dict[str, Any]) -> str:
    """Returns the tokenizer that had the request; empty if it is unknown, or if several had it."""
    answered, silent = timeline["tokenizer"], {one["tokenizer"] for one in timeline["silent_tokenizers"]}
    if not silent:
        return answered or ""
    silent.discard(None)
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
    first, steps = arrived[0]["arrived_s"] if arrived else end, attempt["steps"]
    if before is not None and any(one["arrived_s"] < placed for one in pieces):
        # The client waits from the last token on one engine to the first on the other.
        # An engine that was silent and responds again continues what it had.
        where = engine if before["engine"] == engine else f"{before['engine']} to {engine}"
        if (move := division.until(first, "move", where)) is not None:
            move.why = before["reason"] or ""
    else:
        division.until(placed, "gateway_queue")
        if steps or not arrived:
            queued_until = min(steps[0]["start_s"], first) if steps else first
            division.until(queued_until, "engine_queue", engine, attempt if steps else None)
        division.until(first, "prefill", engine, attempt)
    if arrived:
        _divide_output(division, attempt, arrived)
        if lost is None and not has_ended:
            division.until(total, "decode", engine, attempt)


def _divide_output(division: _Division, attempt: dict[str, Any], arrived: list[dict[str, Any]]) -> None:
    """Divides the time from the first to the last output of one placement."""
    engine, first, last = attempt["engine"], arrived[0]["arrived_s"], arrived[-1]["arrived_s"]
    for one in attempt["steps"]:
        if one["preempted_before"] and one["start_s"] > first:
            began, ended = max(first, one["end_s"] - one["gap_s"]), min(one["end_s"], last)
            division.until(min(began, ended), "decode", engine, attempt)
            division.until(ended, "preemption", engine)
    if (decode := division.until(last, "decode", engine, attempt)) is not None:
        decode.num_tokens += sum(one["num_tokens"] for one in arrived[1:])


def _sentences(timeline: dict[str, Any], sequence: dict[str, Any] | None, causes: list[_Span]) -> Iterator[str]:
    total = timeline["duration_s"]
    by_time = sorted(causes, key=lambda one: one.duration_s, reverse=True)
    for number, one in enumerate(by_time):
        text, is_long = _text(one, timeline), one.duration_s >= ALSO * total
        if not number:
            begin = "Most of the time" if one.duration_s >= MOST * total else "The longest part of the time"
            begin = f"So far, {begin[0].lower()}{begin[1:]}" if timeline["state"] == "running" else begin
            yield f"{begin}: {text} ({_s(one.duration_s)} of {_s(total)})."
        elif is_long or one.cause in ("move", "preemption"):  # a reader should know of these, however short they were
            yield f"{text[0].upper()}{text[1:]} took {_s(one.duration_s)}."
        if not number or is_long:
            yield from _detail(one, timeline)
    pieces, attempts = (sequence["pieces"], sequence["attempts"]) if sequence else ([], [])
    for one in attempts:  # of engines that were lost later, a move tells
        if one["lost_s"] is not None and not any(piece["arrived_s"] <= one["lost_s"] for piece in pieces):
            yield f"It had to leave {one['engine']} after {_s(one['lost_s'])}: {one['reason']}."
    if timeline["state"] in ("failed", "cancelled"):
        code, how = timeline["error_code"], "failed" if timeline["state"] == "failed" else "was cancelled"
        why = f": {ENDINGS[code]} ({code})" if code in ENDINGS else f": {code}" if code else ""
        yield f"It {how} after {_s(total)}{why}."


def _text(cause: _Span, timeline: dict[str, Any]) -> str:
    name, where, cached = cause.cause, cause.where, timeline["cached_tokens"]
    known = f", {cached} of them from the cache," if cached else ""
    return {
        "turn": "waiting until the gateway began with the request",
        "admission": "reading and checking the request, and waiting for the limits of its key",
        "tokenization": "turning the text into tokens" + (f" on {where}" if where else ""),
        "gateway_queue": "waiting in the gateway for an engine with room",
        "engine_queue": f"waiting in the queue of {where}",
        "prefill": f"computing the prompt of {_count(timeline['prompt_tokens'], 'token')}{known} on {where}",
        "decode": f"generating {_count(cause.num_tokens, 'token')} on {where}",
        "move": (f"moving from {where}" if " to " in where else f"placing it on {where} again")
        + (f" ({cause.why})" if cause.why else ""),
        "preemption": f"waiting on {where}, which needed the KV blocks for others",
        "delivery": "writing the rest of the answer to the client",
    }[name]


def _detail(cause: _Span, timeline: dict[str, Any]) -> Iterator[str]:
    """Yields sentences that explain a cause that took a large part of the time."""
    if cause.cause == "tokenization":
        yield from _tokenization_detail(cause, timeline)
    if cause.cause == "prefill" and cause.attempt is not None and cause.attempt["kv"] is not None:
        yield _origin(cause.attempt["kv"])
    if cause.cause == "engine_queue":
        yield _lack(cause.attempt) if cause.attempt is not None else UNKNOWN_LACK
    if cause.cause == "decode" and cause.num_tokens and cause.attempt and cause.attempt["steps"]:
        sizes = [one["batch_size"] for one in cause.attempt["steps"] if one["end_s"] > cause.start_s]
        size = sum(sizes) / max(1, len(sizes))
        shared = "alone in its batch" if size < 1.5 else f"in batches of about {size:.0f} sequences"
        usual = f" (usual: {_s(timeline['usual_token_s'])})" if timeline["usual_token_s"] else ""
        yield f"That is {_s(cause.duration_s / cause.num_tokens)} for each token{usual}, {shared}."


def _origin(kv: dict[str, Any]) -> str:
    """Returns a sentence on where the KV of a prompt came from."""
    found = [f"{kv[name]:,} {how}" for name, how in ORIGINS.items() if kv[name]]
    found.append(f"{kv['computed']:,} were computed, as {MISSES[kv['why']]}")
    total = sum(kv[name] for name in (*ORIGINS, "computed"))
    return f"Of its {total:,} tokens, {', '.join(found)}."


def _lack(attempt: dict[str, Any]) -> str:
    """Returns a sentence on what a sequence waited for in the queue of its engine."""
    places, taken, steps = attempt["batch_places"] or 0, attempt["batch_size_before"], attempt["steps"]
    if taken is None:  # the sequence's own first step had about as many
        taken = steps[0]["batch_size"]
    if places and taken >= places - num_reserved_rows(places):
        rest = "" if taken >= places else "; the rest is kept for API keys that have none"
        return f"{taken} of the {places} places of its batch were taken{rest}."
    free, size, num_tokens = attempt["free_blocks_before"], attempt["block_size"], 0
    for one in steps:
        num_tokens += one["num_tokens"]
        if one["num_output"]:
            break
    if free is None or not size or not places:
        return UNKNOWN_LACK
    needed = -(-num_tokens // size)
    return (
        f"Too few KV blocks were free: its prompt needs {needed}, and {free} were free." if needed > free else NO_LACK
    )


def _tokenization_detail(cause: _Span, timeline: dict[str, Any]) -> Iterator[str]:
    """Yields why the prompt's tokens took so long, if the length of the prompt is not the reason."""
    if timeline["tokenized_s"] is None:
        yield "No tokenizer has answered."
    elif cause.duration_s > TOKENIZER_CALL_S + timeline["prompt_tokens"] / TOKENS_PER_S:
        who = cause.where or "the tokenizers"
        yield f"{_count(timeline['prompt_tokens'], 'token')} need far less: {who} stood still or had other work."
    waited = Counter[str]()
    for one in timeline["silent_tokenizers"]:
        waited[one["tokenizer"] or "one of the tokenizers"] += one["waited_s"]
    if waited:
        yield f"No answer came from {', '.join(f'{name} for {_s(waited[name])}' for name in waited)}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _round(seconds: float) -> float:
    return round(seconds, 6)


def _s(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
