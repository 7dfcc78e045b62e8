"""Writes the tables of docs/settings.md: every flag with its variable, default and range, read from the settings.

What stands before the first table is written by hand and stays.

Run as `python -m infra.checks.settings_page`; a test compares the page with what it would write.
"""

from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from antiphon.settings import NOT_FOR_USERS, DirectSettings, RunSettings, ServeSettings
from shared.flags import GROUPS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
_COLUMNS = "| flag | variable | default | what it does |\n|---|---|---|---|"


def render() -> str:
    """The page."""
    parts = [PAGE.read_text(encoding="utf-8").partition("\n## ")[0]]
    for group in dict.fromkeys((*GROUPS, *(item.metadata["group"] for item in _flags()))):
        rows = [_row(item) for item in _flags() if item.metadata["group"] == group]
        title = group[:1].upper() + group[1:] if group != "http" else "HTTP"
        parts.append(f"## {title}\n\n{_COLUMNS}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _flags() -> Iterator["Field[Any]"]:
    plain = {item.name for item in fields(ServeSettings)}
    yield from (item for item in fields(ServeSettings) if item.name not in NOT_FOR_USERS)
    yield from (item for item in fields(RunSettings) if item.name not in plain)


def _row(item: "Field[Any]") -> str:
    facts = item.metadata
    names = "<br>".join(f"`{name}`" for name in (_option(item.name), *facts["alias"]))
    variable = f"`{facts['env']}`" if facts["env"] else ""
    return f"| {names} | {variable} | {_defaults(item)} | {facts['help']}{_range(item)} |".replace("  ", " ")


def _defaults(item: "Field[Any]") -> str:
    found = {
        kind: {other.name: _word(other.default) for other in fields(kind)}.get(item.name, "")
        for kind in (ServeSettings, RunSettings, DirectSettings)
    }
    text = found[ServeSettings]
    if item.name not in {other.name for other in fields(ServeSettings)}:
        return f"only `run`: {found[RunSettings]}".removesuffix(": ")
    for kind, name in ((RunSettings, "run"), (DirectSettings, "api_server")):
        if found[kind] != found[ServeSettings]:
            text += f"; `{name}`: {found[kind]}"
    return text.removeprefix("; ")


def _range(item: "Field[Any]") -> str:
    choices, rule = item.metadata["choices"], item.metadata["rule"]
    if choices:
        return f" ({', '.join(choices)})"
    return f" ({rule.text})" if rule and rule.text not in item.metadata["help"] else ""


def _word(default: object) -> str:
    if default in ("", None, ()):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
