"""Starts the product's processes by forking one that has imported their modules: `python -m tests.support.warm SOCKET`.

A system that a test starts has five interpreters, which would import the same modules in two seconds of processor time.
`Warm.fork_exec` takes the place of the function with which `subprocess` starts a process. A command `python -m MODULE`
of the product is forked; every other command, or one whose environment libraries read when they are imported, is
executed as usual. A forked process has what an executed one would have: its process id, parent, command line,
environment, directory, descriptors, session, signals and exit code. `antiphon`, and an engine of several ranks, get a
warm process of their own, so that what they start are their children; it is their child, too, and its command line is
`NAME`.

A forked process becomes the child of the process that asked for it because the process between them ends at once, while
the asking one adopts orphans. Linux only. Started by `tests.conftest`.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from antiphon.shared.actors.imports import without_collections

NAME = "warm"
ROOT = Path(__file__).resolve().parents[2]
WRAPPER = str(ROOT / "antiphon/supervision/child.py")
LAUNCHERS = ("antiphon", "antiphon.entrypoints.openai.api_server", "tests.system.mortal_launcher")
SERVICES = ("gateway", "tokenizer", "engine", "engine.executor.rank", "detokenizer", "vision")
FAULTY = ("tests.system.faulty_engine", "tests.system.mortal_engine")
MODULES = (*LAUNCHERS, *FAULTY, *(f"antiphon.services.{name}" for name in SERVICES))
IMPORTED = (
    "antiphon.services.engine.service",
    "antiphon.services.engine.backends.load",
    "antiphon.services.engine.executor.rank",
    "antiphon.services.gateway.service",
    "antiphon.services.tokenizer.service",
    "antiphon.services.detokenizer.service",
    "antiphon.services.vision.service",
    "antiphon.cli",
    "antiphon.launch.launcher",
    "antiphon.supervision.death_notice",
    "antiphon.versions.supervisor",
    "antiphon.shared.deployment.store_keeper",
)
OWN = (
    "ANTIPHON_", "FAULT", "FIRST", "MODEL_PATH", "MORTAL_", "NODE_RANK", "OPENAI_API_KEYS", "PYTEST_",
    "TORCHINDUCTOR_CACHE_DIR", "TP", "USE_OPENAI",
)  # fmt: skip
"""Beginnings of the variables that no library reads when it is imported. PyTorch sets its own when tests import it."""
OF_WARM = {b"OPENBLAS_NUM_THREADS": b"1", b"OMP_WAIT_POLICY": b"PASSIVE"}
"""Read by libraries of the warm process when they are imported: numpy starts no threads, and PyTorch's wait without a
loop, which would take the cores from other tests."""
EXECUTED = {"EXECUTED": "yes"}
"""Environment of a system whose processes are executed as a user's are: their files in /proc tell what they were given,
which attacks read."""
COMMAND_BYTES = 32 * 1024
"""Longest command line, which takes the place of the warm process's own."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A process to start. `numbers`: those of its descriptors, which are sent with the order."""

    words: tuple[str, ...]
    environ: dict[bytes, bytes]
    parent: int
    session: bool
    wrapped: bool
    numbers: tuple[int, ...]


class Warm:
    """The asking side of a warm process, which is started for the first command that needs it."""

    def __init__(self, channel: socket.socket | None = None) -> None:
        """`channel`: to a warm process that was started with the environment of this one."""
        self._channel, self._environ = channel, dict(os.environb)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._execute = subprocess._fork_exec  # type: ignore[attr-defined]
        subprocess._fork_exec = self.fork_exec  # type: ignore[attr-defined]

    def close(self) -> None:
        """Ends the warm process; commands are executed again."""
        subprocess._fork_exec = self._execute  # type: ignore[attr-defined]
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.wait()

    def fork_exec(self, *given: Any) -> int:
        """As `_posixsubprocess.fork_exec`: starts a process and returns its id."""
        words = tuple(os.fsdecode(word) for word in given[0])
        wrapped = words[1:4] == ("-I", "-S", WRAPPER)
        words = words[5:] if wrapped else words
        environ = dict(os.environb) if given[5] is None else dict(item.split(b"=", 1) for item in given[5])
        if not self._can_fork(words, given, environ):
            return self._execute(*given)
        pipes = (given[6], given[9], given[11])
        standard = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        passed = [number for number in given[3] if number != given[13]]  # without the pipe for errors of exec
        order = Order(
            words=words,
            environ=environ,
            parent=os.getpid(),
            session=bool(given[15]),
            wrapped=wrapped,
            numbers=(0, 1, 2, *passed),
        )
        with self._lock:
            return self._ask(order, [*standard, *passed])

    def _can_fork(self, words: Sequence[str], given: Sequence[Any], environ: Mapping[bytes, bytes]) -> bool:
        is_ours = words[0] == sys.executable and "-m" in words[1:3] and _after_m(words)[0] in MODULES
        is_here = given[4] is None or Path(os.fsdecode(given[4])).resolve() == ROOT
        changed = {os.fsdecode(name) for name, _ in environ.items() ^ self._environ.items()}
        is_plain = given[16:22] == (-1, None, None, None, -1, None)  # group, user, umask, a function to call
        return is_ours and is_here and is_plain and Path.cwd() == ROOT and all(name.startswith(OWN) for name in changed)

    def _ask(self, order: Order, descriptors: Sequence[int]) -> int:
        if self._channel is None:
            self._channel, theirs = socket.socketpair()
            argv = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno()), "-" * COMMAND_BYTES]
            environ = {**self._environ, **OF_WARM}
            with theirs:
                self._process = subprocess.Popen(
                    argv, cwd=ROOT, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            data = msgspec.msgpack.encode(order)
            socket.send_fds(self._channel, [len(data).to_bytes(8, "big")], descriptors)
            self._channel.sendall(data)
            return int(self._channel.recv(64))
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(channel: socket.socket) -> tuple[Order, list[int]] | None:
    """Forks a process for each order. Returns in that process; None: the asking side has ended."""
    while (received := _receive(channel)) is not None:
        _, descriptors = received
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                os.write(writing, str(pid).encode())
                os._exit(0)
            for number in (reading, writing):
                os.close(number)
            channel.close()
            return received
        os.close(writing)
        os.waitpid(between, 0)
        channel.send(os.read(reading, 64))
        for number in (reading, *descriptors):
            os.close(number)
    return None


def become(order: Order, descriptors: Sequence[int]) -> None:
    """Makes this process what the order says and runs its module."""
    while os.getppid() != order.parent:
        time.sleep(0.0005)
    if order.session:
        os.setsid()
    _place(descriptors, order.numbers)
    os.environb.clear()
    os.environb.update(order.environ)
    _show(order.words)
    if order.wrapped:
        from antiphon.supervision import child

        child.die_with_parent(order.parent)
        child.wait_for_a_turn()
    module, *_ = arguments = _after_m(order.words)
    if module in LAUNCHERS or any("-parallel-size=" in word for word in order.words):
        _attend()
    sys.orig_argv[:] = order.words
    sys.argv[:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _after_m(words: Sequence[str]) -> Sequence[str]:
    """The module of a command `python [-P] -m MODULE ARGUMENT…`, and its arguments."""
    return words[words.index("-m") + 1 :]


def _attend() -> None:
    """Gives this process a warm one of its own."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        _place([null, null, null, theirs.fileno()], (0, 1, 2, 3))
        _show([NAME])
        run(socket.socket(fileno=3))
    theirs.close()
    Warm(ours)


def run(channel: socket.socket) -> None:
    """Serves; ends the process if the asking side has ended, and runs the module in a forked one."""
    if (received := serve(channel)) is None:
        os._exit(0)
    try:
        become(*received)
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        _end(end.code)
    _end(0)


def _end(code: int) -> NoReturn:
    """Ends the process without taking the imported modules apart, which would take longer than most processes run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors their numbers and closes all others."""
    first = max(*descriptors, *numbers) + 1
    high = [os.dup2(number, first + index) for index, number in enumerate(descriptors)]
    for number, target in zip(high, numbers, strict=True):
        os.dup2(number, target)
    open_ones = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    for number in open_ones:
        if number not in numbers:
            with contextlib.suppress(OSError):
                os.close(number)


def _show(words: Sequence[str]) -> None:
    """Writes the command line over that of the warm process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = b"\0".join(os.fsencode(word) for word in words)
    assert len(shown) < end - begin, "the command line is too long"
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _receive(channel: socket.socket) -> tuple[Order, list[int]] | None:
    size, descriptors, _, _ = socket.recv_fds(channel, 8, 64)
    if not size:
        return None
    data = b""
    while len(data) < int.from_bytes(size, "big"):
        data += channel.recv(1 << 16)
    return msgspec.msgpack.decode(data, type=Order), descriptors


if __name__ == "__main__":
    # The module under its name, not `__main__`, which the modules that run here replace.
    warm = importlib.import_module("tests.support.warm")
    with without_collections():
        for module in IMPORTED:
            importlib.import_module(module)
    for name in OF_WARM:
        os.environb.pop(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    warm.run(socket.socket(fileno=int(sys.argv[1])))
