"""Settings of the records that gateways keep of requests and streams."""

from shared.flags import NOT_NEGATIVE, SettingsError, flag
from shared.settings.base import Settings


class RecordSettings(Settings):
    """Records of requests for the console, and records of streams that other gateways can continue."""

    record_requests: int = flag(
        256,
        "number of finished requests whose record (times of each step and token, no text) is kept for the console "
        "and GET /v1/requests (0: none, and engines report no steps)",
        rule=NOT_NEGATIVE,
        group="http",
    )
    record_content_mb: int = flag(
        0,
        "megabytes of memory for the prompts and tokens of recorded requests, for `antiphon replay` and `fork` "
        "(0: records have neither)",
        rule=NOT_NEGATIVE,
        group="http",
    )
    stream_store: str = flag(
        "memory",
        "where the bus keeps records of streams and finished responses, for all gateways: memory, file (they survive a "
        "restart of the bus), off (streams cannot be resumed, and a response is known to its gateway alone)",
        choices=("memory", "file", "off"),
        group="http",
    )
    record_streams: str = flag(
        "asked",
        "streams that are recorded so that they can be resumed: those whose request has the header "
        "'X-Antiphon-Resumable: 1' (asked), or all streams, whose events then have ids (all)",
        choices=("asked", "all"),
        group="http",
    )
    stream_grace: float = flag(
        30.0,
        "seconds for which a stream continues after its client has disconnected, if the client sent "
        "'X-Antiphon-Resumable: 1' (0: it is cancelled at once)",
        rule=NOT_NEGATIVE,
        group="http",
    )


def check_records(settings: RecordSettings) -> None:
    """Raises SettingsError if streams are to be recorded but there is no store for them."""
    if settings.record_streams == "all" and settings.stream_store == "off":
        raise SettingsError(
            "--record-streams=all needs a store for the records: leave out one of it and --stream-store=off"
        )
