"""The secret with which processes on several machines authenticate each other.

Used between the instances of a deployment with rank tables, and between the machines that compute one model.
"""

import os
import stat
from pathlib import Path

from antiphon.shared.flags import SettingsError

KEY_BYTES_MIN = 16


def read_key(path: str, *, one_host: bool, why: str) -> bytes:
    """Returns the key. Raises SettingsError.

    `path` is the value of `--cluster-key-file`. Without it, the key is that of this user on this machine, in a private
    file that is made at the first start; this is possible only if all processes run on one host. `why` completes the
    message that a file is needed: "the rank table has several hosts".
    """
    if path:
        return _checked(Path(path).expanduser(), f"--cluster-key-file: {path}")
    if not one_host:
        raise SettingsError(
            f"--cluster-key-file is needed, since {why}: make a file with a secret (openssl rand -hex 32 >key; chmod "
            "600 key), copy it to each of them, and name it there"
        )
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "antiphon" / "cluster.key"
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        import secrets  # slow to import, and only needed once on a machine

        # Linking is atomic: if two instances start at the same time, both use the key of the first.
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
