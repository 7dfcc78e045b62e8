"""Converts records to what `GET /v1/requests` and `GET /v1/requests/{id}/timeline` answer with. Pure.

All times are seconds since the arrival of the request, by the gateway's clock, with one exception: the times of an
engine's steps are sums of two durations. The first is the time at which the gateway sent the sequence to the engine,
the second is the engine's own time since the sequence arrived there. The time that the message took is left out, so the
true times are later, by at most `accepted_s - placed_s`.
"""

from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from antiphon.services.gateway.ops.timeline.explanation import explain
from antiphon.services.gateway.ops.timeline.request_record import PIECE_COLUMNS, Attempt, RequestRecord, SequenceRecord
from antiphon.shared.messages import KvOrigin
from antiphon.shared.observability.step_rows import STEP_COLUMNS


def summary_of(record: RequestRecord) -> dict[str, Any]:
    """Returns the facts of one request for a list of requests."""
    attempts = [one for sequence in record.sequences.values() for one in sequence.attempts]
    phases = phases_of(record)
    return {
        "id": record.facts.request_id,
        "object": "request",
        "created": record.created,
        "model": record.facts.model,
        "key": record.facts.key,
        "client_request_id": record.facts.client_request_id or None,
        "state": record.outcome or "running",
        "error_code": record.error_code or None,
        "finish_reasons": list(record.finish_reasons),
        "max_tokens": record.facts.max_tokens or None,
        "ignored": list(record.facts.ignored),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "duration_s": _s(record.duration_us),
        "time_to_first_token_s": _s(_first_token_us(record)),
        "phases": phases,
        "longest_phase": max(phases, key=phases.__getitem__, default=None),
        "engines": sorted({one.engine for one in attempts}),
        "moves": sum(one.lost_us is not None for one in attempts),
        "preemptions": sum(len(one.preempted_before) for one in attempts),
    }


def timeline_of(record: RequestRecord, usual_token_s: float | None = None) -> dict[str, Any]:
    """Returns the timeline of one request: its summary, phases, placements, steps, pieces of output, explanation.

    `usual_token_s`: the usual seconds for each token of output of the model; None: unknown.
    """
    found: dict[str, Any] = {
        **summary_of(record),
        "object": "request.timeline",
        "turn_s": _s(record.turn_us),
        "admitted_s": _s(record.admitted_us),
        "tokenized_s": _s(record.tokenized_us),
        "tokenizer": record.tokenizer or None,
        "silent_tokenizers": [
            {"tokenizer": name or None, "waited_s": round(waited_s, 6)} for name, waited_s in record.silent_tokenizers
        ],
        "detokenizer_work_s": _s(record.detokenizer_us),
        "usual_token_s": usual_token_s,
        "sequences": [
            {
                "index": index,
                "attempts": [_attempt(one) for one in sequence.attempts],
                "pieces": list(_pieces(record, sequence)),
            }
            for index, sequence in sorted(record.sequences.items())
        ],
        "dropped_events": record.num_dropped,
    }
    return {**found, **explain(found)}


def phases_of(record: RequestRecord) -> dict[str, float]:
    """Returns how long each phase of a request has taken so far, in seconds, without phases that have not begun.

    `turn`: the wait for a turn of its key, only if it waited. `admission`: reading and checking the request, and the
    limits of its key. `tokenization`. `gateway_queue`: the wait for an engine that accepts another sequence.
    `engine_queue`: the wait in the engine for a place in the batch. `prefill`: from then until the first token is at
    the gateway. `decode`: from the first to the last token. `delivery`: from the last token to the last byte of the
    answer. With several sequences, a phase ends with the first sequence that is placed, begins or gives a token;
    `decode` ends with the last token of all. `move` and `preemption`, only if there were any, are parts of that time
    that do not count as `decode`: the sequence that ended last waited for its next token on another engine, or until
    its blocks were computed again.
    """
    phases: dict[str, float] = {}
    placed = min((one.attempts[0].placed_us for one in record.sequences.values() if one.attempts), default=None)
    first, last = _first_token_us(record), _last_token_us(record)
    queued = _engine_queue_us(record)
    marks = [
        ("admission", record.admitted_us),
        ("tokenization", record.tokenized_us),
        ("gateway_queue", placed),
        ("engine_queue", queued),
        ("prefill", first),
        ("decode", last),
        ("delivery", record.ended_us),
    ]
    if record.turn_us is not None:
        marks.insert(0, ("turn", record.turn_us))
    began = 0
    for name, until in marks:
        if until is not None:
            phases[name] = round(max(0, until - began) / 1e6, 6)
            began = max(began, until)
    if record.ended_us is None:
        name = next((name for name, until in marks if until is None), "delivery")
        phases[name] = round(max(0, record.duration_us - began) / 1e6, 6)
    for name, interrupted_us in _interruptions(record):
        if interrupted_us and "decode" in phases:
            phases[name] = round(min(interrupted_us / 1e6, phases["decode"]), 6)
            phases["decode"] = round(phases["decode"] - phases[name], 6)
    return phases


def _interruptions(record: RequestRecord) -> Iterator[tuple[str, int]]:
    """Yields how long the output of the sequence that ended last was interrupted by moves and by preemptions."""
    having = [one for one in record.sequences.values() if one.arrived]
    if not having:
        return
    sequence = max(having, key=lambda one: one.arrived[-PIECE_COLUMNS])
    arrived = [arrived_us for arrived_us, _ in _times(record, sequence.arrived)]
    move = preemption = 0
    for before, after in pairwise(sequence.attempts):
        had = [one for one in arrived if one < after.placed_us]
        if before.lost_us is not None and had:
            move += next((one for one in arrived if one >= after.placed_us), had[-1]) - had[-1]
    for attempt in sequence.attempts if any(one.preempted_before for one in sequence.attempts) else ():
        for step in _steps(attempt):
            began, ended = step["end_s"] - step["gap_s"], step["end_s"]
            if step["preempted_before"] and step["start_s"] * 1e6 > arrived[0]:
                preemption += int(1e6 * (min(ended, arrived[-1] / 1e6) - max(began, arrived[0] / 1e6)))
    yield "move", move
    yield "preemption", max(0, preemption)


def _attempt(one: Attempt) -> dict[str, Any]:
    return {
        "attempt": one.number,
        "engine": one.engine,
        "detokenizer": one.detokenizer or None,
        "batch_places": one.places or None,
        "batch_size_before": one.batch_size_before,
        "block_size": one.block_size or None,
        "free_blocks_before": one.free_blocks_before,
        "placed_s": _s(one.placed_us),
        "accepted_s": _s(one.accepted_us),
        "lost_s": _s(one.lost_us),
        "reason": one.reason or None,
        "kv": None if one.origin is None else _origin(one.origin),
        "steps": list(_steps(one)),
    }


def _origin(one: KvOrigin) -> dict[str, Any]:
    return {
        "cache": one.num_cached,
        "disk": one.num_stored,
        "prefill_engine": one.num_received,
        "computed": one.num_computed,
        "why": one.why,
    }


def _steps(one: Attempt) -> Iterator[dict[str, Any]]:
    ended_before: int | None = None
    for row in _rows(one.steps, STEP_COLUMNS):
        step, age, duration, start, num_tokens, num_output, batch_size, batch_tokens, waiting, free = row
        ended = one.placed_us + age
        yield {
            "step": step,
            "kind": "decode" if num_output and num_tokens <= max(1, num_output) else "prefill",
            "start_s": _s(max(one.placed_us, ended - duration)),
            "end_s": _s(ended),
            # From the end of the sequence's previous step to the end of this one. For the first step: its wait in the
            # queue.
            "gap_s": _s(ended - duration - one.placed_us if ended_before is None else ended - ended_before),
            "position": start,
            "num_tokens": num_tokens,
            "num_output": num_output,
            "batch_size": batch_size,
            "batch_tokens": batch_tokens,
            "num_waiting": waiting,
            "num_free_blocks": free,
            "preempted_before": step in one.preempted_before,
        }
        ended_before = ended


def _pieces(record: RequestRecord, sequence: SequenceRecord) -> Iterator[dict[str, Any]]:
    """Yields each piece of output: the position of its first token, and when it arrived and was written."""
    written = list(_written_by_position(record, sequence))
    position = 0
    for arrived_us, num_tokens in _times(record, sequence.arrived):
        end = position + num_tokens
        while len(written) > 1 and written[0][0] < end:
            written.pop(0)
        is_written = bool(written) and written[0][0] >= end
        yield {
            "position": position,
            "num_tokens": num_tokens,
            "arrived_s": _s(arrived_us),
            "written_s": _s(written[0][1]) if is_written else None,
        }
        position = end


def _written_by_position(record: RequestRecord, sequence: SequenceRecord) -> Iterator[tuple[int, int]]:
    """Yields (number of tokens written so far, time) for each write."""
    total = 0
    for written_us, num_tokens in _times(record, sequence.written):
        total += num_tokens
        yield total, written_us


def _engine_queue_us(record: RequestRecord) -> int | None:
    """Returns when the first step of a sequence began. A placement that was lost before its first step does not count.

    None if that is unknown, for example because an engine was killed before it reported its last steps.
    """
    began = [
        one.placed_us + max(0, one.steps[1] - one.steps[2])
        for sequence in record.sequences.values()
        if (one := next((each for each in sequence.attempts if each.steps), None)) is not None
    ]
    first, queued = _first_token_us(record), min(began, default=None)
    return None if queued is not None and first is not None and queued > first else queued


def _first_token_us(record: RequestRecord) -> int | None:
    found = [one.arrived[0] for one in record.sequences.values() if one.arrived]
    return record.since_us(min(found)) if found else None


def _last_token_us(record: RequestRecord) -> int | None:
    found = [one.arrived[-PIECE_COLUMNS] for one in record.sequences.values() if one.arrived]
    return record.since_us(max(found)) if found else None


def _times(record: RequestRecord, pieces: "array[float]") -> Iterator[tuple[int, int]]:
    """Yields for each piece of output the microseconds since the arrival of the request, and its number of tokens."""
    for at in range(0, len(pieces), PIECE_COLUMNS):
        yield record.since_us(pieces[at]), int(pieces[at + 1])


def _rows(values: "array[int]", width: int) -> Iterator[tuple[int, ...]]:
    return (tuple(values[at : at + width]) for at in range(0, len(values), width))


def _s(microseconds: int | None) -> float | None:
    return None if microseconds is None else round(microseconds / 1e6, 6)
