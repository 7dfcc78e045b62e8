"""The address of the server and the API key that a command uses: their flags, and the environment variables.

Called by every command that talks to a server. `--url`, `--base-url` and `--token` are other names of these flags,
which `--help` does not list.
"""

import argparse
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.shared.flags import SettingsError, hidden_names

DEFAULT = "http://127.0.0.1:8000"
SERVER, KEY = "ANTIPHON_SERVER", "ANTIPHON_API_KEY"
OPENAI_SERVER, OPENAI_KEY = "OPENAI_BASE_URL", "OPENAI_API_KEY"
_SERVER_NAMES, _KEY_NAMES = ("--url", "--base-url"), ("--token",)


@dataclass(frozen=True, slots=True)
class Address:
    """A server. `source`: the flag or variable that names it, for error messages. `api_key`: empty if none is sent."""

    server: str
    source: str
    api_key: str


def server_flags(
    parser: argparse.ArgumentParser,
    *,
    key: str = "API key",
    server: str = f"address of the server (default: {DEFAULT})",
    variables: bool = True,
) -> None:
    """Adds `--server` and `--api-key`. `key`, `server`: their help texts; `variables`: whether they name variables."""
    names = (f" [{SERVER}]", f" [{KEY}]") if variables else ("", "")
    parser.add_argument("--server", default=None, metavar="URL", help=server + names[0])
    hidden_names(parser, _SERVER_NAMES, dest="server")
    parser.add_argument("--api-key", default=None, metavar="KEY", help=f"{key}; @FILE reads it from a file{names[1]}")
    hidden_names(parser, _KEY_NAMES, dest="api_key")


def address_of(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Address:
    """Returns the server that flags or variables name, else the default. Raises SettingsError for an unreadable key."""
    environ = os.environ if environ is None else environ
    server, source = _first(
        ("--server", options.server), (SERVER, environ.get(SERVER)), (OPENAI_SERVER, environ.get(OPENAI_SERVER))
    )
    server = server or DEFAULT
    keys = [("--api-key", options.api_key), (KEY, environ.get(KEY))]
    if source == OPENAI_SERVER or _is_local(server):
        # A key for another service must not reach whatever server --server names.
        keys.append((OPENAI_KEY, environ.get(OPENAI_KEY)))
    return Address(server, source, _key(*_first(*keys)))


def given_key(options: argparse.Namespace) -> str:
    """Returns the API key of the flag, whatever variables there are. Raises SettingsError for an unreadable file."""
    return _key(options.api_key or "", "--api-key")


def _first(*named: tuple[str, str | None]) -> tuple[str, str]:
    """Returns the first value that is not empty, with its name; an empty one with the first name if there is none."""
    found: Sequence[tuple[str, str]] = [(value, name) for name, value in named if value]
    return found[0] if found else ("", named[0][0])


def _key(text: str, source: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{source}: {text[1:]} cannot be read: {error}") from None


def _is_local(server: str) -> bool:
    host = urllib.parse.urlsplit(server if "//" in server else f"http://{server}").hostname or ""
    import ipaddress  # only needed where OPENAI_API_KEY may be sent

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
