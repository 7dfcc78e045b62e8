"""Renders chat templates in worker processes with a wall-clock limit: the tokenizer's side of `render_worker`.

Workers are reused, so a rendering costs two pipe writes and no process start. The first worker is started in the
background when the service is ready (`warm`), so that start-up does not wait for it. A second worker is started when
the first is busy, so that a slow conversation does not block the others. A worker that exceeds its time limit is
killed, and the next request starts a new one.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from antiphon.services.tokenizer.render_frames import Rendered, RenderJob, RenderSetup
from antiphon.services.tokenizer.worker_process import WorkerLostError, WorkerProcess
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError

log = logging.getLogger(__name__)
NO_TEMPLATE = (
    "This model has no chat template. Start the server with --conv-template or --chat-template, or use /v1/completions."
)
NO_VARIABLES: Mapping[str, Any] = {}
WORKER = "antiphon.services.tokenizer.render_worker"
FRAME_BYTES_MAX = 4 * limits.TEMPLATE_OUTPUT_CHARS_MAX + 1024


class Renderer:
    """Converts a conversation to the text of a prompt; here, of a server without a chat template or tokenizer.

    `reason`: the message with which it refuses every conversation.
    """

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
        """Returns the text of the prompt. Raises ServiceError('invalid_value', param='messages') if rendering fails.

        `variables` and `continue_final_message` are those of `ChatTemplate.render`.
        """
        raise _refusal(self._reason)

    async def close(self) -> None:
        """Ends the processes that the renderer has started."""


class WorkerPool(Renderer):
    """Up to `workers_max` worker processes for one template, or for two if there is a `tool_template`."""

    def __init__(
        self,
        template: str,
        constants: Mapping[str, str],
        tool_template: str | None = None,
        *,
        workers_max: int = limits.TEMPLATE_WORKERS_MAX,
        wall_s: float = limits.TEMPLATE_WALL_S,
    ) -> None:
        super().__init__()
        self._setup = RenderSetup(
            template=template,
            constants=dict(constants),
            output_chars_max=limits.TEMPLATE_OUTPUT_CHARS_MAX,
            wall_s=wall_s,
            tool_template=tool_template,
        )
        self._places = asyncio.Semaphore(workers_max)
        self._idle: list[WorkerProcess[Rendered]] = []
        self._busy: set[WorkerProcess[Rendered]] = set()
        self._broken = ""
        self.killed = 0
        """Number of workers lost during a rendering, by time limit or death."""

    async def warm(self) -> None:
        """Starts a worker before it is needed. Logs an error in the template; later requests get the same error."""
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
            except WorkerLostError as lost:
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

    async def _take(self) -> "WorkerProcess[Rendered]":
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            await worker.kill()
        return await self._start()

    async def _start(self) -> "WorkerProcess[Rendered]":
        if self._broken:
            raise _refusal(self._broken)
        worker = await WorkerProcess.start(WORKER, Rendered, FRAME_BYTES_MAX)
        try:
            answer = await worker.ask(self._setup, limits.TEMPLATE_START_S)
        except WorkerLostError as lost:
            raise _refusal(f"The chat template {lost} while it was compiled.") from None
        finally:
            if not worker.fresh:
                await worker.kill()
        if answer.error:
            await worker.kill()
            self._broken = answer.error  # every later attempt to compile the template would fail as well
            raise _refusal(answer.error)
        return worker


def _refusal(message: str) -> ServiceError:
    return ServiceError("invalid_value", message, param="messages")
