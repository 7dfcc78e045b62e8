"""How a dataclass becomes flags: fields with help, rules and variables; parsing them; and writing them down again.

Not the settings themselves (`shared.config`), and no setting is named here. Called by the process shells, which parse,
and by the launcher, which passes settings on.
"""

import argparse
import dataclasses
import difflib
import json
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T")
GROUPS = ("model", "http", "processes", "engine: scheduling", "engine: memory", "engine: execution", "bus")
"""Headings of `--help`, in this order; others come after them."""
NONE = object()
"""The word `none` where a setting may be None: not the same as no word."""
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


class SettingsError(ValueError):
    """A flag or variable with an impossible value; the message names it and what is allowed."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be; `text` goes on after "is not"."""

    text: str
    holds: Callable[[Any], bool]


AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule("at least 0", lambda value: 0 <= value < float("inf"))
SHARE = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
FRACTION = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
POSITIVE = Rule("above 0", lambda value: value > 0)
JSON_WORDS = Rule('a JSON list of strings like ["*"]', lambda value: json_words(value) is not None)
POWER_OF_TWO = Rule("a power of two", lambda value: value >= 1 and value & (value - 1) == 0)


def flag(
    default: Any,
    help: str,
    *,
    env: str = "",
    choices: Sequence[str] = (),
    rule: Rule | None = None,
    alias: Sequence[str] = (),
    group: str = "",
    more: str = "",
    metavar: str = "TEXT",
) -> Any:
    """A settings field. `group` heads it in `--help`; `rule` is checked where the value is read.

    `more`: the option takes several words; those after the first go, joined by commas, to the field of that name. A
    field of type `tuple[str, ...]` is a flag that may be repeated; `metavar` stands for one of its values.
    """
    metadata = {"help": help, "env": env, "choices": tuple(choices), "alias": tuple(alias), "group": group}
    return dataclasses.field(default=default, metadata={**metadata, "rule": rule, "more": more, "metavar": metavar})


def changed(settings: type[Any], name: str, default: Any, help: str = "") -> Any:
    """A field of `settings` for a subclass, with another default and, where given, other help."""
    metadata = settings.__dataclass_fields__[name].metadata
    return dataclasses.field(default=default, metadata={**metadata, "help": help or metadata["help"]})


def json_words(text: str) -> list[str] | None:
    """The strings of a JSON list; none for the empty text, and None for anything else."""
    try:
        value: Any = json.loads(text) if text else []
    except ValueError:
        return None
    if not isinstance(value, list):
        return None
    words = typing.cast(list[Any], value)
    return words if all(isinstance(word, str) for word in words) else None


def add_flags(parser: argparse.ArgumentParser, settings: type[Any], skip: frozenset[str] = frozenset()) -> None:
    """Adds one option for each field that the parser does not have yet. Unset options stay None.

    A boolean field is also an option `--no-…` that stands alone; `--help` lists only the first form.
    """
    wanted = [item for item in fields(settings) if item.name not in skip and not _has(parser, item.name)]
    for title in dict.fromkeys((*GROUPS, *(item.metadata["group"] for item in wanted))):
        group = parser.add_argument_group(title)
        for item in wanted:
            if item.metadata["group"] == title:
                group.add_argument(*_option_names(item), **_option_arguments(item))
                if _kind(item) is bool:
                    no = f"--no-{_option_names(item)[0].removeprefix('--')}"
                    group.add_argument(no, dest=item.name, action="store_const", const=False, help=argparse.SUPPRESS)


def parse(settings: type[T], options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """Settings from parsed options, the environment and defaults. Raises SettingsError."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in fields(typing.cast(Any, settings)):
        given, source = getattr(options, item.name, None), _option_names(item)[0]
        name = item.metadata["env"]
        if given is None and name and environ.get(name, "") != "":
            source = f"environment variable {name}"
            given = _convert(item, environ[name], source)
        if given is not None:
            values[item.name] = _value(item, given, source)
    return settings(**values)


def validated(settings: type[T], values: Mapping[str, Any]) -> T:
    """Settings from Python values, under the rules and choices of the flags. None means the default.

    Raises SettingsError for a value out of range, TypeError for one of another type; `values` has only names of fields.
    """
    given: dict[str, Any] = {}
    for item in fields(typing.cast(Any, settings)):
        value = values.get(item.name)
        if value is not None:
            given[item.name] = _checked(item, _of_kind(item, value), item.name)
            choices = item.metadata["choices"]
            if choices and given[item.name] not in choices:
                raise SettingsError(f"{item.name}: {value!r} is not one of {', '.join(choices)}")
        elif item.name in values and isinstance(item.type, types.UnionType):
            given[item.name] = None
    return settings(**given)


def parse_words(settings: type[Any], words: Mapping[str, str], source: str) -> dict[str, Any]:
    """The fields of `settings` that words name as flags do, without the leading dashes: `max-model-len`, `worker_num`.

    `source` begins the message of a SettingsError, which is raised for an unknown name, two of one field, or a value
    that the flag would not take.
    """
    items = {_dashed(name)[2:]: item for item in fields(settings) for name in _option_names(item)}
    values: dict[str, Any] = {}
    for word, text in words.items():
        name = word.replace("_", "-")
        item = items.get(name)
        if item is None:
            near = difflib.get_close_matches(name, items, n=1)
            raise SettingsError(f"{source}: unknown setting {word!r}" + (f". Did you mean {near[0]}?" if near else ""))
        if item.name in values:
            raise SettingsError(f"{source}: {word!r} is given twice, under two of its names")
        values[item.name] = _value(item, _convert(item, text, f"{source}: {word}"), f"{source}: {word}")
    return values


def to_argv(settings: Any) -> list[str]:
    """The flags that give these settings again: how a launcher passes them to a child."""
    argv: list[str] = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        if value != item.default:
            word = str(value).lower() if value is None or isinstance(value, bool) else value
            argv.append(f"--{item.name.replace('_', '-')}={word}")
    return argv


def normalise(argv: Sequence[str]) -> list[str]:
    """Treats '-' and '_' in option names as the same character."""
    return [_dashed(word) if word.startswith("--") else word for word in argv]


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _has(parser: argparse.ArgumentParser, name: str) -> bool:
    return any(action.dest == name for action in parser._actions)  # pyright: ignore[reportPrivateUsage]


def _option_names(item: "Field[Any]") -> list[str]:
    return [f"--{item.name.replace('_', '-')}", *item.metadata["alias"]]


def _option_arguments(item: "Field[Any]") -> dict[str, Any]:
    kind = _kind(item)
    default = "" if item.default in (None, "", ()) else f" (default: {item.default})"
    variable = f" [{item.metadata['env']}]" if item.metadata["env"] else ""
    arguments: dict[str, Any] = {"dest": item.name, "default": None, "help": item.metadata["help"] + default + variable}
    if typing.get_origin(kind) is tuple:
        return {**arguments, "action": "append", "metavar": item.metadata["metavar"]}
    if kind is bool:
        return {**arguments, "nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    if item.metadata["choices"]:
        return {**arguments, "choices": item.metadata["choices"]}
    if item.metadata["more"]:
        return {**arguments, "nargs": "+", "action": _FirstAndMore, "more": item.metadata["more"], "metavar": "NAME"}
    return {**arguments, "type": _reader(item), "metavar": kind.__name__.upper()}


class _FirstAndMore(argparse.Action):
    """Stores the first word in the option's own field and the others, joined by commas, in another one.

    All of them stand in `<field>_words` too, for a command that has words of its own.
    """

    def __init__(self, *args: Any, more: str, **named: Any) -> None:
        super().__init__(*args, **named)
        self._more = more

    def __call__(
        self, _parser: argparse.ArgumentParser, options: argparse.Namespace, values: Any, _name: str | None = None
    ) -> None:
        first, *others = values
        setattr(options, self.dest, first)
        setattr(options, f"{self.dest}_words", values)
        if others:
            setattr(options, self._more, ",".join(others))


def _value(item: "Field[Any]", given: Any, source: str) -> Any:
    """What the field holds for a word that was read."""
    if given is NONE:
        return None
    if typing.get_origin(_kind(item)) is tuple:
        return tuple(given)
    return _checked(item, given, source)


def _checked(item: "Field[Any]", value: Any, source: str) -> Any:
    rule: Rule | None = item.metadata["rule"]
    if rule is not None and not rule.holds(value):
        raise SettingsError(f"{source}: {value} is not {rule.text}")
    return value


def _convert(item: "Field[Any]", text: str, source: str) -> Any:
    kind = _kind(item)
    try:
        value = _reader(item)(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SettingsError(f"{source}: {text!r} is not a valid {kind.__name__}") from error
    choices = item.metadata["choices"]
    if choices and value not in choices:
        raise SettingsError(f"{source}: {text!r} is not one of {', '.join(choices)}")
    return value


def _of_kind(item: "Field[Any]", value: Any) -> Any:
    kind = _kind(item)
    accepted: Any = {float: (int, float), str: (str, os.PathLike)}.get(kind, kind)
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{item.name}: {value!r} is not a value of type {kind.__name__}")
    return str(value) if kind is str else kind(value)


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 0, 1, true, false")
    return _BOOLEANS[text.lower()]


def _reader(item: "Field[Any]") -> Callable[[str], Any]:
    """What turns a word into the field's value. Raises ValueError or ArgumentTypeError."""
    kind = _kind(item)
    if kind is bool:
        return _boolean

    optional = isinstance(item.type, types.UnionType)

    def read(text: str) -> Any:
        return NONE if optional and text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names it in its messages
    return read


def _kind(item: "Field[Any]") -> Any:
    assert item.default is not MISSING, item.name
    hint: Any = item.type
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint
