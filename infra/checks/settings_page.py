"""Writes the tables of docs/reference/settings.md: all settings, and what becomes of options of other servers.

A flag's variable, default and range are read from the settings classes, the options of other servers from
`antiphon.shared.settings.other_options`. The text before the first table is written by hand and kept.

Run as `python -m infra.checks.settings_page`. A test checks that the page is up to date.
"""

from collections.abc import Iterator, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

from antiphon.settings import NOT_FOR_USERS, DirectSettings, InstanceSettings, RunSettings, ServeSettings
from antiphon.shared.flags import GROUPS, flags_of
from antiphon.shared.settings.other_options import OPTIONS, VARIABLES, Other, Variable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md"
_ACCEPTED = "They are accepted, and the log says once that they have no effect."
_REFUSED = (
    "They would change what the server does: it ends with exit code 78 before anything starts and says why. A value\n"
    "that asks for nothing passes in silence."
)
_VARIABLES = "The same for variables; an empty one counts as unset."
_COLUMNS = "| flag | variable | default | what it does |\n|---|---|---|---|"


def render() -> str:
    """Returns the text of the page: the existing text before the first table, and the tables."""
    parts = [PAGE.read_text(encoding="utf-8").partition("\n## ")[0]]
    for group in dict.fromkeys((*GROUPS, *(item.metadata["group"] for item in _flags()))):
        rows = [_row(item) for item in _flags() if item.metadata["group"] == group]
        title = group[:1].upper() + group[1:] if group != "http" else "HTTP"
        parts.append(f"## {title}\n\n{_COLUMNS}\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, *_others()])


def _others() -> Iterator[str]:
    """Yields the sections about options and variables of other servers."""
    for refused, title, about in (
        (False, "Options of other servers without effect here", _ACCEPTED),
        (True, "Options of other servers that are refused", _REFUSED),
    ):
        rows = [f"| {_names(other.names)} | {_sentence(other)} |" for other in OPTIONS if other.refused is refused]
        yield f"## {title}\n\n{about}\n\n| options | why |\n|---|---|\n" + "\n".join(rows) + "\n"
    rows = [f"| {_names((each.name,))} | {_of_variable(each)} |" for each in VARIABLES]
    yield f"## Variables of other servers\n\n{_VARIABLES}\n\n| variable | why |\n|---|---|\n" + "\n".join(rows) + "\n"


def _sentence(other: Other) -> str:
    return (other.because.partition(": ")[2] or other.because) + _passes(
        other.asks_nothing if other.takes != "flag" else ()
    )


def _of_variable(variable: Variable) -> str:
    return variable.because + _passes(variable.asks_nothing)


def _passes(values: Sequence[str]) -> str:
    shown = [f"`{value}`" for value in values if value]
    return f" ({', '.join(shown)} {'pass' if len(shown) > 1 else 'passes'})" if shown else ""


def _names(names: Sequence[str]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


def _flags() -> Iterator["Field[Any]"]:
    plain = {item.name for item in flags_of(ServeSettings)}
    yield from (item for item in flags_of(ServeSettings) if item.name not in NOT_FOR_USERS)
    yield from (item for kind in (RunSettings, InstanceSettings) for item in flags_of(kind) if item.name not in plain)


def _row(item: "Field[Any]") -> str:
    facts = item.metadata
    names = _names((_option(item.name), *facts["alias"]))
    variable = f"`{facts['env']}`" if facts["env"] else ""
    return f"| {names} | {variable} | {_defaults(item)} | {facts['help']}{_range(item)} |".replace("  ", " ")


def _defaults(item: "Field[Any]") -> str:
    found = {
        kind: {other.name: _word(_default(other)) for other in flags_of(kind)}.get(item.name, "")
        for kind in (ServeSettings, RunSettings, DirectSettings, InstanceSettings)
    }
    text = found[ServeSettings]
    if item.name not in {other.name for other in flags_of(ServeSettings)}:
        command = "run" if item.name in {other.name for other in flags_of(RunSettings)} else "start-role"
        return f"only `{command}`: {found[RunSettings]}".removesuffix(": ")
    for kind, name in ((RunSettings, "run"), (DirectSettings, "api_server"), (InstanceSettings, "start-role")):
        if found[kind] != found[ServeSettings]:
            text += f"; `{name}`: {found[kind] or 'see above'}"
    return text.removeprefix("; ")


def _range(item: "Field[Any]") -> str:
    choices, rule = item.metadata["choices"], item.metadata["rule"]
    if choices:
        return f" ({', '.join(choices)})"
    return f" ({rule.text})" if rule and rule.text not in item.metadata["help"] else ""


def _default(item: "Field[Any]") -> object:
    """Returns a setting's default; None for one that only stands for "not given", as no user may give it."""
    rule = item.metadata["rule"]
    return item.default if rule is None or item.default is None or rule.holds(item.default) else None


def _word(default: object) -> str:
    if default in ("", None, ()):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
