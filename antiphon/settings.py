"""The settings of `antiphon serve`: those of all four services plus how many of each to start.

Not a settings model of its own: each service still parses its own flags, and `of_service` says which values it gets.
Called by the command line and the launcher.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from shared.config import (
    BusSettings,
    DetokenizerSettings,
    EngineSettings,
    GatewaySettings,
    SettingsError,
    TokenizerSettings,
    flag,
)

T = TypeVar("T", bound=BusSettings)
REPLICAS_MAX = 64
"""Of one service on one machine."""
SERVICES: dict[str, type[BusSettings]] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "engine": EngineSettings,
    "detokenizer": DetokenizerSettings,
}


@dataclass(frozen=True, kw_only=True)
class ServeSettings(EngineSettings, TokenizerSettings, DetokenizerSettings, GatewaySettings):
    """Everything on one machine."""

    host: str = flag("127.0.0.1", "address to listen on (0.0.0.0: every network of this machine)", group="http")
    gateways: int = flag(1, "gateway processes, sharing the port", group="processes")
    tokenizers: int = flag(1, "tokenizer processes", group="processes")
    engines: int = flag(1, "engine processes, each with the whole model", group="processes")
    detokenizers: int = flag(1, "detokenizer processes", group="processes")


def of_service(serve: ServeSettings, kind: type[T], **changes: object) -> T:
    """One service's part of the settings, with `changes` on top."""
    values: dict[str, Any] = {item.name: changes.get(item.name, getattr(serve, item.name)) for item in fields(kind)}
    return kind(**values)


def check(serve: ServeSettings) -> None:
    """Refuses what no service would be asked about. Raises SettingsError."""
    for name in SERVICES:
        count = getattr(serve, f"{name}s")
        if not 1 <= count <= REPLICAS_MAX:
            raise SettingsError(f"--{name}s: {count} is not between 1 and {REPLICAS_MAX}")
    if not 0 <= serve.port <= 65535:
        raise SettingsError(f"--port: {serve.port} is not between 0 (any free port) and 65535")
    if serve.nats_credentials and not serve.nats:
        raise SettingsError("--nats-credentials needs --nats: the server that is started here has its own")


def child_environment(environ: Mapping[str, str], **extra: str) -> dict[str, str]:
    """The environment of a child whose settings all come as flags: without the variables that settings read.

    Otherwise a variable would fill in where the user chose a default by a flag.
    """
    known = {item.metadata["env"] for kind in SERVICES.values() for item in fields(kind)}
    return {**{name: value for name, value in environ.items() if name not in known}, **extra}
