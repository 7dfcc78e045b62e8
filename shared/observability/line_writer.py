"""Writes lines to standard error from a thread of its own, so that a reader that stalls does not stop the process.

Lines wait in a bounded queue. If it is full, further lines are dropped and counted, and a line tells their number when
the reader goes on.
"""

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable

from antiphon.shared import limits

GATHER_S = 0.05
"""How long lines that are not urgent are gathered before they are written together, seconds. A write for each of them
would wake the thread as often as a busy server has requests."""
CLOSE_S = 1.0
"""How long `close` waits for a reader that does not read, seconds."""


Line = str | Callable[[], str]
"""A line without its end, or what makes it."""


class LineWriter:
    """The lines of one process. The thread starts with the first line, and does not wake without lines.

    `form` makes a line of the sentence about dropped lines.
    """

    def __init__(self, form: Callable[[str], str], lines_max: int = limits.LOG_LINES_MAX) -> None:
        self._waiting: deque[Line] = deque()
        self._form = form
        self._lines_max, self._dropped = lines_max, 0
        self._lock = threading.Lock()
        self._some, self._urgent, self._empty = threading.Event(), threading.Event(), threading.Event()
        self._empty.set()
        self._thread: threading.Thread | None = None

    def write(self, line: Line, *, urgent: bool = True) -> None:
        """Queues a line, or drops it. Does not block. From any thread."""
        with self._lock:
            if len(self._waiting) >= self._lines_max:
                self._dropped += 1
                return
            self._waiting.append(line)
            if len(self._waiting) == 1:
                self._empty.clear()
                self._some.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log lines", daemon=True)
                self._thread.start()
        if urgent:
            self._urgent.set()

    def flush(self, timeout_s: float = CLOSE_S) -> None:
        """Waits until all lines are written, at most `timeout_s`."""
        self._urgent.set()
        self._empty.wait(timeout_s)

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._urgent.wait(GATHER_S)
            self._urgent.clear()
            with self._lock:
                lines, dropped = [*self._waiting], self._dropped
                self._waiting.clear()
                self._some.clear()
                self._dropped = 0
            if dropped:
                lines.append(self._form(f"{dropped} lines were dropped here: the reader of the output had stalled"))
            # The reader may have ended (closed pipe), which must not stop the process.
            with contextlib.suppress(OSError, ValueError):
                _write("".join(f"{line if isinstance(line, str) else line()}\n" for line in lines))
            with self._lock:
                if not self._waiting:
                    self._empty.set()


def _write(text: str) -> None:
    """Writes a text to standard error. Raises OSError or ValueError if it is closed."""
    try:
        descriptor = sys.stderr.fileno()
    except OSError:  # it is no file, as in tests
        sys.stderr.write(text)
        return
    # Without Python's own buffer, whose lock the end of the process would wait for.
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has made the terminal not wait
            select.select((), (descriptor,), ())
