"""Messages between engines about copies of stored KV (`services/engine/kv/peers`)."""

from antiphon.shared.messages.base import Message


class KvRoomQuery(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """Asks an engine to keep copies of this one's stored blocks. Answered by `KvRoom`.

    `identity`: hash of all that determines the bytes of blocks; `store`: id of the directory that this engine writes.
    """

    engine_id: str
    engine_instance_id: str
    identity: str
    store: str


class KvRoom(Message, frozen=True, array_like=True, tag=True, kw_only=True):
    """The answer to a `KvRoomQuery`: `host:port` to connect to, and the secret that an offer must have.

    `reason`: why the engine keeps no copies of that engine; then the other fields are empty.
    """

    address: str = ""
    token: str = ""
    reason: str = ""
