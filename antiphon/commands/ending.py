"""How a command ends: the exit code and the message after an error, Ctrl-C or a closed pipe."""

import os
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from antiphon.shared.flags import SettingsError
from antiphon.terminal.exit_codes import CommandError, Exit, exit_code_of
from antiphon.terminal.output import in_json_line


def guarded(run: Callable[[], int], *, starts_server: bool = False, as_json: bool = False) -> int:
    """Calls `run` and returns an exit code: that of `run`, or of the error that it raised, whose message is printed.

    `as_json`: the message is a JSON object.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except SettingsError as error:
        _print_error(error, exit_code_of(error, starts_server=starts_server), as_json)
        return int(exit_code_of(error, starts_server=starts_server))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever reads the output, such as `head`, has enough. What Python still writes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.BROKEN_PIPE


def _print_error(error: SettingsError, code: Exit, as_json: bool) -> None:
    hints = list(_hints(error))
    if as_json:
        details = error.details if isinstance(error, CommandError) else {}
        facts: dict[str, Any] = {"message": str(error), **details, "exit_code": int(code)}
        if hints:
            facts["hints"] = hints
        print(in_json_line({"error": facts}), file=sys.stderr)
        return
    print(f"antiphon: {error}", file=sys.stderr)
    for hint in hints:
        print(f"          {hint}", file=sys.stderr)


def _hints(error: SettingsError) -> Iterator[str]:
    """Yields what a user can do about an error of a server."""
    if not isinstance(error, CommandError):
        return
    from antiphon.client import NoConnectionError, ServerError

    if isinstance(error, NoConnectionError):
        from antiphon.inspect.local_servers import local_servers

        found = [url for server in local_servers() for url in server.urls]
        yield f"Servers on this machine: {', '.join(found)}" if found else "Start one with `antiphon serve`."
        yield "Name the address with --server URL or the variable ANTIPHON_SERVER."
    elif isinstance(error, ServerError) and error.status == HTTPStatus.UNAUTHORIZED:
        yield "Give the key with --api-key or the variable ANTIPHON_API_KEY."
