"""The key-value store on a NATS server with JetStream. Made by `nats.NatsTransport`.

The bucket is in the server's memory. It is looked up at the first use, so a server without JetStream matters only to
processes that use the store. After an error it is looked up again, because a restarted server has lost it.
"""

from nats import errors
from nats.aio.client import Client
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from antiphon.shared.bus.key_value import Entry, StoreUnavailableError
from antiphon.shared.bus.nats_stores import existing


class NatsKeyValueStore:
    """Implements `key_value.KeyValueStore`."""

    def __init__(self, client: Client, bucket: str, timeout_s: float) -> None:
        self._stream = client.jetstream(timeout=timeout_s)  # pyright: ignore[reportUnknownMemberType]
        self._name, self._timeout_s = bucket, timeout_s
        self._bucket: KeyValue | None = None

    async def get(self, key: str) -> Entry | None:
        """See KeyValueStore."""
        try:
            found = await (await self._open()).get(key)
        except KeyNotFoundError:
            return None
        except errors.Error as error:
            raise self._unavailable(error) from error
        return Entry(found.value or b"", found.revision or 0)

    async def replace(self, key: str, value: bytes, revision: int) -> int | None:
        """See KeyValueStore."""
        try:
            return await (await self._open()).update(key, value, last=revision)
        except KeyWrongLastSequenceError:
            return None
        except errors.Error as error:
            raise self._unavailable(error) from error

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await existing(lambda: self._stream.key_value(self._name), self._timeout_s)
        return self._bucket

    def _unavailable(self, error: Exception) -> StoreUnavailableError:
        self._bucket = None
        return StoreUnavailableError(f"the store {self._name} does not answer ({error or type(error).__name__})")
