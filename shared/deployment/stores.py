"""The logs and stores that a deployment keeps on the bus, and how large they may be. `store_keeper` makes them."""

from antiphon.shared import limits
from antiphon.shared.bus.durable_log import LogConfig, Storage
from antiphon.shared.bus.key_value import BucketConfig
from antiphon.shared.subjects import Subjects, bucket_name

DESIRED_STATE_TTL_S = 365 * 24 * 3600.0
"""TTL of desired states (adapters, versions of models), seconds. Whoever set one writes it again if it is lost."""


def stores(subjects: Subjects, storage: Storage | None) -> list[LogConfig | BucketConfig]:
    """Returns all of them. `storage`: where the logs are; None: there are no logs."""
    buckets = [quotas(subjects), adapters(subjects), models(subjects)]
    if storage is None:
        return [*buckets]
    logs = (stream_records, stream_journals, responses, background_records, background_events, usage, repeatable)
    return [*buckets, *(log(subjects, storage) for log in logs)]


def quotas(subjects: Subjects) -> BucketConfig:
    """The state of API keys' limits."""
    return BucketConfig(bucket_name(subjects.namespace, "limits"), limits.QUOTA_ENTRY_S)


def adapters(subjects: Subjects) -> BucketConfig:
    """The adapters that every engine of a model should have."""
    return BucketConfig(bucket_name(subjects.namespace, "adapters"), DESIRED_STATE_TTL_S)


def models(subjects: Subjects) -> BucketConfig:
    """The versions of the models."""
    return BucketConfig(bucket_name(subjects.namespace, "models"), DESIRED_STATE_TTL_S)


def stream_records(subjects: Subjects, storage: Storage) -> LogConfig:
    """The records of streams that can be resumed."""
    return LogConfig(
        name=bucket_name(subjects.namespace, "streams"),
        subject=subjects.stream_record("*"),
        storage=storage,
        max_age_s=limits.STREAM_FORGOTTEN_S,
        max_bytes=limits.STREAM_STORE_BYTES[storage],
        per_subject=1,
    )


def stream_journals(subjects: Subjects, storage: Storage) -> LogConfig:
    """The accepted tokens of these streams."""
    return LogConfig(
        name=bucket_name(subjects.namespace, "stream-tokens"),
        subject=subjects.stream_journal("*", "*"),
        storage=storage,
        max_age_s=limits.STREAM_RESUME_S + limits.STREAM_RENEW_S,
        max_bytes=limits.STREAM_STORE_BYTES[storage],
    )


def responses(subjects: Subjects, storage: Storage) -> LogConfig:
    """Finished responses, and the images of responses and streams."""
    return LogConfig(
        name=bucket_name(subjects.namespace, "responses"),
        subject=subjects.response("*"),
        storage=storage,
        max_age_s=limits.RESPONSE_TTL_S,
        max_bytes=limits.RESPONSES_BYTES_MAX,
        per_subject=1,
    )


def background_records(subjects: Subjects, storage: Storage) -> LogConfig:
    """The records of requests that run in the background."""
    return LogConfig(
        name=bucket_name(subjects.namespace, "background"),
        subject=subjects.background_record("*"),
        storage=storage,
        max_age_s=limits.RESPONSE_TTL_S,
        max_bytes=limits.BACKGROUND_RECORD_BYTES[storage],
        per_subject=1,
    )


def background_events(subjects: Subjects, storage: Storage) -> LogConfig:
    """The events of these requests."""
    return LogConfig(
        name=bucket_name(subjects.namespace, "background-events"),
        subject=subjects.background_events("*"),
        storage=storage,
        max_age_s=limits.RESPONSE_TTL_S,
        max_bytes=limits.BACKGROUND_EVENT_BYTES[storage],
        clears=True,
    )


def usage(subjects: Subjects, storage: Storage) -> LogConfig:
    """The usage records of requests, the requests that have none yet, and which records the sinks have."""
    return LogConfig(
        name=bucket_name(subjects.namespace, "usage"),
        subject=subjects.usage(),
        storage=storage,
        max_age_s=limits.USAGE_LOG_AGE_S,
        max_bytes=limits.USAGE_LOG_BYTES[storage],
        per_subject=1,
    )


def repeatable(subjects: Subjects, storage: Storage) -> LogConfig:
    """The requests with an idempotency key, and their answers."""
    return LogConfig(
        name=bucket_name(subjects.namespace, "idempotency"),
        subject=subjects.repeatable("*"),
        storage=storage,
        max_age_s=limits.IDEMPOTENCY_LOG_AGE_S,
        max_bytes=limits.IDEMPOTENCY_LOG_BYTES[storage],
        per_subject=1,
    )
