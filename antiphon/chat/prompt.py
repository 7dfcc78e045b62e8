"""Reads what the user types in `antiphon chat`: line editing and history by the standard library's readline.

The history is kept in a private file of the user. Several lines are one message between lines of three quotation marks,
or if lines end in a backslash.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from antiphon.shared import limits

PROMPT, CONTINUED = ">>> ", "... "
_QUOTES = '"""'
Read = Callable[[str], str]
"""Shows a prompt and returns a line. Raises EOFError at the end of the input."""


def read_message(read: Read) -> str:
    """Returns the next message, of one or several lines. Raises EOFError at the end of the input."""
    line = read(PROMPT)
    if line.lstrip().startswith(_QUOTES):
        return _quoted(line.lstrip()[len(_QUOTES) :], read)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(CONTINUED))
    return "\n".join(lines).strip()


def _quoted(line: str, read: Read) -> str:
    lines: list[str] = []
    while not line.rstrip().endswith(_QUOTES):
        lines.append(line)
        line = read(CONTINUED)
    lines.append(line.rstrip()[: -len(_QUOTES)])
    return "\n".join(lines).strip("\n")


def history_file(environ: Mapping[str, str]) -> Path:
    """Returns the file of the history, in the user's directory for state (XDG_STATE_HOME)."""
    state = environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    return Path(state) / "antiphon" / "chat_history"


@contextlib.contextmanager
def line_editing(path: Path, words: Sequence[str]) -> Iterator[None]:
    """Context manager in which `input` has line editing, the history of a file, and Tab for the commands in `words`.

    The history is written at the end, to a file that only this user can read. Without readline, or where the file
    cannot be written, the history lasts as long as the session.
    """
    try:
        import readline
    except ImportError:
        yield
        return

    def complete(text: str, number: int) -> str | None:
        found = [word for word in words if word.startswith(text)] if text.startswith("/") else []
        return f"{found[number]} " if number < len(found) else None

    readline.set_completer_delims(" \t\n")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(limits.CHAT_HISTORY_LINES_MAX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            path.chmod(0o600)
            readline.write_history_file(path)
