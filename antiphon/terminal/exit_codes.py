"""The exit codes of all commands, and the exceptions that carry them.

docs/reference/command-line.md lists the codes.
"""

from enum import IntEnum
from typing import Any

from antiphon.shared.flags import SettingsError


class Exit(IntEnum):
    """An exit code.

    `CONFIGURATION` (EX_CONFIG of sysexits.h) is that of commands that start a server: service managers do not start
    it again after this code. `INTERRUPTED` and `BROKEN_PIPE` are 128 plus the number of the signal, as in a shell.
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    UNDECIDED = 5
    CONFIGURATION = 78
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class CommandError(SettingsError):
    """A failure that ends the command with `exit_code`. The text is for the user.

    `details`: further facts for `--json`, such as the error's code.
    """

    exit_code = Exit.FAILED

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


class NotFoundError(CommandError):
    """What the command line names does not exist."""

    exit_code = Exit.NOT_FOUND


class UnreachableError(CommandError):
    """No server answers at the address."""

    exit_code = Exit.UNREACHABLE


def exit_code_of(error: SettingsError, *, starts_server: bool) -> Exit:
    """Returns the exit code after an error. `starts_server`: the command starts a server."""
    if isinstance(error, CommandError):
        return error.exit_code
    return Exit.CONFIGURATION if starts_server else Exit.USAGE
