"""Records which functions of this repository a process runs. Every process of a walk loads it as `sitecustomize`.

`infra.walk.processes` puts a link of that name into a directory of its own, which is part of PYTHONPATH, and listens at
the socket `recorder` in the same directory. A process connects when it starts, because it may not be allowed to open
files later, and sends its command line. A command is a byte on the socket and then `SIGNAL`: a thread can only install
a profiler for itself, and Python handles signals in the main thread.

- `BEGIN`: the process forgets what it has recorded, records from now on, and answers with `BEGIN`.
- `END`: it stops and answers with a line of JSON: `functions`, each as (file, name), and `entries`, each as (kind,
  index of the function), in the order of time and of all threads.

This module runs in the processes of the product and imports nothing of it.
"""

import dis
import inspect
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType

SIGNAL = signal.SIGUSR2
BEGIN, END = b"b", b"e"
ENTERED, RESUMED, SENT = range(3)
"""Kinds of entries: a function is called; a generator or coroutine is resumed; the function `SENDS` suspends."""
SENDS = "ServiceClients.submit_batch"
"""The coroutine by which a gateway sends `SubmitBatch`: the message has left when it suspends to wait for the reply."""
_ROOT = f"{Path(__file__).resolve().parents[2]}/"
_PRODUCT = _ROOT + "antiphon/"
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Recorder:
    """Obeys the commands that arrive on `channel`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._records = False
        self._entries: list[tuple[int, CodeType]] = []
        self._ours: dict[str, bool] = {}
        self._starts: dict[CodeType, int] = {}

    def obey(self, _number: int, _frame: FrameType | None) -> None:
        """Reads one command and answers it. Called in the main thread, for a signal."""
        self._records = self._channel.recv(1) == BEGIN
        sys.setprofile(self.profile if self._records else None)
        answer = BEGIN if self._records else self._encoded()
        self._entries = []
        self._channel.sendall(answer)

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """Records an event of the interpreter if it concerns a function of this repository. Called in every thread."""
        if not self._records or event not in ("call", "return") or not self._is_ours(frame.f_code.co_filename):
            return
        code = frame.f_code
        if event == "call":
            resumed = code.co_flags & _RESUMABLE and frame.f_lasti > self._start(code)
            self._entries.append((RESUMED if resumed else ENTERED, code))
        elif code.co_qualname == SENDS:
            self._entries.append((SENT, code))

    def _is_ours(self, file: str) -> bool:
        if (known := self._ours.get(file)) is None:
            known = self._ours[file] = file.startswith(_PRODUCT)
        return known

    def _start(self, code: CodeType) -> int:
        """Returns the offset at which a generator or coroutine begins; it is resumed at greater ones."""
        if (start := self._starts.get(code)) is None:
            start = next(one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")
            self._starts[code] = start
        return start

    def _encoded(self) -> bytes:
        # Imported here: every Python process of the system loads this module when it starts, few are asked.
        import json

        indices: dict[tuple[str, str], int] = {}
        entries = [
            (kind, indices.setdefault((code.co_filename.removeprefix(_ROOT), code.co_qualname), len(indices)))
            for kind, code in self._entries
        ]
        return json.dumps({"functions": list(indices), "entries": entries}).encode() + b"\n"


def install() -> None:
    """Connects this process with the recorder of the walk; does nothing if there is none any more."""
    channel = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        channel.connect(str(Path(__file__).with_name("recorder")))
        recorder = Recorder(channel)
        signal.signal(SIGNAL, recorder.obey)
        # A thread has its profiler from its start, and the profiler does nothing until a recording begins.
        threading.setprofile(recorder.profile)
        # Now that the handler is there, the signal no longer ends the process.
        channel.sendall(" ".join(sys.orig_argv).replace("\n", " ").encode() + b"\n")


if __name__ == "sitecustomize":
    install()
