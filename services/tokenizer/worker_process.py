"""Processes that do untrusted work for the tokenizer and may be killed at any time: the parent's side.

A worker answers one message at a time over pipes. If an answer takes too long, the worker is killed, and the next job
starts a new one. The worker's side is `sandbox`.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import Generic, TypeVar

import msgspec

from antiphon.services.tokenizer.sandbox import LENGTH_BYTES, pack_frame
from antiphon.shared.observability import resources

T = TypeVar("T", bound=msgspec.Struct)


class WorkerLostError(Exception):
    """The worker has died or exceeded its time limit. The message is the predicate of a sentence about the job."""


class WorkerProcess(Generic[T]):
    """One worker process, with answers of type T.

    `fresh`: whether it has answered all earlier jobs and waits for the next one.
    """

    def __init__(self, process: Process, answer: type[T], frame_bytes_max: int) -> None:
        self._process = process
        self._answer = answer
        self._frame_bytes_max = frame_bytes_max
        self.fresh = True

    @classmethod
    async def start(cls, module: str, answer: type[T], frame_bytes_max: int) -> "WorkerProcess[T]":
        """Starts `python -m module`. The worker's environment has only its module path, so it holds no secrets."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module,
            stdin=PIPE, stdout=PIPE, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )  # fmt: skip
        resources.add_child(process.pid)
        return cls(process, answer, frame_bytes_max)

    @property
    def alive(self) -> bool:
        """Whether the worker can take a job."""
        # After the death of a worker, its closed pipe is seen earlier than its exit status. The event loop may not have
        # seen either yet.
        assert self._process.stdout is not None
        return not self._has_ended() and not self._process.stdout.at_eof()

    async def ask(self, message: msgspec.Struct, wall_s: float) -> T:
        """Returns the worker's answer. Raises WorkerLostError; the worker must then be killed."""
        self.fresh = False
        try:
            async with asyncio.timeout(wall_s):
                answer = await self._exchange(pack_frame(message))
        except TimeoutError:
            raise WorkerLostError(f"took longer than {wall_s:g} s") from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise WorkerLostError("used too much time or memory") from None
        self.fresh = True
        return answer

    async def kill(self) -> None:
        """Ends the worker and waits for its end."""
        self.fresh = False
        if not self._has_ended():
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        resources.remove_child(self._process.pid)

    async def _exchange(self, frame: bytes) -> T:
        sink, source = self._process.stdin, self._process.stdout
        assert sink is not None
        assert source is not None
        sink.write(frame)
        await sink.drain()
        size = int.from_bytes(await source.readexactly(LENGTH_BYTES), "big")
        if size > self._frame_bytes_max:
            raise EOFError
        return msgspec.msgpack.decode(await source.readexactly(size), type=self._answer)

    def _has_ended(self) -> bool:
        """Whether the process has ended. Leaves its exit status to the event loop, which may have taken it already."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True
