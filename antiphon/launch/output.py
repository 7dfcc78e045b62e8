"""What the launcher prints: the lines of its children and its own, as text or as JSON objects.

Lines are written by a thread: a terminal or pipe that stalls would otherwise stop the launcher, and with it the
children, whose output it forwards. State of the process, because so is its output.
"""

import atexit
import time

from antiphon.shared.observability.line_writer import LineWriter
from antiphon.shared.observability.logs import json_line, read_line, stamp_of

_as_json = False


def use_format(log_format: str) -> None:
    """Sets the format of all further lines: `text` or `json`."""
    global _as_json
    _as_json = log_format == "json"


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return _as_json


def print_line(name: str, line: str) -> None:
    """Prints a line from a child or the launcher itself to standard error. Does not block."""
    _writer.write(_formed(name, line))


def flush() -> None:
    """Waits until what was printed is written, unless the reader has stalled. Called at the end of the process."""
    _writer.flush()


class Output:
    """Prints the lines of the children; while `only_problems` is true, none of the level INFO."""

    only_problems = False

    def print(self, name: str, line: str) -> None:
        """See `print_line`."""
        found = read_line(line) if self.only_problems else None
        if found is None or found[0] != "INFO":
            print_line(name, line)


def _formed(name: str, line: str) -> str:
    if not _as_json:
        return f"{name:<13} | {line}"
    if line.startswith("{") and read_line(line) is not None:
        return line
    return json_line(stamp_of(time.time()), "INFO", name, "output", line)


_writer = LineWriter(lambda text: _formed("antiphon", text))
atexit.register(_writer.flush)
