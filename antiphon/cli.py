"""The command `antiphon`: parses the command line and calls the chosen command of `antiphon.commands`.

Flags have the names that vLLM uses; '-' and '_' are interchangeable in them. The error for an unknown flag suggests the
most similar known flag.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from antiphon.commands.ending import guarded
from antiphon.commands.parser import unknown_words
from antiphon.commands.tree import BY_NAME, make_parser, overview
from antiphon.shared.flags import flags_of, normalise
from antiphon.terminal.exit_codes import Exit
from antiphon.terminal.output import tell

if TYPE_CHECKING:
    from antiphon.shared.settings.other_options import Taken

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. `argv` defaults to the arguments of the process."""
    words = normalise(sys.argv[1:] if argv is None else argv)
    if not words:
        print(overview(), end="", file=sys.stderr)
        return Exit.USAGE
    return guarded(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    parser, commands = make_parser(words[0])
    taken = _taken(words)
    try:
        options, unknown = parser.parse_known_args(words if taken is None else taken.words)
    finally:
        sys.stdout.flush()  # The help is printed here, perhaps to a pipe that is closed.
    if unknown:
        commands[options.command].error(unknown_words(unknown, commands[options.command].options()))

    def run() -> int:
        for notice in taken.notices() if taken else ():
            tell(notice)
        return options.run(options)

    as_json = getattr(options, "json", False) is True
    return guarded(run, starts_server=BY_NAME[options.command].starts_server, as_json=as_json)


def _taken(words: Sequence[str]) -> "Taken | None":
    """Returns the words without options of other servers, which commands that start a server accept or refuse.

    None: the command takes no such options.
    """
    if words[0] not in ("serve", "run", "start-role"):
        return None
    from antiphon.settings import InstanceSettings
    from antiphon.shared.settings.other_options import take

    own = {item.metadata["env"] for item in flags_of(InstanceSettings)} if words[0] == "start-role" else set[str]()
    return take(words, {name: value for name, value in os.environ.items() if name not in own})


if __name__ == "__main__":
    sys.exit(main())
