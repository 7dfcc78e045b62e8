"""The commands about the command line itself: `help`, `completion` and `version`.

Their options have `make_parser`, the function of `antiphon.commands.tree`, which imports this module.
"""

import argparse

from antiphon.commands.command import Command
from antiphon.commands.parser import Parser
from antiphon.shared.version import __version__
from antiphon.terminal.exit_codes import NotFoundError
from antiphon.terminal.output import in_json


def _help_flags(parser: Parser) -> None:
    parser.add_argument("about", nargs="?", default="", metavar="COMMAND", help="a command (default: all of them)")
    parser.add_argument(
        "word", nargs="?", default="", metavar="WORD", help="its subcommand, or only its flags about this word"
    )


def _completion_flags(parser: Parser) -> None:
    from antiphon.commands.completion import SHELLS

    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _help(options: argparse.Namespace) -> int:
    root, commands = options.make_parser(options.about)
    if options.about and options.about not in commands:
        raise NotFoundError(f"there is no command {options.about}; `antiphon help` lists the commands")
    parser, word = commands[options.about] if options.about else root, options.word
    if word in parser.kinds():
        parser, word = parser.kinds()[word], ""
    print(parser.help_about(word) if word else parser.format_help(), end="")
    return 0


def _completion(options: argparse.Namespace) -> int:
    from antiphon.commands.completion import script, tree_of

    print(script(options.shell, tree_of(options.make_parser()[0])), end="")
    return 0


def _version(options: argparse.Namespace) -> int:
    print(in_json({"version": __version__}) if options.json else f"antiphon {__version__}")
    return 0


COMMANDS = (
    Command(
        name="help",
        audience="users",
        help="show this list, or the flags of a command",
        run=_help,
        flags=_help_flags,
        has_json=False,
    ),
    Command(
        name="completion",
        audience="users",
        help="print the script that completes commands in bash, zsh or fish",
        run=_completion,
        flags=_completion_flags,
        has_json=False,
    ),
    Command(name="version", audience="users", help="print the version", run=_version),
)
