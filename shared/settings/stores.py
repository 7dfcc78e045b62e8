"""Settings of the process that makes the logs and stores on the bus."""

from shared.flags import Rule, changed, flag
from shared.settings.bus import BusSettings
from shared.settings.records import RecordSettings

REPLICAS = Rule("between 1 and 5", lambda value: 1 <= value <= 5)
"""A NATS cluster keeps at most five copies of a stream."""


class KeeperSettings(BusSettings):
    """Settings of `shared.deployment.store_keeper`."""

    bus_replicas: int = flag(
        1,
        "servers of a NATS cluster that keep a copy of each stream and store; 3: one of them may die without loss "
        "of data",
        env="ANTIPHON_BUS_REPLICAS",
        rule=REPLICAS,
        group="bus",
    )
    stream_store: str = changed(RecordSettings, "stream_store", "memory")
