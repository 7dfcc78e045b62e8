"""The terminal's second screen, on which a command redraws its text. The terminal is as before at the end."""

import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import TracebackType

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """Context manager. Standard input and output must be terminals; keys are read without a line's end."""

    def __enter__(self) -> "Screen":
        # A command that is told to end leaves the terminal as it was, too.
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        self._input = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._input)
        tty.setcbreak(self._input)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def draw(self, lines: Sequence[str]) -> None:
        """Replaces the text. Lines that the terminal has no room for are cut off."""
        columns, rows = shutil.get_terminal_size()
        # A style may end behind the last column.
        shown = [line if line.startswith("\x1b") else line[:columns] for line in lines[:rows]]
        sys.stdout.write(_HOME + "\n".join(line + _CLEAR_LINE for line in shown) + _CLEAR_BELOW)
        sys.stdout.flush()

    def wait(self, seconds: float) -> bool:
        """Waits; returns whether the user has ended the command with `q`."""
        ready, _, _ = select.select([self._input], [], [], seconds)
        return bool(ready) and os.read(self._input, 1) in (b"q", b"Q", b"")
