"""Renders chat templates in worker processes with a wall-clock limit: the tokenizer's side of `render_worker`.

Workers are reused, so a rendering costs two pipe writes and no process start. The first worker is started in the
background when the service is ready (`warm`), so that start-up does not wait for it. A second worker is started when
the first is busy, so that a slow conversation does not block the others. A worker that exceeds its time limit is
killed, and the next request starts a new one.
"""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from services.tokenizer.render_frames import LENGTH_BYTES, Rendered, RenderJob, RenderSetup, pack_frame
from shared import limits
from shared.errors import ServiceError

log = logging.getLogger(__name__)
NO_TEMPLATE = "This model has no chat template. Start the server with --chat-template, or use /v1/completions."
NO_VARIABLES: Mapping[str, Any] = {}
FRAME_BYTES_MAX = 4 * limits.TEMPLATE_OUTPUT_CHARS_MAX + 1024


class Renderer(Protocol):
    """Converts a conversation to the text of a prompt."""

    async def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the text of the prompt. Raises ServiceError('invalid_value', param='messages') if rendering fails.

        `variables` and `continue_final_message` are those of `ChatTemplate.render`.
        """
        ...

    async def close(self) -> None:
        """Ends the processes that the renderer has started."""
        ...


class NoTemplate:
    """The renderer of a server without a chat template or tokenizer: refuses conversations with `reason` as message."""

    def __init__(self, reason: str = NO_TEMPLATE) -> None:
        self._reason = reason

    async def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """See Renderer."""
        raise _refusal(self._reason)

    async def close(self) -> None:
        """See Renderer."""


class WorkerPool:
    """Up to `workers_max` worker processes for one template, or for two if `tool_template` is that for tools."""

    def __init__(
        self,
        template: str,
        constants: Mapping[str, str],
        tool_template: str | None = None,
        *,
        workers_max: int = limits.TEMPLATE_WORKERS_MAX,
        wall_s: float = limits.TEMPLATE_WALL_S,
    ) -> None:
        self._setup = RenderSetup(template, dict(constants), limits.TEMPLATE_OUTPUT_CHARS_MAX, wall_s, tool_template)
        self._places = asyncio.Semaphore(workers_max)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._broken = ""
        self.killed = 0
        """Number of workers lost during a rendering, by time limit or death."""

    async def warm(self) -> None:
        """Starts a worker before it is needed. Logs an error in the template, which later requests get as well."""
        try:
            async with self._places:
                if not self._idle:
                    self._idle.append(await self._start())
        except ServiceError as error:
            log.warning("%s", error.message)

    async def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] = NO_VARIABLES,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """See Renderer. Waits for a free worker; the time limit begins when the worker gets the job."""
        job = RenderJob(
            msgspec.json.encode(messages),
            add_generation_prompt,
            msgspec.json.encode(variables),
            continue_final_message,
        )
        async with self._places:
            worker = await self._take()
            self._busy.add(worker)
            try:
                answer = await worker.ask(job, self._setup.wall_s)
            except _WorkerLostError as lost:
                self.killed += 1
                raise _refusal(f"The chat template {lost} on these messages.") from None
            finally:
                self._busy.discard(worker)
                if worker.fresh:
                    self._idle.append(worker)
                else:
                    await worker.kill()
        if answer.error:
            raise _refusal(answer.error)
        return answer.text

    async def close(self) -> None:
        """See Renderer."""
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in workers:
            await worker.kill()

    async def _take(self) -> "_Worker":
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            await worker.kill()
        return await self._start()

    async def _start(self) -> "_Worker":
        if self._broken:
            raise _refusal(self._broken)
        worker = _Worker(await _spawn())
        try:
            answer = await worker.ask(self._setup, limits.TEMPLATE_START_S)
        except _WorkerLostError as lost:
            raise _refusal(f"The chat template {lost} while it was compiled.") from None
        finally:
            if not worker.fresh:
                await worker.kill()
        if answer.error:
            await worker.kill()
            self._broken = answer.error  # every later attempt to compile the template would fail as well
            raise _refusal(answer.error)
        return worker


class _WorkerLostError(Exception):
    """The worker has died or exceeded its time limit. The message completes the sentence 'The chat template …'."""


class _Worker:
    """One worker process. `fresh`: whether the worker is waiting for a job, having answered all earlier ones."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.fresh = True

    @property
    def alive(self) -> bool:
        # After the death of a worker, its closed pipe is seen earlier than its exit status.
        assert self._process.stdout is not None
        return self._process.returncode is None and not self._process.stdout.at_eof()

    async def ask(self, message: msgspec.Struct, wall_s: float) -> Rendered:
        self.fresh = False
        try:
            answer = await asyncio.wait_for(self._exchange(pack_frame(message)), wall_s)
        except TimeoutError:
            raise _WorkerLostError(f"took longer than {wall_s:g} s") from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise _WorkerLostError("used too much time or memory") from None
        self.fresh = True
        return answer

    async def kill(self) -> None:
        self.fresh = False
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _exchange(self, frame: bytes) -> Rendered:
        sink, source = self._process.stdin, self._process.stdout
        assert sink is not None
        assert source is not None
        sink.write(frame)
        await sink.drain()
        size = int.from_bytes(await source.readexactly(LENGTH_BYTES), "big")
        if size > FRAME_BYTES_MAX:
            raise EOFError
        return msgspec.msgpack.decode(await source.readexactly(size), type=Rendered)


async def _spawn() -> Process:
    # The worker's environment has only its module path, so a template that escapes the sandbox finds no secrets in it.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "services.tokenizer.render_worker",
        stdin=PIPE, stdout=PIPE, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )  # fmt: skip


def _refusal(message: str) -> ServiceError:
    return ServiceError("invalid_value", message, param="messages")
