"""The HTTP exchange by which the scheduler joins its instances to the bus, at the ports of NODE_PORTS.

The scheduler starts the bus and posts the bus's address, which is in no table, to `/join` of each instance until all
have joined. Scheduler and instances have the same key. Each message is authenticated with the key (HMAC-SHA256), and
the passwords of the bus are derived from it, so that no secret is sent. An instance answers with its identity from its
own tables, so that the scheduler notices ports in the wrong order.
"""

import hashlib
import hmac

import msgspec

HEADER = "antiphon-hmac"
"""Name of the HTTP header with the authentication code, in lower case."""


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the scheduler: join the bus at `bus` as the instance `name`.

    `epoch` is the scheduler's start time in nanoseconds. An instance ignores schedulers that started earlier than the
    scheduler whose message it obeyed last. `table` is the digest of the global table. `bus` is empty if the instance
    must know the bus itself (`--nats`).
    """

    epoch: int
    name: str
    table: str
    bus: str = ""


class Joined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An instance's answer: its identity from its own tables. `refused`: why it does not join; empty if it joins."""

    epoch: int
    name: str
    table: str
    devices: str
    refused: str = ""


def bus_secret(key: bytes, epoch: int) -> bytes:
    """Returns the secret of this scheduler's bus, from which all its passwords are derived."""
    return hmac.new(key, f"bus {epoch}".encode(), hashlib.sha256).hexdigest().encode()


def sign(key: bytes, kind: str, body: bytes) -> str:
    """Returns the authentication code of a message.

    `kind`: `join` or `joined`, so that no message can be replayed as the other kind.
    """
    return hmac.new(key, kind.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def is_signed(key: bytes, kind: str, body: bytes, code: str) -> bool:
    """Whether a message has the right authentication code."""
    return hmac.compare_digest(sign(key, kind, body).encode(), code.encode())
