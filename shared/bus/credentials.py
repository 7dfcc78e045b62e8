"""The URLs of the NATS servers, and the credentials file, which is one line `user:password`."""

import logging
from pathlib import Path

from antiphon.shared.flags import SettingsError

log = logging.getLogger(__name__)


def read_credentials(path: str) -> tuple[str, str]:
    """Returns user and password.

    Raises SettingsError if the file cannot be read or is not one line `user:password`. Logs a warning if other users of
    the machine have access to the file.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8").strip()
        open_to_others = file.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"nats-credentials: {path} cannot be read: {error}") from error
    user, colon, password = text.partition(":")
    if not (user and colon and password) or "\n" in text:
        raise SettingsError(f"nats-credentials: {path} must hold one line, user:password")
    if open_to_others:
        log.warning("%s can be read by other users of this machine", path)
    return user, password


def server_urls(servers: str) -> list[str]:
    """Returns the URLs of a comma-separated list, the form of `--nats`."""
    return [url.strip() for url in servers.split(",") if url.strip()]


def without_credentials(url: str) -> str:
    """Returns the URL without user and password, for log and error messages."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2]
