"""How the scheduler gathers its instances: a small exchange over HTTP, at the ports of NODE_PORTS.

The scheduler starts the bus, whose address no table has, and posts it to `/join` of each instance until all have
joined. Both sides have a key; each message is authenticated with it (HMAC-SHA256), and the bus's password is derived
from it, so that no secret is sent. An instance answers who it is by its own tables, so that the scheduler notices ports
in the wrong order.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

import msgspec

from shared.config import SettingsError

KEY_BYTES_MIN = 16
HEADER = "antiphon-hmac"
"""Name of the HTTP header with the authentication code, in lower case."""


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From the scheduler: join the bus at `bus` as the instance `name`.

    `epoch` is the scheduler's start time in nanoseconds. An instance ignores schedulers that started earlier than one
    that it has obeyed. `table` is the digest of the global table. `bus` is empty if the instance must bring its own
    (`--nats`).
    """

    epoch: int
    name: str
    table: str
    bus: str = ""


class Joined(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance's answer: who it is by its own tables, and whether it follows. `refused` says why if it does not."""

    epoch: int
    name: str
    table: str
    devices: str
    refused: str = ""


def bus_password(key: bytes, epoch: int) -> str:
    """Returns the password of the bus that the scheduler with this epoch starts."""
    return hmac.new(key, f"bus {epoch}".encode(), hashlib.sha256).hexdigest()


def sign(key: bytes, kind: str, body: bytes) -> str:
    """Returns the authentication code of a message. `kind`: `join` or `joined`, so that none is echoed as the other."""
    return hmac.new(key, kind.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def is_signed(key: bytes, kind: str, body: bytes, code: str) -> bool:
    """Whether a message has the right authentication code."""
    return hmac.compare_digest(sign(key, kind, body).encode(), code.encode())


def read_key(path: str, *, one_host: bool) -> bytes:
    """Returns the key of the deployment. Raises SettingsError.

    `path` is the value of `--cluster-key-file`. Without it, the key is that of this user on this machine, in a private
    file that is made at the first start; this is possible only if all instances run on one host.
    """
    if path:
        return _checked(Path(path).expanduser(), f"--cluster-key-file: {path}")
    if not one_host:
        raise SettingsError(
            "--cluster-key-file is needed, since the rank table has several hosts: make a file with a secret (openssl "
            "rand -hex 32 >key; chmod 600 key), copy it to each host, and name it for each instance"
        )
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "antiphon" / "cluster.key"
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        # Linking is atomic: of two instances that start at once, both use the key of the first.
        fresh = own.with_name(f"{own.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            own.hardlink_to(fresh)
        except FileExistsError:
            return _checked(own, str(own))
        finally:
            fresh.unlink()
    except OSError as error:
        raise SettingsError(
            f"{own} cannot be written ({error.strerror}); name a file with --cluster-key-file"
        ) from error
    return _checked(own, str(own))


def _checked(path: Path, name: str) -> bytes:
    try:
        mode, key = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"{name} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{name} can be read by other users of this machine: chmod 600 {path}")
    if len(key) < KEY_BYTES_MIN:
        raise SettingsError(f"{name} has {len(key)} bytes; a key needs at least {KEY_BYTES_MIN}: openssl rand -hex 32")
    return key
