"""The key-value store on a NATS server with JetStream. Made by `nats.NatsTransport`.

The bucket is in the server's memory. It is created at the first use, so a server without JetStream matters only to
processes that use the store. After an error it is looked up again, because a restarted server has lost it.
"""

from nats import errors
from nats.aio.client import Client
from nats.js import api
from nats.js.errors import BadRequestError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from shared.bus.key_value import Entry, StoreUnavailableError


class NatsKeyValueStore:
    """Implements `key_value.KeyValueStore`.

    `ttl_s`: lifetime of an entry since it was last written; `replicas`: number of replicas of the bucket in a cluster.
    """

    def __init__(self, client: Client, bucket: str, ttl_s: float, timeout_s: float, replicas: int = 1) -> None:
        self._stream = client.jetstream(timeout=timeout_s)  # pyright: ignore[reportUnknownMemberType]
        self._name, self._ttl_s, self._replicas = bucket, ttl_s, replicas
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
            config = api.KeyValueConfig(
                self._name,
                history=1,
                ttl=self._ttl_s,
                storage=api.StorageType.MEMORY,
                replicas=self._replicas,
                direct=True,
            )
            try:
                self._bucket = await self._stream.create_key_value(config)  # pyright: ignore[reportUnknownMemberType]
            except BadRequestError:  # it already exists with another configuration
                self._bucket = await self._opened()
        return self._bucket

    async def _opened(self) -> KeyValue:
        """Returns an existing bucket. If it has too few replicas, adds some; never removes replicas."""
        name = f"KV_{self._name}"
        found = (await self._stream.stream_info(name)).config
        if (found.num_replicas or 1) < self._replicas:
            found.num_replicas = self._replicas
            await self._stream.update_stream(found)  # pyright: ignore[reportUnknownMemberType]
        return await self._stream.key_value(self._name)

    def _unavailable(self, error: Exception) -> StoreUnavailableError:
        self._bucket = None
        return StoreUnavailableError(f"the store {self._name} does not answer ({error or type(error).__name__})")
