"""API keys: what a key allows, and the file that lists keys. Used by the gateway, and by the launcher's first check.

A key file is TOML (a table `[[keys]]` for each key) or JSON (`{"keys": [...]}`). In the names of its members `-` and
`_` are the same. Error messages name members and positions, never the value of a key.
"""

import hashlib
import json
import logging
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

from antiphon.shared import limits
from antiphon.shared.flags import SettingsError

log = logging.getLogger(__name__)
Scope = Literal["inference", "admin"]
SCOPES: frozenset[Scope] = frozenset({"inference", "admin"})
"""`inference`: models, generation and tokenizing. `admin`: metrics and other facts about the whole server."""
_ANONYMOUS, _LAUNCHER = "anonymous", "launcher"
_RESERVED = {_ANONYMOUS: "stands for requests without a key", _LAUNCHER: "is that of the launcher's own key"}
"""Names that keys of a file must not have, and why."""
_NAME_BYTES = 8
"""Bytes of a listed key's digest in its name: enough that nobody finds a second key with the same name."""
_Name = Annotated[str, msgspec.Meta(pattern=rf"^[A-Za-z0-9_-]{{1,{limits.KEY_NAME_CHARS_MAX}}}$")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}$")]
_Secret = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The permissions and limits of an API key.

    The key itself is not stored, only SHA-256 digests of its accepted values.
    """

    name: str
    digests: tuple[bytes, ...] = ()
    scopes: frozenset[Scope] = SCOPES
    models: frozenset[str] | None = None
    """Names of the models that the key may use, served names or aliases; None: all."""
    requests_per_minute: int = 0
    """For this limit and the next two: 0 means no limit."""
    tokens_per_minute: int = 0
    concurrent_requests: int = 0
    weight: float = 1.0
    """Share of the engines' time relative to other keys, while requests of several keys wait."""
    priority: int = 0
    """Keys with a lower number are served before all keys with a higher one."""

    is_limited: bool = field(init=False)
    """Whether the key has any limit, so that its requests must be counted."""

    def __post_init__(self) -> None:
        limited = bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent_requests)
        object.__setattr__(self, "is_limited", limited)

    def allows_model(self, *names: str) -> bool:
        """Whether the key may use the model that has these names."""
        return self.models is None or not self.models.isdisjoint(names)


ANONYMOUS = ApiKey(name=_ANONYMOUS)
"""Stands for all requests to a server that needs no key."""


class _Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One key in a key file."""

    name: _Name
    key: _Secret | list[_Secret] = ""
    sha256: _Sha256 | list[_Sha256] = ""
    models: list[str] | None = None
    scopes: tuple[Scope, ...] = ("inference",)
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    concurrent_requests: _Positive | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    priority: _Int32 = 0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: Annotated[list[_Entry], msgspec.Meta(min_length=1, max_length=limits.API_KEYS_MAX)]


def listed_keys(listed: str) -> list[ApiKey]:
    """Returns the keys of a list separated by commas, which allow everything. Spaces and empty items are ignored.

    A key is named by its value (`key-5e884898da280471`), because files and responses belong to a name: they stay with
    their key when other keys are added, removed or moved, and after a restart. The name tells nothing about the value.
    """
    words = dict.fromkeys(word.strip() for word in listed.split(","))
    digests = [digest(word) for word in words if word]
    return [ApiKey(name=f"key-{each[:_NAME_BYTES].hex()}", digests=(each,)) for each in digests]


def launcher_keys(value: str) -> list[ApiKey]:
    """Returns the API key with which a launcher sends requests to its own gateways; none if `value` is empty.

    Its name is reserved, so that it does not collide with keys of a file.
    """
    return [ApiKey(name=_LAUNCHER, digests=(digest(value),))] if value else []


def read_keys(path: Path) -> list[ApiKey]:
    """Returns the keys of a key file: JSON if its name ends in `.json`, else TOML.

    Raises SettingsError if it cannot be read or is not valid. Logs a warning if other users of the machine may read it.
    """
    source = f"--api-keys-file: {path}"
    try:
        text = path.read_text(encoding="utf-8")
        open_to_others = path.stat().st_mode & 0o077
    except OSError as error:
        raise SettingsError(f"{source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{source} is not a text in UTF-8") from error
    if open_to_others:
        log.warning("%s can be read by other users of this machine", path)
    return keys_of_text(text, is_json=path.suffix == ".json", source=source)


def keys_of_text(text: str, *, is_json: bool, source: str) -> list[ApiKey]:
    """Returns the keys that the text of a key file lists. Raises SettingsError, whose message begins with `source`."""
    try:
        content: Any = json.loads(text) if is_json else tomllib.loads(text)
        entries = msgspec.convert(_with_underscores(content), _File).keys
    except (ValueError, msgspec.ValidationError) as error:
        raise SettingsError(f"{source}: {_without_values(error)}") from None
    keys = [_key_of(entry, f"{source}: key {entry.name!r}") for entry in entries]
    _check_distinct(keys, source)
    return keys


def digest(value: str | bytes) -> bytes:
    """Returns the SHA-256 digest of a key."""
    return hashlib.sha256(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value).digest()


def _key_of(entry: _Entry, source: str) -> ApiKey:
    if entry.name in _RESERVED:
        raise SettingsError(f"{source}: this name {_RESERVED[entry.name]}; choose another")
    digests = [digest(value) for value in _listed(entry.key)]
    digests += [bytes.fromhex(value) for value in _listed(entry.sha256)]
    if not digests:
        raise SettingsError(f"{source}: give the key in 'key', or its SHA-256 in 'sha256'")
    if not entry.scopes:
        raise SettingsError(f"{source}: 'scopes' must name at least one of {', '.join(sorted(SCOPES))}")
    return ApiKey(
        name=entry.name,
        digests=tuple(digests),
        scopes=frozenset(entry.scopes),
        models=None if entry.models is None else frozenset(entry.models),
        requests_per_minute=entry.requests_per_minute or 0,
        tokens_per_minute=entry.tokens_per_minute or 0,
        concurrent_requests=entry.concurrent_requests or 0,
        weight=entry.weight,
        priority=entry.priority,
    )


def _check_distinct(keys: list[ApiKey], source: str) -> None:
    names, digests = set[str](), set[bytes]()
    for key in keys:
        if key.name in names:
            raise SettingsError(f"{source}: two keys are called {key.name!r}")
        if not digests.isdisjoint(key.digests):
            raise SettingsError(f"{source}: key {key.name!r} has the same value as another key")
        names.add(key.name)
        digests.update(key.digests)


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []


def _with_underscores(content: Any) -> Any:
    if isinstance(content, dict):
        table = cast(dict[str, Any], content)
        return {name.replace("-", "_"): _with_underscores(value) for name, value in table.items()}
    if isinstance(content, list):
        return [_with_underscores(value) for value in cast(list[Any], content)]
    return content


_POSITION = re.compile(r"\(at [^)]*\)|line \d+ column \d+")


def _without_values(error: Exception) -> str:
    """Returns the error in the file, without text from the file, which may be part of a key."""
    if isinstance(error, msgspec.ValidationError):
        return re.sub(r"Invalid enum value '.*?'", "Expected one of 'inference', 'admin'", str(error))
    place = _POSITION.search(str(error))
    return "is not valid TOML or JSON" + (f" {place[0]}" if place else "")
