"""The standby of one child: a process with the child's modules imported, which takes over when the child has ended.

Used by `antiphon.supervision.fleet`. The program of the process is `antiphon.shared.actors.standby`.
"""

import asyncio
import signal

from antiphon.supervision.processes import Child, ChildSpec, Sink


class Standby:
    """Starts its process after `after_s` seconds. If the process ends without being taken, it is not started again."""

    def __init__(self, spec: ChildSpec, sink: Sink, after_s: float) -> None:
        self._spec, self._sink, self._after_s = spec, sink, after_s
        self._child: Child | None = None
        self._ended: asyncio.Task[int] | None = None
        self._starting = asyncio.create_task(self._start())

    @property
    def is_ready(self) -> bool:
        """Whether the process runs and has not been taken. It may still be importing."""
        return self._child is not None and self._child.running

    @property
    def pid(self) -> int:
        """The process id; 0 while there is no process."""
        return self._child.pid if self._child is not None else 0

    def take(self) -> "tuple[Child, asyncio.Task[int]] | None":
        """Makes the process become the child; returns it and the task that ends with it. None without a process."""
        self._starting.cancel()
        child, ended = self._child, self._ended
        if child is None or ended is None or not child.running:
            return None
        self._child = self._ended = None
        child.activate()
        return child, ended

    async def end(self) -> None:
        """Kills the process, unless it was taken, and returns when it has ended."""
        self._starting.cancel()
        await asyncio.wait({self._starting})
        if self._child is not None and self._ended is not None:
            self._child.signal(signal.SIGKILL)
            await asyncio.wait({self._ended})

    async def _start(self) -> None:
        await asyncio.sleep(self._after_s)
        child = Child(self._spec, self._sink)
        try:
            await child.start(standby=True)
        except OSError as error:
            self._sink("antiphon", f"no process stands by for {self._spec.name}: {error}")
            return
        self._child, self._ended = child, asyncio.create_task(child.wait())
