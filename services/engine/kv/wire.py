"""The messages between the receiver and the sender of a transfer of KV.

    length of the header, 4 bytes, little-endian · header, msgpack · block, `Block.size` bytes, after a `Block` only

A receiver connects and sends one `Fetch`. The sender answers with a `Block` for each requested block, as soon as it is
computed and in any order, with `Alive` while no block is ready, and with `Failed` if no further block will come. The
receiver answers `Taken` for blocks in shared memory; the sender may then reuse their places. It closes the connection
when it has all blocks. A connection is for one transfer; shared memory may be used by several transfers, one after the
other (`shared_memory`).

An engine that gives another one copies of its blocks (`peers`) connects and sends an `Offer` of names; the other one
answers `Want`, gets a `Block` for each name that it wants, in this order, and answers `Kept`. Further offers follow.
"""

import msgspec

from antiphon.services.engine.kv.layout import KvLayout

LENGTH_BYTES = 4
VERSION = 4


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch", kw_only=True):
    """Asks for the blocks with the given names (`antiphon.shared.blocks`) of a transfer."""

    version: int
    transfer_id: str
    layout: KvLayout
    content: str
    """See `EngineFacts.content`."""
    names: tuple[bytes, ...]
    shared: str = ""
    """Name of shared memory with `num_places` places of `place_bytes` bytes; empty: none.

    The memory begins with a hash of `transfer_id`, by which the sender sees that it has opened the right memory."""
    num_places: int = 0
    place_bytes: int = 0
    form: str = ""
    """Name of the receiver's own form of blocks (`layout.OwnForm`); empty: it has none."""


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """No block is ready to be sent. `shared`: whether blocks are passed in shared memory."""

    shared: bool = False


class Block(msgspec.Struct, frozen=True, array_like=True, tag="block", kw_only=True):
    """A block, with its number of tokens and the `pieces.checksum` of its bytes.

    `size` bytes follow; if it is 0, the block is in the shared memory, in the place with the number `place`. `is_own`:
    whether it has the form that `Fetch.form` names.
    """

    name: bytes
    num_tokens: int
    checksum: int
    size: int
    place: int = 0
    is_own: bool = False


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The receiver has copied the blocks in these places of the shared memory, so the places are free."""

    places: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """No further block will come."""

    reason: str


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer", kw_only=True):
    """Offers copies of blocks. `token`: the secret that the receiver gave for this (`KvRoom`)."""

    version: int
    token: str
    names: tuple[bytes, ...]


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """The places in the offer of the blocks that the receiver does not have."""

    places: tuple[int, ...]


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """All blocks of the offer are there."""


Header = Fetch | Alive | Block | Taken | Failed | Offer | Want | Kept
_DECODER = msgspec.msgpack.Decoder(Header)


def encode(header: Header) -> bytes:
    """Returns a header with its length."""
    data = msgspec.msgpack.encode(header)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def decode(data: bytes) -> Header:
    """Returns the header. Raises msgspec.DecodeError if the data are not a header."""
    return _DECODER.decode(data)
