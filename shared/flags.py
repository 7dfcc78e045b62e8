"""Turns classes of settings into command-line flags, parses flags into settings, and writes settings as flags.

A field of such a class is made with `flag`, which adds help, a rule for the value and an environment variable, or is a
group of settings, whose fields are flags of the same command line. The settings themselves are in
`antiphon.shared.config`. Called by each process at start-up, which parses its flags, and by the launcher, which passes
settings to its child processes.
"""

import argparse
import dataclasses
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, fields, replace
from typing import Any, ClassVar, NoReturn, TypeVar

GROUPS = (
    "model",
    "http",
    "processes",
    "engine: scheduling",
    "engine: memory",
    "engine: execution",
    "engine: parallel",
    "engine: KV transfer",
    "adapters",
    "images",
    "bus",
)
"""Headings of `--help`, in this order; other headings follow them."""
NONE = object()
"""The value of an option that was given as `none`; None means that the option was not given."""
_SHOWN_CHARS = 200
"""Maximum number of characters of a refused value in its error message."""
_PLAIN = {
    "env": "",
    "choices": (),
    "rule": None,
    "alias": (),
    "hidden": (),
    "more": "",
    "metavar": "TEXT",
    "words": False,
}
"""What a setting has that `flag` was not told."""
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


class SettingsError(ValueError):
    """A flag or variable has an invalid value. The message names the flag and the allowed values."""


class Settings:
    """The base class of settings, which cannot be changed. Each subclass is a dataclass; all fields have defaults.

    The constructor and `dataclasses.replace` accept fields by name, those of groups too. A group is a field whose
    default is an object of such a class. `group` of a subclass is the heading of its own flags in `--help`. A subclass
    may give an inherited setting another default, and with `flag` another help text; all else remains.
    """

    # Classes of settings have up to 200 fields, and a process defines about ten before it can do anything: compiling
    # the methods that `@dataclass` generates for them took 100 ms of CPU time in all processes of a server together.
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, group: str = "") -> None:
        for name in inspect.get_annotations(cls):
            value: Any = vars(cls)[name]
            if not isinstance(value, Settings):
                item = typing.cast("Field[Any]", value if type(value) is Field else dataclasses.field(default=value))
                others = (vars(base).get("__dataclass_fields__", {}) for base in cls.__mro__[1:])
                inherited = next((known[name].metadata for known in others if name in known), {"group": group})
                given = {key: told for key, told in item.metadata.items() if told}
                item.metadata = types.MappingProxyType({**_PLAIN, **inherited, **given})
                setattr(cls, name, item)
        dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, **values: Any) -> None:
        for item in fields(self):
            value = values.pop(item.name, item.default)
            if isinstance(value, Settings):
                own = {name: values.pop(name) for name in vars(value).keys() & values.keys()}
                value = replace(value, **own) if own else value
            self.__dict__[item.name] = value
        if values:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(values))}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))


T = TypeVar("T", bound=Settings)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition for a value. `text` describes the condition and completes an error message "… is not "."""

    text: str
    holds: Callable[[Any], bool]


AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Rule("at least 0", lambda value: 0 <= value < float("inf"))
SHARE = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
FRACTION = Rule("between 0 and 1", lambda value: 0 <= value <= 1)
PORT = Rule("a port between 1 and 65535", lambda value: 1 <= value <= 65535)
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
    hidden: Sequence[str] = (),
    group: str = "",
    more: str = "",
    metavar: str = "",
    words: bool = False,
) -> Any:
    """Returns a dataclass field that is a setting.

    `group` is its heading in `--help`; `hidden` are further names that `--help` does not list. `rule` is checked when
    the value is read. `more`: the flag takes several words;
    the words after the first are stored, joined by commas, in the field with this name. A field of type
    `tuple[str, ...]` is a flag that may be repeated; `metavar` stands for one of its values. With `words` each use of
    that flag takes several words.
    """
    of_value = {"help": help, "env": env, "choices": tuple(choices), "rule": rule}
    of_flag = {
        "alias": tuple(alias),
        "hidden": tuple(hidden),
        "group": group,
        "more": more,
        "metavar": metavar,
        "words": words,
    }
    return dataclasses.field(default=default, metadata=of_value | of_flag)


def flags_of(settings: type[Settings]) -> "Iterator[Field[Any]]":
    """Yields the fields that are flags: those of the class and of its groups."""
    for item in fields(settings):
        if isinstance(item.default, Settings):
            yield from flags_of(type(item.default))
        else:
            yield item


def values_of(settings: Settings) -> dict[str, Any]:
    """Returns the values of all flags by the names of their fields."""
    values: dict[str, Any] = {}
    for name, value in vars(settings).items():
        values |= values_of(value) if isinstance(value, Settings) else {name: value}
    return values


def given_of(settings: Settings) -> dict[str, Any]:
    """Returns the values that differ from the defaults."""
    values = values_of(settings)
    return {item.name: values[item.name] for item in flags_of(type(settings)) if values[item.name] != item.default}


def converted(settings: Settings, kind: type[T], **changes: Any) -> T:
    """Returns the settings of class `kind`, all of whose flags `settings` has too, with `changes` of single values."""
    values = values_of(settings) | changes
    return kind(**{item.name: values[item.name] for item in flags_of(kind)})


def json_words(text: str) -> list[str] | None:
    """Returns the strings of a JSON list, an empty list for the empty text, and None for anything else."""
    try:
        value: Any = json.loads(text) if text else []
    except ValueError:
        return None
    if not isinstance(value, list):
        return None
    words = typing.cast(list[Any], value)
    return words if all(isinstance(word, str) for word in words) else None


def add_flags(parser: argparse.ArgumentParser, settings: type[Settings], skip: frozenset[str] = frozenset()) -> None:
    """Adds an option to the parser for each field that it does not have yet. Options that are not given stay None.

    A boolean field also gets an option `--no-…` without a value, which `--help` does not list.
    """
    wanted = [item for item in flags_of(settings) if item.name not in skip and not _has(parser, item.name)]
    for title in dict.fromkeys((*GROUPS, *(item.metadata["group"] for item in wanted))):
        group = parser.add_argument_group(title)
        for item in wanted:
            if item.metadata["group"] == title:
                arguments = _option_arguments(item)
                group.add_argument(*_shown_names(item), **arguments)
                if item.metadata["hidden"]:
                    hidden_names(group, item.metadata["hidden"], **arguments)
                if _kind(item) is bool:
                    no = f"--no-{_option_names(item)[0].removeprefix('--')}"
                    group.add_argument(no, dest=item.name, action="store_const", const=False, help=argparse.SUPPRESS)


def hidden_names(parser: "argparse.ArgumentParser | Any", names: Sequence[str], **arguments: Any) -> None:
    """Adds further names of an option, which has the same `arguments`. `--help` does not list them."""
    hidden: dict[str, Any] = {**arguments, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument(*names, **hidden)


def parse(settings: type[T], options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """Returns settings from parsed options, the environment and defaults. Raises SettingsError for invalid values."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in flags_of(settings):
        given, source = getattr(options, item.name, None), _option_names(item)[0]
        name = item.metadata["env"]
        if given is None and name and environ.get(name, "") != "":
            source = f"environment variable {name}"
            given = _convert(item, environ[name], source)
        if given is not None:
            values[item.name] = _value(item, given, source)
    return settings(**values)


def validated(settings: type[T], values: Mapping[str, Any]) -> T:
    """Returns settings from Python values, checked by the rules and choices of the flags.

    The keys of `values` must be names of fields. None means the default, except in fields that may be None. Raises
    SettingsError for a value out of range and TypeError for a value of the wrong type.
    """
    given: dict[str, Any] = {}
    for item in flags_of(settings):
        value = values.get(item.name)
        if value is not None:
            given[item.name] = _checked(item, _of_kind(item, value), item.name)
            choices = item.metadata["choices"]
            if choices and given[item.name] not in (*choices, item.default):
                raise SettingsError(f"{item.name}: {value!r} is not one of {', '.join(choices)}")
        elif item.name in values and isinstance(item.type, types.UnionType):
            given[item.name] = None
    return settings(**given)


def parse_words(settings: type[Settings], words: Mapping[str, str], source: str) -> dict[str, Any]:
    """Returns field values from texts by flag name without the leading dashes, such as `max-model-len`, `worker_num`.

    Raises SettingsError for an unknown name, for two names of the same field, and for a value that the flag would not
    accept. `source` begins the error message.
    """
    items = {_dashed(name).lstrip("-"): item for item in flags_of(settings) for name in _option_names(item)}
    values: dict[str, Any] = {}
    for word, text in words.items():
        name = word.replace("_", "-")
        item = items.get(name)
        if item is None:
            import difflib  # only needed for this message

            near = difflib.get_close_matches(name, items, n=1)
            raise SettingsError(f"{source}: unknown setting {word!r}" + (f". Did you mean {near[0]}?" if near else ""))
        if item.name in values:
            raise SettingsError(f"{source}: {word!r} is given twice, under two of its names")
        values[item.name] = _value(item, _convert(item, text, f"{source}: {word}"), f"{source}: {word}")
    return values


def to_argv(settings: Settings) -> list[str]:
    """Returns the flags that parse to these settings. The launcher passes them to its child processes."""
    argv: list[str] = []
    for name, value in given_of(settings).items():
        for each in typing.cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,):
            word = str(each).lower() if each is None or isinstance(each, bool) else each
            argv.append(f"--{name.replace('_', '-')}={word}")
    return argv


def normalise(argv: Sequence[str]) -> list[str]:
    """Returns the command line with '_' replaced by '-' in option names, so that both spellings are equal."""
    return [_dashed(word) if word.startswith("--") else word for word in argv]


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _has(parser: argparse.ArgumentParser, name: str) -> bool:
    return any(action.dest == name for action in parser._actions)  # pyright: ignore[reportPrivateUsage]


def _shown_names(item: "Field[Any]") -> list[str]:
    return [f"--{item.name.replace('_', '-')}", *item.metadata["alias"]]


def _option_names(item: "Field[Any]") -> list[str]:
    return [*_shown_names(item), *item.metadata["hidden"]]


def _option_arguments(item: "Field[Any]") -> dict[str, Any]:
    kind = _kind(item)
    default = "" if item.default in (None, "", ()) else f" (default: {item.default})"
    variable = f" [{item.metadata['env']}]" if item.metadata["env"] else ""
    arguments: dict[str, Any] = {"dest": item.name, "default": None, "help": item.metadata["help"] + default + variable}
    if typing.get_origin(kind) is tuple:
        several = {"action": "extend", "nargs": "+"} if item.metadata["words"] else {"action": "append"}
        return {**arguments, **several, "metavar": item.metadata["metavar"]}
    if kind is bool:
        return {**arguments, "nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    if item.metadata["choices"]:
        return {**arguments, "choices": item.metadata["choices"]}
    if item.metadata["more"]:
        return {**arguments, "nargs": "+", "action": _FirstAndMore, "more": item.metadata["more"], "metavar": "NAME"}
    return {**arguments, "type": _reader(item), "metavar": kind.__name__.upper()}


class _FirstAndMore(argparse.Action):
    """Stores the option's first word in its own field and the other words, joined by commas, in the field `more`.

    Also stores the list of all words in `<field>_words`, for commands that take positional words themselves.
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
    """Returns the value of the field for a parsed option. Raises SettingsError if it breaks the field's rule."""
    if given is NONE:
        return None
    if typing.get_origin(_kind(item)) is tuple:
        return tuple(given)
    return _checked(item, given, source)


def _checked(item: "Field[Any]", value: Any, source: str) -> Any:
    rule: Rule | None = item.metadata["rule"]
    if rule is not None and not rule.holds(value):
        shown = str(value)
        shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
        raise SettingsError(f"{source}: {shown} is not {rule.text}")
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
    if typing.get_origin(kind) is tuple:
        words: list[Any] = [*typing.cast(Sequence[Any], value)] if isinstance(value, list | tuple) else [value]
        if not all(isinstance(word, str) for word in words):
            raise TypeError(f"{item.name}: {value!r} is not a list of texts")
        return tuple(words)
    accepted: Any = {float: (int, float), str: (str, os.PathLike)}.get(kind, kind)
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(f"{item.name}: {value!r} is not a value of type {kind.__name__}")
    return str(value) if kind is str else kind(value)


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of 0, 1, true, false")
    return _BOOLEANS[text.lower()]


def _reader(item: "Field[Any]") -> Callable[[str], Any]:
    """Returns a function that converts an option's text to a value. It raises ValueError or ArgumentTypeError."""
    kind = _kind(item)
    if kind is bool:
        return _boolean

    if typing.get_origin(kind) is tuple:
        return lambda text: tuple(text.splitlines())

    optional = isinstance(item.type, types.UnionType)

    def read(text: str) -> Any:
        return NONE if optional and text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse shows this name in its error messages
    return read


def _kind(item: "Field[Any]") -> Any:
    assert item.default is not MISSING, item.name
    hint: Any = item.type
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint
