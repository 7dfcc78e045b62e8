"""Content hashes of KV blocks: how a prefix is recognised by tokenizer, gateway and engine alike.

The hash of block i covers the salt and every token up to the block's end, as a chain: sha256(parent || tokens of the
block), cut to 16 bytes. Two equal hashes mean equal prefixes under an equal salt, so tenants with different salts never
share a block, and nothing about a hash can be guessed from another process's hash seed.
"""

import hashlib

HASH_BYTES = 16
_TOKEN_BYTES = 4


def root_hash(salt: bytes = b"") -> bytes:
    """The parent of the first block."""
    return hashlib.sha256(b"antiphon-kv-1" + salt).digest()[:HASH_BYTES]


def child_hash(parent: bytes, packed_tokens: bytes) -> bytes:
    """The hash of a block from its parent's and its own tokens (little-endian u32)."""
    return hashlib.sha256(parent + packed_tokens).digest()[:HASH_BYTES]


def chain_hashes(packed_ids: bytes, block_size: int, salt: bytes = b"") -> bytes:
    """The hashes of every full block of a packed token list, joined."""
    stride = block_size * _TOKEN_BYTES
    parent, hashes = root_hash(salt), bytearray()
    for start in range(0, len(packed_ids) - stride + 1, stride):
        parent = child_hash(parent, packed_ids[start : start + stride])
        hashes += parent
    return bytes(hashes)


def split_hashes(joined: bytes) -> list[bytes]:
    """Joined hashes as a list."""
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
