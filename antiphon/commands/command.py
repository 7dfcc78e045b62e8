"""What a command is: its line in the overview, its flags, and the function that runs it."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from antiphon.commands.parser import Parser
from antiphon.terminal.address import address_of

if TYPE_CHECKING:
    from antiphon.client import Client

Audience = Literal["users", "operators", "developers"]
Run = Callable[[argparse.Namespace], int]
Flags = Callable[[Parser], None]
"""Adds the flags of a command to its parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command. `help`: one line of at most `HELP_CHARS` characters, unlike that of any other command.

    `first`: flags that its plain `--help` shows, if it has too many. `usage`: its arguments, where `--help` cannot
    derive them. `has_json`: each of its parsers gets the flag `--json`; false for commands that print no answer.
    `starts_server`: invalid settings end it with the exit code that service managers know.
    """

    name: str
    audience: Audience
    help: str
    run: Run
    flags: Flags | None = None
    first: Sequence[str] = ()
    usage: str = ""
    has_json: bool = True
    starts_server: bool = False


def client_of(options: argparse.Namespace) -> "Client":
    """Returns a client of the server that the flags of `server_flags`, or variables, name."""
    from antiphon.client import Client

    found = address_of(options)
    return Client(found.server, found.api_key, flag=found.source)


HELP_CHARS = 62
"""The overview has at most 80 columns."""


def add_json(parser: Parser) -> None:
    """Adds `--json` to each parser that reads flags and does not have it yet."""
    for leaf in parser.leaves():
        if "--json" not in leaf.options():
            leaf.add_argument("--json", action="store_true", help="print the answer as JSON; errors too")
