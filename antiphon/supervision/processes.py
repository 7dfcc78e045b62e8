"""One child process, which cannot outlive this process; its output is forwarded line by line.

This module does not restart children: `antiphon.supervision.fleet` decides what happens when a child ends.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from antiphon.shared.observability.logs import read_line

LINE_BYTES_MAX = 16 * 1024
"""Longest line of output in bytes. A longer one is forwarded in pieces."""
_READ_BYTES = 64 * 1024
_LAST_OUTPUT_S = 1.0
"""Longest wait for the last output of a child that has ended: a grandchild may keep the pipe open indefinitely."""
_WRAPPER = str(Path(__file__).with_name("child.py"))

Sink = Callable[[str, str], None]
"""Called with the name of the child and a line of its output, without the line end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """The command of a child. `name` is unique (`engine-2`); replicas have the same `service` (`engine`)."""

    name: str
    service: str
    argv: Sequence[str]
    environ: Mapping[str, str] | None = None
    pass_fds: tuple[int, ...] = ()
    prepare: Callable[[], None] = field(default=lambda: None)
    """Called before each start."""
    show: Callable[[str], bool] = field(default=lambda _line: True)
    """Whether a line of output is forwarded."""
    model: str = ""
    """Served name of the model that the child works for. Replicas have the same service and model."""
    member_id: str = ""
    """The child's id on the bus; empty if it has none."""
    standby_argv: Sequence[str] = ()
    """The command of a process that prepares to become the child and does so when it reads a line from its standard
    input (`antiphon.shared.actors.standby`); empty: there is none."""


class Child:
    """One process, from `start` until `wait` returns.

    A standby becomes the child when `activate` is called.
    """

    def __init__(self, spec: ChildSpec, sink: Sink) -> None:
        self.spec = spec
        self._sink = sink
        self._process: asyncio.subprocess.Process | None = None
        self.last_error = ""
        """The last message that the process logged as an error; empty if there was none."""

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def is_stopped(self) -> bool:
        """Whether the process runs but was stopped by a signal (SIGSTOP), so that it does not work. Linux only."""
        if not self.running:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):
            return False

    async def start(self, *, standby: bool = False) -> None:
        """Starts the process in a session of its own, so that Ctrl-C reaches only the launcher. Raises OSError.

        `standby`: starts the command `spec.standby_argv`.
        """
        self.spec.prepare()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            _WRAPPER,
            str(os.getpid()),
            *(self.spec.standby_argv if standby else self.spec.argv),
            stdin=asyncio.subprocess.PIPE if standby else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self.spec.environ,
            pass_fds=self.spec.pass_fds,
            start_new_session=True,
        )

    def activate(self) -> None:
        """Makes a standby become the child. Does nothing if the process has ended."""
        assert self._process is not None, "not started"
        if self._process.stdin is not None and self.running:
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    async def wait(self) -> int:
        """Forwards output until the process ends. Returns its exit code, or minus the signal number that killed it."""
        assert self._process is not None, "not started"
        forwarding = asyncio.create_task(self._forward(self._process))
        try:
            code = await self._process.wait()
            await asyncio.wait({forwarding}, timeout=_LAST_OUTPUT_S)
            return code
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process; does nothing if the process has not been started or has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _forward(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        lines = Lines()
        while data := await process.stdout.read(_READ_BYTES):
            self._show(lines.feed(data))
        self._show(lines.rest())

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            found = read_line(line)
            if found is not None and found[0] in ("ERROR", "CRITICAL"):
                self.last_error = found[1]
            if self.spec.show(line):
                self._sink(self.spec.name, line)


class Lines:
    """Splits a stream of bytes into lines of at most `LINE_BYTES_MAX` bytes; invalid UTF-8 is replaced."""

    def __init__(self) -> None:
        self._open = b""

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that are complete after `data`."""
        *whole, self._open = (self._open + data).split(b"\n")
        cut = [line[i : i + LINE_BYTES_MAX] for line in whole for i in range(0, max(len(line), 1), LINE_BYTES_MAX)]
        while len(self._open) > LINE_BYTES_MAX:
            cut.append(self._open[:LINE_BYTES_MAX])
            self._open = self._open[LINE_BYTES_MAX:]
        return [line.decode("utf-8", "replace").rstrip("\r") for line in cut]

    def rest(self) -> list[str]:
        """Returns the last line if the stream did not end with a line end, as a list of at most one line."""
        line, self._open = self._open, b""
        return [line.decode("utf-8", "replace")] if line else []
