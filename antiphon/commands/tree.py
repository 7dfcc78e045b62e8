"""All commands, in the order of the overview, and the parser that is made of them."""

from antiphon.commands import about, looking, machines, measuring, on_disk, operating, serving, talking
from antiphon.commands.command import Audience, Command, add_json
from antiphon.commands.parser import Parser
from antiphon.shared.version import __version__

HEADINGS: dict[Audience, str] = {
    "users": "for users",
    "operators": "for operators of a server",
    "developers": "for developers",
}
COMMANDS: tuple[Command, ...] = (
    *serving.COMMANDS,
    *talking.COMMANDS,
    *on_disk.COMMANDS,
    *looking.COMMANDS,
    *operating.COMMANDS,
    *machines.COMMANDS,
    *measuring.COMMANDS,
    *about.COMMANDS,
)
BY_NAME = {command.name: command for command in COMMANDS}
_DESCRIPTION = "Serves language models: `antiphon serve` starts everything on this machine."
_MORE = (
    "`antiphon COMMAND --help` shows the flags of a command. Exit codes: 0 success, 1 failed,",
    "2 wrong usage, 3 no server there, 4 not found, 5 nothing is proven.",
)


class _Root(Parser):
    """The parser of the whole command line, whose help is the overview of the commands."""

    def format_usage(self) -> str:
        return "usage: antiphon COMMAND [FLAGS]\n"

    def format_help(self) -> str:
        return overview()


def overview() -> str:
    """Returns what `antiphon --help` prints."""
    width = max(len(command.name) for command in COMMANDS)
    lines = ["usage: antiphon COMMAND [FLAGS]", "", _DESCRIPTION]
    for audience, heading in HEADINGS.items():
        lines += ["", f"{heading}:"]
        lines += [f"  {one.name:<{width}}  {one.help}" for one in COMMANDS if one.audience == audience]
    return "\n".join([*lines, "", *_MORE, ""])


def make_parser(command: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Returns the parser of the whole command line, and the subparser of each command by the command's name.

    `command`: only this command gets its flags, which takes a tenth of the time; None: each command gets them.
    """
    parser = _Root(prog="antiphon", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"antiphon {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    made: dict[str, Parser] = {}
    for one in COMMANDS:
        usage = f"antiphon {one.name} {one.usage}" if one.usage else None
        made[one.name] = commands.add_parser(one.name, help=one.help, description=one.help, usage=usage)
        made[one.name].set_defaults(run=one.run, make_parser=make_parser)
        made[one.name].first = one.first
        if command in (None, one.name):
            if one.flags is not None:
                one.flags(made[one.name])
            if one.has_json:
                add_json(made[one.name])
    return parser, made
