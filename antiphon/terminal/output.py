"""Writes the answer of a command as text or as JSON, colours text on a terminal, and shows progress there.

Standard output carries only the answer; notices and progress go to standard error.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

_STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}
_CONTROLS = {
    number: "\N{REPLACEMENT CHARACTER}" for number in (*range(32), *range(127, 160)) if chr(number) not in "\t\n"
}
_COLUMNS = 80
"""Width of a terminal that does not tell it."""
_CLEAR_LINE = "\r\x1b[K"


def show(value: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Prints an answer to standard output: `value` as JSON, or `lines`."""
    print(in_json(value) if as_json else "\n".join(lines), flush=True)


def in_json(value: Any) -> str:
    """Returns a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def in_json_line(value: Any) -> str:
    """Returns a value as JSON in one line."""
    return json.dumps(value, ensure_ascii=False)


def tell(text: str) -> None:
    """Prints a notice to standard error."""
    print(f"antiphon: {text}", file=sys.stderr, flush=True)


def has_colour(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """Whether text on the stream may be coloured: on a terminal, unless NO_COLOR or FORCE_COLOR says otherwise."""
    environ = os.environ if environ is None else environ
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environ.get("TERM", "") != "dumb"


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """Returns the text in a style (`dim`, `bold`, `red`, `green`, `yellow`), if the stream may be coloured.

    `stream`: where the text will be written, standard output by default.
    """
    if not has_colour(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def harmless(text: str) -> str:
    """Returns a text without control characters but tabs and ends of lines: they could change a terminal."""
    return text.translate(_CONTROLS)


class StatusLine:
    """One line on standard error that is overwritten. Shows nothing if standard error is no terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = False

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self._stream.isatty():
            width = os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
            self._stream.write(_CLEAR_LINE + styled(text[: width - 1], "dim", self._stream))
            self._stream.flush()
            self._is_shown = True

    def clear(self) -> None:
        """Removes the line, so that other text can be printed."""
        if self._is_shown:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
            self._is_shown = False
