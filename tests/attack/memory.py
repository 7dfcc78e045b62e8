"""A limit of memory for each process of a server, and the largest memory that each one had.

With a cgroup of its own for each process, if this user may make them, as a container has: then the kernel ends whoever
takes more. Without, a thread looks at the processes and kills those above the limit; it stands for the kernel.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.limits_of_machine.processes import Process, tree

LOOK_S = 0.1
REMOVE_S = 2.0
_ROOTS = (
    # (folder of the controller, file with the limit)
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)


def name_of(process: Process) -> str:
    """Returns the id of a service, or the name of another program of the server; empty for a helper of a service."""
    words = process.command.split()
    for word in words:
        if word.startswith("--service-id="):
            return word.partition("=")[2]
    program = Path(words[0]).name if words else ""
    return "nats-server" if program == "nats-server" else ""


class MemoryWatch:
    """Watches the children of `launcher` until `close`. `kind` says what the limit is made of."""

    def __init__(self, launcher: int, limit_mib: float) -> None:
        self._launcher, self._limit_mib = launcher, limit_mib
        self._groups = _Groups(limit_mib)
        self.kind = "cgroups" if self._groups.works else "a watcher that kills"
        self.peak_mib: dict[str, float] = {}
        self.ended: list[str] = []
        self._alive: dict[tuple[int, int], str] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._look()
        self._thread.start()

    def take(self) -> tuple[dict[str, float], list[str]]:
        """Returns the largest memory of each process since the last call, and the processes that ended."""
        with self._lock:
            self._look()
            found = self.peak_mib, self.ended
            self.peak_mib, self.ended = {}, []
        return found

    def close(self) -> None:
        """Ends the watch and removes its cgroups."""
        self._stop.set()
        self._thread.join()
        self._groups.remove()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        family = tree(self._launcher)
        now: dict[tuple[int, int], str] = {}
        for process in family:
            name = name_of(process)
            if not name:
                continue
            key = process.pid, process.started
            now[key] = name
            if key not in self._alive:
                self._groups.add(process.pid)
            self.peak_mib[name] = max(self.peak_mib.get(name, 0.0), process.resident_mb)
            if process.resident_mb > self._limit_mib and not self._groups.works:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.ended += [name for key, name in self._alive.items() if key not in now]
        if not family and self._launcher:
            self.ended.append("the launcher")
            self._launcher = 0
        self._alive = now


class _Groups:
    """One cgroup for each process. `works` is False where this user may not make them."""

    def __init__(self, limit_mib: float) -> None:
        self._made: list[Path] = []
        self._limit = str(int(limit_mib * 2**20))
        self._root, self._file = next((one for one in _ROOTS if self._possible(*one)), (Path(), ""))
        self.works = bool(self._file)

    def _possible(self, root: Path, file: str) -> bool:
        probe = root / f"antiphon-attack-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            return False
        try:
            if not (probe / file).exists():
                return False
            (probe / file).write_text(self._limit)
        except OSError:
            return False
        finally:
            probe.rmdir()
        return True

    def add(self, pid: int) -> None:
        """Puts a process into a cgroup of its own; its later children are in it too."""
        if not self.works:
            return
        group = self._root / f"antiphon-attack-{os.getpid()}-{pid}"
        with suppress(OSError):  # the process has ended
            group.mkdir()
            self._made.append(group)
            (group / self._file).write_text(self._limit)
            (group / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Removes the cgroups of processes that have ended; the kernel needs a moment after an end."""
        end = time.monotonic() + REMOVE_S
        for group in self._made:
            while group.exists() and time.monotonic() < end:
                with suppress(OSError):
                    group.rmdir()
                time.sleep(0.01)
