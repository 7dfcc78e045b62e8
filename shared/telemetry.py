"""Traces across services, at no cost when no collector is configured: OpenTelemetry is not even imported then.

A request's trace context travels in the bus headers (`traceparent`). Services open spans while they work (`start_span`)
or report them afterwards with the times they noted (`record_span`). Names and attributes are listed in `Names` and follow
the GenAI semantic conventions (v1.41).
"""
