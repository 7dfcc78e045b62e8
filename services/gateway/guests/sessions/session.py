"""A session: a recorded generation with what names its blocks of KV. Pure."""

from typing import Any

import msgspec

from antiphon.shared import limits
from antiphon.shared.blocks import HASH_BYTES, chain_from, split_hashes
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.recorded_request import RecordedContent, decode, raw

ID_PREFIX = "sess_"


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the blocks of an imported file. `reason`: why not all were taken; empty: all were."""

    in_file: int
    taken: int
    reason: str = ""


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is kept. `created`: Unix seconds."""

    id: str
    created: float
    key_name: str
    content: msgspec.Raw
    """The recorded request, with the name of the model here."""
    weights: str
    """`ModelFacts.digest` of the model."""
    salt: str = ""
    """For an imported session: the cache salt of its requests, which no other request has. So blocks that somebody made
    up are read by this session only."""
    imported: Moved | None = None
    """None: it was made from a request of this deployment."""

    def recorded(self) -> RecordedContent:
        """Returns the recorded request. Raises ServiceError if this build cannot read it."""
        return decode(bytes(self.content))


_DECODER = msgspec.json.Decoder(Session)


def encoded(session: Session) -> bytes:
    """Returns a session as it is kept."""
    return msgspec.json.encode(session)


def decoded(data: bytes) -> Session:
    """Returns a session that `encoded` has returned."""
    return _DECODER.decode(data)


def described(session: Session) -> dict[str, Any]:
    """Returns the object for clients, without tokens."""
    content, kv = session.recorded(), session.imported
    return {
        "id": session.id,
        "object": "session",
        "created_at": int(session.created),
        "model": content.model,
        "request_id": content.request_id,
        "imported": kv is not None,
        "prompt_tokens": [len(one.token_ids) for one in content.prompts],
        "outputs": [
            {"index": index, "tokens": len(one.token_ids), "finish_reason": one.finish_reason}
            for index, one in enumerate(content.sequences)
        ],
        "kv": None if kv is None else {"blocks": kv.in_file, "taken": kv.taken, "reason": kv.reason or None},
    }


def block_names(content: RecordedContent, root: bytes, block_size: int) -> list[bytes]:
    """Returns the names of all full blocks of the outputs with their prompts, each once, in order.

    The order does not depend on `root`, the parent of the first ones. Raises ServiceError if there are too many.
    """
    names: dict[bytes, None] = {}
    for index, one in enumerate(content.sequences):
        tokens = (*content.prompts[index // content.num_sequences].token_ids, *one.token_ids)
        names |= dict.fromkeys(split_hashes(chain_from(root, pack_ids(tokens), block_size)))
        if len(names) > limits.SESSION_BLOCKS_MAX:
            message = f"The session has more than {limits.SESSION_BLOCKS_MAX} blocks of KV."
            raise ServiceError("request_too_large", message)
    return list(names)


def root_of(content: RecordedContent) -> bytes:
    """Returns the parent of the first blocks of a recorded request; b"" if its record does not tell it."""
    try:
        root = bytes.fromhex(content.block_root)
    except ValueError:
        return b""
    return root if len(root) == HASH_BYTES else b""


def as_raw(content: RecordedContent) -> msgspec.Raw:
    """Returns the field `content` of a session."""
    return raw(content)
