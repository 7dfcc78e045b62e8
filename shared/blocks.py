"""Content hashes of KV blocks, by which tokenizer, gateway and engine recognise equal prefixes.

The hash of block i covers the salt and all tokens up to the block's end, as a chain: sha256(hash of block i - 1 ||
tokens of block i), cut to 16 bytes. Equal hashes mean equal prefixes under the same salt, so tenants with different
salts never share a block. In the block where an image begins, the chain also covers the image's key, so the same text
with another image has other hashes from there on. The hashes do not depend on a process's hash seed.
"""

from collections.abc import Iterable
from hashlib import sha256

HASH_BYTES = 16
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
