"""Answers questions about the recorded requests of one gateway. Pure.

`timeline.directory` asks the other gateways the same questions.
"""

from itertools import islice
from typing import Any

from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.ops.timeline.request_record import RequestRecord
from antiphon.services.gateway.ops.timeline.slowness import mark_slow, usual_token_s
from antiphon.services.gateway.ops.timeline.timeline import summary_of, timeline_of
from antiphon.shared import limits
from antiphon.shared.messages import RecordListQuery, RecordQuery

SIMILAR_MAX = 256
"""Latest requests of a model from which the usual time for a token is computed. Bounds the time for one timeline,
because the gateway does nothing else meanwhile."""
_SEARCHED = ("id", "client_request_id", "model", "key", "state", "error_code", "longest_phase", "gateway")


def list_records(recorder: Recorder, gateway_id: str, query: RecordListQuery) -> list[dict[str, Any]]:
    """Returns the summaries of the requests that match, in the order of the query, at most RECORD_LIST_MAX.

    The usual times, which slow requests exceed, are computed from all requests of the key, not only those that match.
    """
    records = [one for one in recorder.all() if query.key in ("", one.facts.key) and _in_progress(one, query.during)]
    found = [{**summary_of(record), "gateway": gateway_id} for record in records]
    mark_slow(found)
    found = [one for one in found if query.state in (None, one["state"]) and _matches(one, query.words)]
    found = [one for one in found if one["slow"] or not query.slow]
    return ordered(found, query)[: limits.RECORD_LIST_MAX]


def find_record(recorder: Recorder, gateway_id: str, query: RecordQuery) -> dict[str, Any] | None:
    """Returns the summary, the timeline or the content of one request; None if there is none that the key may see."""
    record = recorder.find(query.name)
    # Another key's request is answered like one that does not exist, so that ids cannot be tried.
    if record is None or query.key not in ("", record.facts.key):
        return None
    if query.form == "content":
        return {"content": record.data, "content_bytes": recorder.content_bytes}
    if query.form == "snapshot":
        data = record.data if record.snapshot is None else record.snapshot()
        return {"content": data, "content_bytes": recorder.content_bytes}
    found = (
        timeline_of(record, _usual_token_s(recorder, record, query.key))
        if query.form == "timeline"
        else summary_of(record)
    )
    return {**found, "gateway": gateway_id}


def _usual_token_s(recorder: Recorder, record: RequestRecord, key: str) -> float | None:
    """Returns the usual seconds for each token of output, among the model's latest requests that the key may see."""
    model = record.facts.model
    similar = (one for one in recorder.all() if one.facts.model == model and key in ("", one.facts.key))
    return usual_token_s([summary_of(one) for one in islice(similar, SIMILAR_MAX)])


def ordered(summaries: list[dict[str, Any]], query: RecordListQuery) -> list[dict[str, Any]]:
    """Returns summaries in the order of the query: the latest arrivals first, or the longest durations first."""
    return sorted(summaries, key=lambda one: one["created" if query.order == "newest" else "duration_s"], reverse=True)


def _in_progress(record: RequestRecord, during: tuple[float, float] | None) -> bool:
    return during is None or (record.created <= during[1] and record.created + record.duration_us / 1e6 >= during[0])


def _matches(summary: dict[str, Any], words: tuple[str, ...]) -> bool:
    facts = [str(summary[fact] or "") for fact in _SEARCHED]
    text = " ".join([*facts, *summary["engines"], *summary["finish_reasons"]]).lower()
    return all(word in text for word in words)
