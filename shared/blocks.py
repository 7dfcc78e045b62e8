"""Content hashes of KV blocks, by which tokenizer, gateway and engine recognise equal prefixes.

The hash of block i covers the salt and all tokens up to the block's end, as a chain: sha256(hash of block i - 1 ||
tokens of block i), cut to 16 bytes. Equal hashes mean equal prefixes under the same salt, so tenants with different
salts never share a block. In the block where an image begins, the chain also covers the image's key, so the same text
with another image has other hashes from there on. The hashes do not depend on a process's hash seed.
"""

import struct
from collections.abc import Iterable, Sequence
from hashlib import sha256

HASH_BYTES = 16
NAME_BITS = 60
"""Bits of a block's short name. CPython stores an integer of at most 60 bits in 32 bytes, a longer one in 48. Among ten
million blocks, two have the same name with a probability of one in 20,000; then a router's estimate is wrong."""
_NAME_MASK = (1 << NAME_BITS) - 1
_NAME_BYTES = 8
_TOKEN_BYTES = 4


def root_hash(salt: bytes = b"") -> bytes:
    """Returns the parent hash of the first block."""
    return sha256(b"antiphon-kv-1" + salt).digest()[:HASH_BYTES]


def adapter_salt(salt: bytes, version: str) -> bytes:
    """Returns the cache salt of a sequence with an adapter, from the sequence's salt and the adapter's version.

    For a sequence with several adapters, the function is applied once for each adapter.
    """
    return salt + _adapter_part(version)


def is_salt_of(salt: bytes, version: str) -> bool:
    """Whether a cache salt was created by `adapter_salt` for this version of an adapter, possibly among others."""
    return _adapter_part(version) in salt


def _adapter_part(version: str) -> bytes:
    return b"\0adapter\0" + version.encode()


Image = tuple[int, bytes]
"""Index of an image's first token in its prompt, and the image's key, which is equal for equal images."""


def images_part(images: Iterable[Image], start: int, end: int) -> bytes:
    """Returns the bytes that represent images beginning in [start, end) in the hash of the block."""
    begun = [(first, key) for first, key in images if start <= first < end]
    return b"".join(b"\0image\0" + first.to_bytes(_TOKEN_BYTES, "little") + key for first, key in begun)


def child_hash(parent: bytes, packed_tokens: bytes, images: bytes = b"") -> bytes:
    """Returns the hash of a block from its parent's hash and the block's own tokens (little-endian u32).

    `images`: see `images_part`.
    """
    return sha256(parent + packed_tokens + images).digest()[:HASH_BYTES]


def chain_hashes(packed_ids: bytes, block_size: int, salt: bytes = b"", images: tuple[Image, ...] = ()) -> bytes:
    """Returns the concatenated hashes, `HASH_BYTES` each, of all full blocks of a packed token list."""
    return chain_from(root_hash(salt), packed_ids, block_size, images)


def chain_from(parent: bytes, packed_ids: bytes, block_size: int, images: tuple[Image, ...] = ()) -> bytes:
    """Like `chain_hashes`, with the parent of the first block (`root_hash`) in place of the salt."""
    stride, hashes = block_size * _TOKEN_BYTES, list[bytes]()
    begun = b""
    for start in range(0, len(packed_ids) - stride + 1, stride):
        if images:
            first = start // _TOKEN_BYTES
            begun = images_part(images, first, first + block_size)
        parent = child_hash(parent, packed_ids[start : start + stride], begun)
        hashes.append(parent)
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[bytes]:
    """Returns concatenated hashes as a list."""
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def block_name(block_hash: bytes) -> int:
    """Returns the short name of a block, by which gateways follow the content of prefix caches."""
    return int.from_bytes(block_hash[:_NAME_BYTES], "little") & _NAME_MASK


def block_names(joined: bytes) -> list[int]:
    """Returns the short names of concatenated hashes."""
    words = struct.unpack(f"<{len(joined) // _NAME_BYTES}Q", joined)
    return [word & _NAME_MASK for word in words[:: HASH_BYTES // _NAME_BYTES]]


_REMOVED = 1 << 63


def pack_block_events(events: Sequence[int]) -> bytes:
    """Returns block events as bytes, 8 for each: the name of a stored block, or `removed_block` of its name."""
    return struct.pack(f"<{len(events)}Q", *events)


def unpack_block_events(packed: bytes) -> tuple[int, ...]:
    """Returns the events of `pack_block_events`. Raises ValueError if the length is not a multiple of 8."""
    if len(packed) % _NAME_BYTES:
        raise ValueError(f"{len(packed)} bytes of block events")
    return struct.unpack(f"<{len(packed) // _NAME_BYTES}Q", packed)


def removed_block(name: int) -> int:
    """Returns the event that a block with this name was removed. The event that it was stored is the name itself."""
    return name | _REMOVED


def is_removal(event: int) -> bool:
    """Whether an event says that a block was removed. `block_of` returns the block's name."""
    return event >= _REMOVED


def block_of(event: int) -> int:
    """Returns the name of the block of an event."""
    return event & _NAME_MASK
