"""Encrypts a stream of bytes with a passphrase, in chunks, so that both sides need memory for one chunk only.

    header    magic (16 bytes), version (u16), salt of scrypt (16 bytes), check of the key (16 bytes), the first 8 bytes
              of the header's SHA-256
    chunk     u32: its number of plaintext bytes, and the highest bit in the last chunk; then AES-256-GCM's ciphertext
              and tag (16 bytes)

Every chunk but the last has CHUNK_BYTES of plaintext. Its nonce is its number, and its additional data are the header
and its first four bytes: a chunk that is changed, moved, left out, repeated or taken from another file is refused, and
so is a file that ends before its last chunk or goes on after it. scrypt gives 64 bytes for a random salt: the key of
the chunks, which is therefore used for one file only, and that of the check, which tells a wrong key from damage.
"""

import hashlib
import hmac
import secrets
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from antiphon.shared.errors import ServiceError

MAGIC, VERSION = b"antiphon-session", 1
CHUNK_BYTES = 64 * 1024
KEY_CHARS_MIN, KEY_CHARS_MAX = 12, 1024
_FIELDS = struct.Struct("<16sH16s16s")
_DIGEST_BYTES, _TAG_BYTES, _SALT_BYTES, _CHECK_BYTES = 8, 16, 16, 16
HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES
_PREFIX = struct.Struct("<I")
_LAST = 1 << 31
_COST, _BLOCK_SIZE, _PARALLEL = 2**15, 8, 3
"""Parameters of scrypt: 32 MiB of memory, and about a quarter of a second."""
_SCRYPT_BYTES_MAX = 64 * 2**20


def wrong_file(reason: str) -> ServiceError:
    """Returns the error for a file that is refused."""
    return ServiceError("invalid_value", f"The session file is refused: {reason}.", param="file")


class Header:
    """The header of a file. `data`: its bytes."""

    def __init__(self, data: bytes) -> None:
        """Raises ServiceError if it is not one of this version, or damaged."""
        if len(data) < len(MAGIC) or data[: len(MAGIC)] != MAGIC:
            raise wrong_file("it is no file of `antiphon session export`")
        if len(data) < HEADER_BYTES:
            raise wrong_file("it is truncated within its header")
        fields, digest = data[: _FIELDS.size], data[_FIELDS.size : HEADER_BYTES]
        _, version, self.salt, self.check = _FIELDS.unpack(fields)
        # Before the digest, which another version may not have.
        if version != VERSION:
            raise wrong_file(f"it has version {version}, and this server reads version {VERSION}")
        if hashlib.sha256(fields).digest()[:_DIGEST_BYTES] != digest:
            raise wrong_file("its header is damaged")
        self.data = data[:HEADER_BYTES]


def check_key(passphrase: str) -> bytes:
    """Returns the bytes of a passphrase. Raises ServiceError if it is too short, too long, or not printable ASCII."""
    if not KEY_CHARS_MIN <= len(passphrase) <= KEY_CHARS_MAX or not (passphrase.isascii() and passphrase.isprintable()):
        message = (
            f"The key of a session must have {KEY_CHARS_MIN} to {KEY_CHARS_MAX} printable ASCII characters: "
            "make one with `openssl rand -hex 32`."
        )
        raise ServiceError("invalid_value", message, param="key")
    return passphrase.encode()


class Sealer:
    """Encrypts one file: `header`, then what `feed` and at last `finish` return."""

    def __init__(self, passphrase: bytes) -> None:
        """Takes about a quarter of a second and 32 MiB of memory."""
        salt = secrets.token_bytes(_SALT_BYTES)
        key, check_key = _derived(passphrase, salt)
        fields = _FIELDS.pack(MAGIC, VERSION, salt, _check(check_key, salt))
        self.header = fields + hashlib.sha256(fields).digest()[:_DIGEST_BYTES]
        self._cipher, self._number, self._rest = AESGCM(key), 0, bytearray()

    def feed(self, data: bytes) -> bytes:
        """Returns the chunks that are full after further plaintext; keeps the rest, at most CHUNK_BYTES."""
        self._rest += data
        sealed = list[bytes]()
        # A full chunk is kept until more comes, because it may be the last.
        while len(self._rest) > CHUNK_BYTES:
            sealed.append(self._chunk(bytes(self._rest[:CHUNK_BYTES]), is_last=False))
            del self._rest[:CHUNK_BYTES]
        return b"".join(sealed)

    def finish(self) -> bytes:
        """Returns the last chunk."""
        return self._chunk(bytes(self._rest), is_last=True)

    def _chunk(self, plain: bytes, *, is_last: bool) -> bytes:
        prefix = _PREFIX.pack(len(plain) | (_LAST if is_last else 0))
        sealed = self._cipher.encrypt(_nonce(self._number), plain, self.header + prefix)
        self._number += 1
        return prefix + sealed


class Opener:
    """Decrypts one file: what comes after its header. Gives out only what is authenticated."""

    def __init__(self, passphrase: bytes, header: Header) -> None:
        """Takes about a quarter of a second and 32 MiB of memory. Raises ServiceError for a wrong key."""
        key, check_key = _derived(passphrase, header.salt)
        if not hmac.compare_digest(_check(check_key, header.salt), header.check):
            message = "The session file was made with another key: give the key of its export."
            raise ServiceError("invalid_value", message, param="key")
        self._header = header.data
        self._cipher, self._number, self._rest = AESGCM(key), 0, bytearray()
        self._ended = False

    def feed(self, data: bytes) -> bytes:
        """Returns the plaintext of the chunks that are complete after further data.

        Keeps the rest: less than a chunk. Raises ServiceError if a chunk is damaged.
        """
        self._rest += data
        plain = list[bytes]()
        while (size := self._next_size()) is not None and len(self._rest) >= size:
            plain.append(self._open(bytes(self._rest[:size])))
            del self._rest[:size]
        if self._ended and self._rest:
            raise wrong_file("it has data after its end")
        return b"".join(plain)

    def finish(self) -> None:
        """Raises ServiceError if the file has ended before its last chunk."""
        if not self._ended:
            raise wrong_file("it is truncated")

    def _next_size(self) -> int | None:
        """Returns the size of the next chunk in the file; None if it is not known yet, or there is none."""
        if self._ended or len(self._rest) < _PREFIX.size:
            return None
        (prefix,) = _PREFIX.unpack_from(self._rest)
        length, is_last = prefix & ~_LAST, bool(prefix & _LAST)
        if length > CHUNK_BYTES or (not is_last and length < CHUNK_BYTES):
            raise self._damaged()
        return _PREFIX.size + length + _TAG_BYTES

    def _open(self, chunk: bytes) -> bytes:
        prefix, sealed = chunk[: _PREFIX.size], chunk[_PREFIX.size :]
        try:
            plain = self._cipher.decrypt(_nonce(self._number), sealed, self._header + prefix)
        except InvalidTag:
            raise self._damaged() from None
        self._number += 1
        self._ended = bool(_PREFIX.unpack(prefix)[0] & _LAST)
        return plain

    def _damaged(self) -> ServiceError:
        return wrong_file(f"its chunk {self._number} is damaged or was changed")


def _derived(passphrase: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Returns the key of the chunks and that of the check."""
    both = hashlib.scrypt(
        passphrase, salt=salt, n=_COST, r=_BLOCK_SIZE, p=_PARALLEL, maxmem=_SCRYPT_BYTES_MAX, dklen=64
    )
    return both[:32], both[32:]


def _check(key: bytes, salt: bytes) -> bytes:
    return hmac.digest(key, MAGIC + salt, "sha256")[:_CHECK_BYTES]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
