"""Adapters in the settings: `--lora-modules`, `--prompt-adapters` and their limits.

Called by the launcher and by engines, before anything is loaded.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from antiphon.shared import limits
from antiphon.shared.config import EngineSettings
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.models.adapter_config import (
    adapter_directory,
    check_rank,
    check_tokens,
    read_lora_config,
    read_prompt_config,
    unusable,
)
from antiphon.shared.models.model_files import model_aliases, model_name

E = TypeVar("E", bound=EngineSettings)
DEFAULT_MAX_LORAS = 8
_FLAG, _PROMPT_FLAG = "--lora-modules", "--prompt-adapters"
_KEYS = ("name", "path", "base_model_name")
_FORMS = 'name=path, or JSON like {"name": "sql", "path": "/adapters/sql"}'


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapter of `--lora-modules` or `--prompt-adapters`. `path`: the directory with its files."""

    name: str
    path: str
    base_model_name: str = ""


def lora_modules(settings: EngineSettings) -> list[LoraModule]:
    """Returns the adapters of `--lora-modules`. Raises SettingsError for a word that is neither of the two forms."""
    return [module for word in settings.adapters.lora_modules for module in _modules(word)]


def prompt_adapters(settings: EngineSettings) -> list[LoraModule]:
    """Returns the adapters of `--prompt-adapters`. Raises SettingsError as `lora_modules` does."""
    return [module for word in settings.adapters.prompt_adapters for module in _modules(word, _PROMPT_FLAG)]


def with_adapters(settings: E) -> E:
    """Returns the settings with `--enable-lora` set if adapters are named, and the limits filled in.

    `max_loras` becomes 8, or `max_cpu_loras` if that is less, or the number of named adapters if that is more;
    `max_cpu_loras` becomes `max_loras`, or that number. Likewise for prompt adapters. Without adapters of a kind its
    settings do not change.
    """
    given = settings.adapters
    if given.enable_lora or given.lora_modules:
        num_named = len(lora_modules(settings))
        most = given.max_loras or max(min(DEFAULT_MAX_LORAS, given.max_cpu_loras or DEFAULT_MAX_LORAS), num_named)
        kept = given.max_cpu_loras or max(most, num_named)
        settings = replace(settings, enable_lora=True, max_loras=most, max_cpu_loras=kept)
    if given.enable_prompt_adapter or given.prompt_adapters:
        most = given.max_prompt_adapters or max(DEFAULT_MAX_LORAS, len(prompt_adapters(settings)))
        settings = replace(settings, enable_prompt_adapter=True, max_prompt_adapters=most)
    return settings


def check_adapters(settings: EngineSettings) -> None:
    """Checks the named adapters and their limits without loading weights. Raises SettingsError.

    An adapter is refused if its option value is malformed, its name is taken, its directory or configuration is missing
    or cannot be served, its rank or its number of virtual tokens is too large, or it belongs to another model.
    """
    _check_limits(settings)
    names, seen = (model_name(settings), *model_aliases(settings)), set[str]()

    def check_lora(directory: Path, name: str) -> None:
        check_rank(read_lora_config(directory, name), name, settings.adapters.max_lora_rank)

    def check_prompt(directory: Path, name: str) -> None:
        check_tokens(read_prompt_config(directory, name), name, settings.adapters.max_prompt_adapter_token)

    for module in lora_modules(settings):
        _check_module(module, names, seen, _FLAG, check_lora)
    for module in prompt_adapters(settings):
        _check_module(module, names, seen, _PROMPT_FLAG, check_prompt)


def _check_module(
    module: LoraModule, names: tuple[str, ...], seen: set[str], flag: str, check: Callable[[Path, str], None]
) -> None:
    if why := name_error(module.name):
        raise SettingsError(f"{flag}: the name {module.name[:64]!r} {why}")
    if module.name in names:
        raise SettingsError(f"{flag}: {module.name!r} is the model's own name: give the adapter another one")
    if module.name in seen:
        raise SettingsError(f"{flag}: two adapters are called {module.name!r}")
    seen.add(module.name)
    if module.base_model_name and module.base_model_name not in names:
        raise SettingsError(
            f"{flag}: the adapter {module.name!r} is for the model {module.base_model_name!r}, and this one is called "
            f"{names[0]!r}"
        )
    try:
        check(adapter_directory(module.path), module.name)
    except ServiceError as error:
        raise SettingsError(f"{flag}: {error.message}") from error


def check_place(path: str, name: str, roots: tuple[str, ...]) -> None:
    """Raises ServiceError for an adapter that is not below one of the directories `roots`, if there are any.

    Links are followed. Whether there is such a directory does not matter.
    """
    if not roots:
        return
    refusal = unusable(name, "its directory is not below one of those of --lora-root")
    try:
        directory = adapter_directory(path).resolve()
    except (OSError, ValueError, RuntimeError):  # for a path that cannot be, or that leads in a circle
        raise refusal from None
    if not any(directory.is_relative_to(adapter_directory(root).resolve()) for root in roots):
        raise refusal


def name_error(name: str) -> str:
    """Returns the reason why a text cannot be the name of an adapter; '' if it can."""
    if not name or len(name) > limits.ADAPTER_NAME_CHARS_MAX:
        return f"must have between 1 and {limits.ADAPTER_NAME_CHARS_MAX} characters"
    if name != name.strip() or not name.isprintable() or name == "default":
        return "must be printable, without spaces at its ends, and not 'default', which means the default model"
    return ""


def _check_limits(settings: EngineSettings) -> None:
    given, full = settings.adapters, with_adapters(settings).adapters
    loras = (bool(given.enable_lora or given.lora_modules), f"--enable-lora or {_FLAG}")
    prompts = (bool(given.enable_prompt_adapter or given.prompt_adapters), f"--enable-prompt-adapter or {_PROMPT_FLAG}")
    for flag, value, (enabled, needed) in (
        ("--max-loras", given.max_loras, loras),
        ("--max-cpu-loras", given.max_cpu_loras, loras),
        ("--max-prompt-adapters", given.max_prompt_adapters, prompts),
    ):
        if value is not None and not enabled:
            raise SettingsError(f"{flag} needs {needed}")
    if full.max_loras is not None and full.max_cpu_loras is not None and full.max_cpu_loras < full.max_loras:
        raise SettingsError(f"--max-cpu-loras: {full.max_cpu_loras} is less than --max-loras ({full.max_loras})")


def _modules(word: str, flag: str = _FLAG) -> Iterable[LoraModule]:
    text = word.strip()
    if not text.startswith(("{", "[")):
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise SettingsError(f"{flag}: {word!r} is not {_FORMS}")
        return [LoraModule(name, path)]
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{flag}: {word!r} is not valid JSON ({error}); give {_FORMS}") from error
    items = cast(list[Any], value) if isinstance(value, list) else [value]
    return [_of_json(item, word, flag) for item in items]


def _of_json(item: Any, word: str, flag: str) -> LoraModule:
    if not isinstance(item, dict):
        raise SettingsError(f"{flag}: {word!r} is not {_FORMS}")
    table = cast(dict[str, Any], item)
    unknown = sorted(set(table) - set(_KEYS))
    if unknown:
        raise SettingsError(f"{flag}: {word!r} has the unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    for key in _KEYS:
        value = table.get(key, "" if key == "base_model_name" else None)
        if key == "base_model_name" and value is None:
            continue
        if not isinstance(value, str) or (not value and key != "base_model_name"):
            raise SettingsError(f"{flag}: {word!r} needs a text {key!r}; give {_FORMS}")
    return LoraModule(table["name"], table["path"], table.get("base_model_name") or "")
