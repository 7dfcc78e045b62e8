"""The parser of the command line: its errors, and its help, which can be limited to a word (`--help=WORD`).

Used by every command and by the entry point `antiphon.entrypoints.openai.api_server`.
"""

import argparse
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from antiphon.terminal.exit_codes import Exit

_NUMBER = re.compile(r"invalid (int|float) value: ('.*')")
_NUMBERS = {"int": "whole number", "float": "number"}
"""How error messages call the types of options."""
_ALL, _GROUPS = ("all", "page"), ("groups", "listgroup")
_OF_VLLM = {
    "modelconfig": "model",
    "loadconfig": "model",
    "frontend": "http",
    "schedulerconfig": "engine: scheduling",
    "cacheconfig": "engine: memory",
    "parallelconfig": "engine: parallel",
    "kvtransferconfig": "engine: kv transfer",
    "loraconfig": "adapters",
    "multimodalconfig": "images",
}
"""Groups of flags by the names that they have in vLLM's help, in lower case."""
_VALUE, _CHOICES_CHARS = "NAME", 40
"""What stands for the value of an option whose choices are longer than this."""
_TITLES = {"positional arguments": "arguments", "options": "flags"}
"""How help calls the groups that argparse makes."""
Part = tuple[str, list[argparse.Action]]
"""A heading with its options."""


class _Formatter(argparse.HelpFormatter):
    """Writes the value of an option once, behind its names, and many choices behind the text."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        name = _VALUE if _is_long(action) else self._get_default_metavar_for_optional(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, name)}"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kinds: dict[object, str] = {int: "INT", float: "FLOAT"}
        return kinds.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if _is_long(action):
            return lambda size: (_VALUE,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        choices = f": {', '.join(map(str, action.choices or ()))}" if _is_long(action) else ""
        return super()._expand_help(action) + choices


def _is_long(action: argparse.Action) -> bool:
    return bool(action.option_strings) and sum(len(str(one)) + 1 for one in action.choices or ()) > _CHOICES_CHARS


class _Help(argparse.Action):
    """`-h`, `--help`, `--help=WORD`."""

    def __call__(
        self, parser: argparse.ArgumentParser, _options: argparse.Namespace, values: Any, _name: str | None = None
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.help_about(values) if values else parser.format_help(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with short usage lines, help about a word, and suggestions in its errors."""

    takes_whole_names = False
    """Whether options with one dash are whole words: `-tp` is neither `-t p` nor an abbreviation of another option."""
    first: Sequence[str] = ()
    """Options that the plain `--help` shows, by their names without dashes. If there are any, it omits the others."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, allow_abbrev=False, add_help=False, formatter_class=_Formatter, **named)
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="WORD", help="show the flags about a word")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # Here argparse searches for abbreviated names and joined values; for one dash even if `allow_abbrev` is off.
        return [] if self.takes_whole_names else super()._get_option_tuples(option_string)

    def error(self, message: str) -> NoReturn:
        """Prints the error with the suggestion and exits with code 2."""
        message = _NUMBER.sub(lambda found: f"{found[2]} is not a {_NUMBERS[found[1]]}", message)
        self.exit(Exit.USAGE, f"{self.prog}: {message}{self._suggestion(message)}\nTry `{self.prog} --help`.\n")

    def kinds(self) -> "dict[str, Parser]":
        """Returns the parsers of the subcommands, by their names."""
        found = (action.choices for action in self._actions if isinstance(action.choices, dict))
        return typing.cast("dict[str, Parser]", next(found, {}))

    def leaves(self) -> "list[Parser]":
        """Returns the parsers that read flags: those of the subcommands, or this one if it has none."""
        return [leaf for kind in self.kinds().values() for leaf in kind.leaves()] or [self]

    def shown_actions(self) -> list[argparse.Action]:
        """Returns the options and arguments that help lists, without subcommands."""
        return [action for _, actions in self._parts() for action in actions]

    def options(self) -> list[str]:
        """Returns all options of this parser and its subcommands with their dashes, except those of one letter."""
        own = [text for action in self._actions for text in action.option_strings if len(text) > 2]
        return own + [text for kind in self.kinds().values() for text in kind.options()]

    def format_usage(self) -> str:
        """Returns the usage line: arguments and required flags, and [FLAGS] for the others."""
        words = [self.usage] if self.usage else [self.prog, *self._usage_words()]
        return f"usage: {' '.join(words)}\n"

    def format_help(self) -> str:
        """Returns the help: all flags, or those in `first` and how to see the others."""
        if not self.first:
            return self._format(list(self._parts()))
        arguments = [part for part in self._parts() if not any(action.option_strings for action in part[1])]
        shown = [action for name in self.first for action in self._named(name)]
        count = sum(bool(action.option_strings) for action in self.shown_actions())
        more = (
            f"\nThese are {len(shown)} of {count} flags. --help=all shows all of them, --help=groups their groups, and "
            "--help=WORD\nthose with the word in their name, group or text, such as --help=memory.\n"
        )
        return self._format([*arguments, ("flags that matter most", shown)]) + more

    def help_about(self, topic: str) -> str:
        """Returns the help about a group, a flag or a word. `all`: everything; `groups`: the list of the groups.

        Exits with an error if nothing has the word.
        """
        word = topic.lower().strip("-").replace("_", "-") or "all"
        parts = list(self._parts())
        if word in _ALL:
            return self._format(parts)
        if word in _GROUPS:
            rows = [f"  {title:<22} {len(actions):>3} flags" for title, actions in parts]
            return "\n".join([f"groups of flags (see one with `{self.prog} --help=GROUP`):", *rows, ""])
        group = _OF_VLLM.get(word, word)
        for keep in (
            lambda title, _action: title.lower() == group,
            lambda _title, action: word in (name.lstrip("-") for name in action.option_strings),
            lambda title, action: word in _text(title, action),
        ):
            found = _kept(parts, keep)
            if found:
                return self._format(found)
        self.error(f"no flag has '{topic}' in its name, group or text; --help=groups lists the groups")

    def _parts(self) -> Iterator[Part]:
        for group in self._action_groups:
            actions: list[argparse.Action] = group._group_actions  # pyright: ignore[reportPrivateUsage]
            shown = [action for action in actions if action.help != argparse.SUPPRESS]
            if shown:
                yield _TITLES.get(group.title or "", group.title or ""), shown

    def _named(self, name: str) -> list[argparse.Action]:
        return [action for action in self._actions if f"--{name}" in action.option_strings]

    def _format(self, parts: Sequence[Part]) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        for title, actions in parts:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def _usage_words(self) -> Iterator[str]:
        for action in self._actions:
            choices = "|".join(map(str, action.choices or ()))
            name = str(action.metavar or choices or action.dest.upper())
            if not action.option_strings and action.help != argparse.SUPPRESS:
                yield f"[{name}]" if action.nargs in ("?", "*") else name
            elif action.required:
                yield f"{action.option_strings[0]} {name}"
        if not self.kinds():
            yield "[FLAGS]"

    def _suggestion(self, message: str) -> str:
        if "invalid choice: " not in message:
            return ""
        import difflib  # only needed for this message

        typed = message.split("invalid choice: ")[1].split("'")[1:2]
        known = [str(choice) for action in self._actions for choice in action.choices or ()]
        near = difflib.get_close_matches(typed[0], known, n=1) if typed else []
        return f". Did you mean {near[0]}?" if near else ""


def _kept(parts: Sequence[Part], keep: Callable[[str, argparse.Action], bool]) -> list[Part]:
    kept = [(title, [action for action in actions if keep(title, action)]) for title, actions in parts]
    return [(title, actions) for title, actions in kept if actions]


def _text(title: str, action: argparse.Action) -> str:
    return " ".join([title, *action.option_strings, str(action.metavar or ""), action.help or ""]).lower()


def unknown_words(words: Sequence[str], known: Sequence[str]) -> str:
    """Returns the error message for arguments that the parser did not recognise; it names the first of `words`.

    `known` is the list of options from which the message may suggest the most similar one.
    """
    import difflib  # only needed for this message

    from antiphon.settings import SERVICES
    from antiphon.shared.settings.other_options import BY_NAME

    word = words[0].partition("=")[0]
    near = difflib.get_close_matches(word, [*known, *BY_NAME], n=1) if word.startswith("-") else []
    if word in SERVICES:
        near = [f"`antiphon service {word}`"]
    return f"unknown {'option' if word.startswith('-') else 'argument'} {word}" + (
        f". Did you mean {near[0]}?" if near else ""
    )
