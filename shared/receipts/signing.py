"""Keys of receipts, and the signature: a JWS in compact form (RFC 7515) with Ed25519 (RFC 8037).

A key file is a JWK set (RFC 7517) with private keys. The first key signs; all are published, so that receipts of former
keys can still be checked.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError

TYPE = "antiphon-receipt+jws"
_ENCODE = msgspec.json.Encoder(order="sorted").encode


class Jwk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key of Ed25519 as a JWK. `x`: the public key, `d`: the private key, both base64url. `kid`: its thumbprint."""

    kty: str = ""
    crv: str = ""
    x: str = ""
    d: str = ""
    kid: str = ""
    alg: str = ""
    use: str = ""


class JwkSet(msgspec.Struct, frozen=True):
    """A JWK set."""

    keys: list[Jwk]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The protected header of a receipt."""

    alg: str = ""
    kid: str = ""
    typ: str = ""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key with its id."""

    private: Ed25519PrivateKey
    kid: str

    @classmethod
    def of(cls, private: Ed25519PrivateKey) -> "SigningKey":
        """Returns the key with the id that follows from it."""
        return cls(private, thumbprint(private.public_key()))

    def sign(self, payload: bytes) -> str:
        """Returns the payload with its signature in compact form: header, payload and signature, joined by dots."""
        header = _ENCODE(Header(alg="EdDSA", kid=self.kid, typ=TYPE))
        signed = f"{encode_base64(header)}.{encode_base64(payload)}"
        return f"{signed}.{encode_base64(self.private.sign(signed.encode()))}"

    def jwk(self, *, private: bool = False) -> Jwk:
        """Returns the key as a JWK, with its private part only if `private`."""
        public = encode_base64(self.private.public_key().public_bytes_raw())
        secret = encode_base64(self.private.private_bytes_raw()) if private else ""
        return Jwk(kty="OKP", crv="Ed25519", x=public, d=secret, kid=self.kid, alg="EdDSA", use="sig")


def thumbprint(key: Ed25519PublicKey) -> str:
    """Returns the id of a key: its thumbprint as a JWK (RFC 7638), base64url."""
    members = {"crv": "Ed25519", "kty": "OKP", "x": encode_base64(key.public_bytes_raw())}
    return encode_base64(hashlib.sha256(_ENCODE(members)).digest())


def published(keys: Iterable[SigningKey]) -> bytes:
    """Returns the JWK set of the public keys, as JSON."""
    return msgspec.json.encode(JwkSet([key.jwk() for key in keys]))


def public_keys(data: bytes) -> dict[str, Ed25519PublicKey]:
    """Returns the public keys of a JWK set by their ids; also of one with private keys. Raises ServiceError."""
    found = dict[str, Ed25519PublicKey]()
    for one in _key_set(data).keys:
        if (one.kty, one.crv) != ("OKP", "Ed25519"):
            continue
        try:
            key = Ed25519PublicKey.from_public_bytes(decode_base64(one.x))
        except ValueError as error:
            raise ServiceError("invalid_value", f"The key set has a damaged key: {error}.") from error
        # The id is computed, so that a set cannot give one key the id of another.
        found[thumbprint(key)] = key
    if not found:
        raise ServiceError("invalid_value", "The key set has no key of Ed25519.")
    return found


def verified(token: str, keys: dict[str, Ed25519PublicKey] | None) -> tuple[bytes, str]:
    """Returns the payload of a signed receipt, and the id of its key.

    Raises ServiceError('invalid_value') with the reason.

    `keys`: those that are trusted, by their ids; None: the signature is not checked.
    """
    parts = token.strip().split(".")
    if len(parts) != 3 or not all(parts):
        count = len([part for part in parts if part])
        message = f"The receipt is truncated or no receipt: it has {count} of 3 parts (header.payload.signature)."
        raise ServiceError("invalid_value", message)
    try:
        head, payload, signature = map(decode_base64, parts)
        header = msgspec.json.decode(head, type=Header)
    except (ValueError, msgspec.DecodeError) as error:
        raise ServiceError("invalid_value", "The receipt is damaged: its parts are not base64url of JSON.") from error
    if (header.alg, header.typ) != ("EdDSA", TYPE):
        message = f"This is no receipt: it is a {header.typ or 'JWS'} with {header.alg or 'no signature'}."
        raise ServiceError("invalid_value", message)
    if keys is None:
        return payload, header.kid
    key = keys.get(header.kid)
    if key is None:
        raise ServiceError("invalid_value", f"The receipt is signed with the key {header.kid}, which is not trusted.")
    try:
        key.verify(signature, f"{parts[0]}.{parts[1]}".encode())
    except InvalidSignature:
        message = "The signature is wrong: the receipt was changed or truncated, or another key has signed it."
        raise ServiceError("invalid_value", message) from None
    return payload, header.kid


def load_keys(path: Path) -> tuple[SigningKey, ...]:
    """Returns the keys of a key file, the signing one first. If there is no file, it is made with a new key.

    Raises SettingsError for a file that cannot be read or made, or that other users can read.
    """
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & 0o077:
            raise SettingsError(f"--receipt-keys: other users can read {path}: run chmod 600 {path}")
        return _private_keys(path.read_bytes(), path)
    except OSError as error:
        raise SettingsError(f"--receipt-keys: {path}: {error.strerror}") from error


def _make(path: Path) -> None:
    """Makes a key file with one new key. Several gateways that start at once get the file of one of them."""
    data = _ENCODE(JwkSet([SigningKey.of(Ed25519PrivateKey.generate()).jwk(private=True)])) + b"\n"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.link(draft, path)
    except FileExistsError:
        pass  # another gateway was first: its keys are used
    finally:
        draft.unlink(missing_ok=True)


def _private_keys(data: bytes, path: Path) -> tuple[SigningKey, ...]:
    keys = list[SigningKey]()
    try:
        for one in _key_set(data).keys:
            if (one.kty, one.crv) == ("OKP", "Ed25519") and one.d:
                keys.append(SigningKey.of(Ed25519PrivateKey.from_private_bytes(decode_base64(one.d))))
    except (ValueError, ServiceError) as error:
        raise SettingsError(f"--receipt-keys: {path} is no JWK set with private keys: {error}") from error
    _check_number(keys, path)
    return tuple(keys)


def _check_number(keys: Sequence[SigningKey], path: Path) -> None:
    if not 1 <= len(keys) <= limits.RECEIPT_KEYS_MAX:
        most = limits.RECEIPT_KEYS_MAX
        raise SettingsError(f"--receipt-keys: {path} has {len(keys)} private keys of Ed25519 in place of 1 to {most}")


def _key_set(data: bytes) -> JwkSet:
    try:
        return msgspec.json.decode(data, type=JwkSet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServiceError("invalid_value", f"This is no JWK set: {error}.") from error


def encode_base64(data: bytes) -> str:
    """Returns base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode_base64(text: str) -> bytes:
    """Returns the bytes of base64url without padding. Raises ValueError."""
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError("no base64url") from error
