"""The record of requests: when each phase, step and token of a request happened, for the console.

    recorder.begin(facts, received_s)   a new record, or NOT_RECORDED; the layers of the gateway add their events
    recorder.add_steps(message)         the engines' steps
    timeline_of(record)                 what `GET /v1/requests/{id}/timeline` answers with
    RecordDirectory                     the records of all gateways
    timeline.slowness                   which requests of a list were slow, and why
    timeline.contention                 which other requests the engines computed while one request waited
    trace_events_of(timeline)           the timeline in the format of trace viewers

A record has no text, and prompts and tokens only with `--record-content-mb`. All its times are
differences of one process's monotonic clock: the gateway's since the arrival of the request, an engine's since the
sequence reached that engine. Times of two machines are never subtracted from each other, except to find the requests
that the engines computed while another one waited (`timeline.contention`).
"""
