"""Settings of the records that gateways keep of requests and streams, and of the stores on the bus that have them."""

from antiphon.shared.flags import NOT_NEGATIVE, Rule, Settings, SettingsError, flag
from antiphon.shared.settings.bus import BusSettings


class RecordSettings(Settings, group="http"):
    """Records of requests for the console, and records of streams that other gateways can continue."""

    record_requests: int = flag(
        256,
        "number of finished requests whose record (times of each step and token, no text) is kept for the console "
        "and GET /v1/requests (0: none, and engines report no steps)",
        rule=NOT_NEGATIVE,
    )
    record_content_mb: int = flag(
        0,
        "megabytes of memory for the prompts and tokens of recorded requests, for `antiphon replay` and `fork` "
        "(0: records have neither)",
        rule=NOT_NEGATIVE,
    )
    stream_store: str = flag(
        "memory",
        "where the bus keeps records of streams and finished responses, for all gateways: memory, file (they survive a "
        "restart of the bus), off (streams cannot be resumed, and a response is known to its gateway alone)",
        choices=("memory", "file", "off"),
    )
    record_streams: str = flag(
        "asked",
        "streams that are recorded so that they can be resumed: those whose request has the header "
        "'X-Antiphon-Resumable: 1' (asked), or all streams, whose events then have ids (all)",
        choices=("asked", "all"),
    )
    receipt_keys: str = flag(
        "",
        "file of the keys that sign receipts, a JWK set; made with a new key if it is missing (default: no receipts)",
        env="ANTIPHON_RECEIPT_KEYS",
        metavar="FILE",
    )
    receipts: str = flag(
        "asked",
        "answers that get a receipt: those whose request has the header 'X-Antiphon-Receipt: 1' (asked), or all",
        choices=("asked", "all"),
    )
    stream_grace: float = flag(
        30.0,
        "seconds for which a stream continues after its client has disconnected, if the client sent "
        "'X-Antiphon-Resumable: 1' (0: it is cancelled at once)",
        rule=NOT_NEGATIVE,
    )


def check_records(settings: RecordSettings) -> None:
    """Raises SettingsError if streams are to be recorded but there is no store for them."""
    if settings.record_streams == "all" and settings.stream_store == "off":
        raise SettingsError(
            "--record-streams=all needs a store for the records: leave out one of it and --stream-store=off"
        )
    if settings.receipts == "all" and not settings.receipt_keys:
        raise SettingsError("--receipts=all needs keys that sign them: name a file with --receipt-keys FILE")


class KeeperSettings(BusSettings, group="bus"):
    """Settings of `antiphon.shared.deployment.store_keeper`, the process that makes the logs and stores on the bus."""

    bus_replicas: int = flag(
        1,
        "servers of a NATS cluster that keep a copy of each stream and store; 3: one of them may die without loss "
        "of data",
        env="ANTIPHON_BUS_REPLICAS",
        rule=Rule("between 1 and 5", lambda value: 1 <= value <= 5),  # the most copies that a NATS cluster keeps
    )
    stream_store: str = RecordSettings.__dataclass_fields__["stream_store"]
