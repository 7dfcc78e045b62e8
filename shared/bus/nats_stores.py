"""Makes the streams of JetStream that hold the logs and stores, and looks for them. Used by `nats` and its stores.

Whoever may configure a stream decides which subjects it captures and where it sends them, so only one user may
(`antiphon.shared.security.bus_permissions`). All others wait for the streams that they use.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from antiphon.shared.bus.durable_log import LogConfig
from antiphon.shared.bus.key_value import BucketConfig

T = TypeVar("T")
StoreConfig = LogConfig | BucketConfig
LOOK_S = 0.05
"""Seconds between two looks for a stream that does not exist yet."""
_DUPLICATES_S = 120.0
_COMPARED = (
    "subjects", "storage", "max_age", "max_bytes", "max_msgs_per_subject", "discard", "num_replicas",
    "duplicate_window", "allow_direct", "allow_rollup_hdrs", "allow_msg_ttl", "republish",
    "subject_transform", "mirror", "sources",
)  # fmt: skip
"""The fields of a stream's configuration that are set, or must not be."""
_STORAGES = {"memory": api.StorageType.MEMORY, "file": api.StorageType.FILE}


async def existing(look_up: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Returns what `look_up` finds. If there is nothing, looks again for up to `timeout_s`, then raises its error."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await look_up()
        except NotFoundError:
            if asyncio.get_running_loop().time() + LOOK_S > deadline:
                raise
        await asyncio.sleep(LOOK_S)


async def make_stream(context: JetStreamContext, config: StoreConfig, replicas: int) -> None:
    """Creates a stream if it does not exist, otherwise sets its limits. Raises nats.errors.Error.

    The kind of storage cannot be changed, and the number of replicas is never reduced.
    """
    wanted = _log(config) if isinstance(config, LogConfig) else _bucket(config)
    wanted.num_replicas = replicas
    assert wanted.name is not None
    found = await _found(context, wanted.name)
    if found is None:
        try:
            await context.add_stream(wanted)  # pyright: ignore[reportUnknownMemberType]
            return
        except APIError:
            found = await _found(context, wanted.name)
            if found is None:
                raise
    wanted.num_replicas = max(replicas, found.num_replicas or 1)
    # What is not set is told in several ways: left out, false, zero.
    pairs = {name: (getattr(found, name) or None, getattr(wanted, name)) for name in _COMPARED}
    changes = {name: new for name, (old, new) in pairs.items() if old != (new or None)}
    if changes:
        await context.update_stream(dataclasses.replace(found, **changes))  # pyright: ignore[reportUnknownMemberType]


async def _found(context: JetStreamContext, name: str) -> api.StreamConfig | None:
    """Returns the configuration of a stream; None if there is none.

    The configuration is read first because the server checks the free storage before it checks whether the stream
    exists: with too little storage left it would refuse to "create" an existing one.
    """
    try:
        return (await context.stream_info(name)).config
    except NotFoundError:
        return None


def _log(wanted: LogConfig) -> api.StreamConfig:
    return api.StreamConfig(
        name=wanted.name,
        subjects=[wanted.subject],
        storage=_STORAGES[wanted.storage],
        max_age=wanted.max_age_s,
        max_bytes=wanted.max_bytes,
        max_msgs_per_subject=wanted.per_subject or -1,
        discard=api.DiscardPolicy.OLD,
        duplicate_window=min(wanted.max_age_s, _DUPLICATES_S),
        allow_direct=True,
        allow_rollup_hdrs=wanted.clears,
        allow_msg_ttl=True,
    )


def _bucket(wanted: BucketConfig) -> api.StreamConfig:
    """Returns what the library makes of a bucket with one value for each key, except that nobody may purge it."""
    return api.StreamConfig(
        name=f"KV_{wanted.name}",
        subjects=[f"$KV.{wanted.name}.>"],
        storage=api.StorageType.MEMORY,
        max_age=wanted.ttl_s,
        max_bytes=-1,
        max_msgs_per_subject=1,
        discard=api.DiscardPolicy.NEW,
        duplicate_window=min(wanted.ttl_s, _DUPLICATES_S),
        deny_delete=True,
        allow_direct=True,
    )
