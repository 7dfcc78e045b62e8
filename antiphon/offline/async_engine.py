"""`AsyncLLMEngine`: the offline engine for asyncio programs, with concurrent requests.

A separate thread runs the `Runner`. Commands reach this thread through a queue; results are passed to the event loop of
each request. Every result contains the whole output so far, so a slow consumer gets only the latest one and results do
not accumulate.
"""

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from antiphon.offline.adapters import LoRARequest, PromptAdapterRequest
from antiphon.offline.engine_args import EngineArgs, engine_args
from antiphon.offline.prompts.inputs import Prompt, PromptInput, prompts_of
from antiphon.offline.prompts.prompt_text import Message, TemplateOptions
from antiphon.offline.request import Submitted
from antiphon.offline.runner import Runner, now
from antiphon.offline.sampling_params import SamplingParams
from antiphon.shared.flags import given_of
from antiphon.shared.request.outputs import RequestOutput

IDLE_WAIT_S = 1.0
"""Longest time in seconds that the engine's idle thread waits for a command before it checks whether it should end."""
END_S = 30.0
"""Longest time in seconds that `shutdown` waits for the engine's thread, which may be running a step."""


class AsyncLLMEngine:
    """An engine that runs on a thread of its own.

    Create it with `from_engine_args`, or with the fields of `EngineArgs` as keyword arguments. Raises the same errors
    as `LLM`.
    """

    def __init__(self, model: str = "", **kwargs: Any) -> None:
        self._runner = Runner(engine_args(model=model, **kwargs))
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._stopping = threading.Event()
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._drive, name="antiphon-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLMEngine":
        """Returns an engine with these arguments."""
        return cls(**given_of(args))

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self._thread.is_alive() and not self._stopping.is_set() and not self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine has failed. A failed engine accepts no requests."""
        return self._runner.failure is not None

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the result of the request repeatedly, each time with the whole output so far; the last is `finished`.

        Closing the iterator earlier ends the request. Raises ValueError or TypeError for invalid arguments, and
        RuntimeError if the engine is not running.
        """
        (given,) = prompts_of([prompt], None, takes_engine_form=True)
        found = self._runner.rendered(given)
        name = (given.form.request_id or None) if request_id is None else request_id
        adapters = lora_request, prompt_adapter_request
        return self._outputs(found, sampling_params, name, priority, adapters, is_chat=found.is_chat)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        priority: int = 0,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields results like `generate`, for the next message of a conversation. Arguments: see `LLM.chat`."""
        options = TemplateOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompt = self._runner.text.rendered(messages, options)
        return self._outputs(prompt, sampling_params, request_id, priority, (lora_request, None), is_chat=True)

    async def abort(self, request_id: str) -> None:
        """Ends a request, whose iterator then yields a last result with `finish_reason` "abort".

        Does nothing if the request has ended.
        """
        self._command(lambda: self._abort(request_id))

    async def check_health(self) -> None:
        """Raises RuntimeError if the engine is not running."""
        self._check_running()

    async def shutdown(self) -> None:
        """Ends all running requests with `finish_reason` "abort" and frees the model's memory. Idempotent."""
        self._stopping.set()
        self._command(lambda: None)
        await asyncio.to_thread(self._thread.join, END_S)

    # --- on the caller's event loop ---

    async def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        adapters: tuple[LoRARequest | None, PromptAdapterRequest | None],
        *,
        is_chat: bool,
    ) -> AsyncIterator[RequestOutput]:
        self._check_running()
        name = request_id if request_id is not None else f"request {next(self._ids)}"
        params = params or SamplingParams()
        # Drawn before the request is tokenized on another thread, so that seeds follow the order of the requests.
        arrived, seed = now(), self._runner.draw_seed(params)
        (loaded,) = await asyncio.to_thread(self._runner.adapters, *adapters, 1)
        submitted = await asyncio.to_thread(
            self._runner.submitted,
            name,
            prompt,
            params,
            arrived,
            add_special_tokens=not is_chat,
            is_chat=is_chat,
            priority=priority,
            seed=seed,
            adapters=loaded,
        )
        if name in self._streams:
            raise ValueError(f"The request id {name!r} is in use.")
        stream = self._streams[name] = _Stream(asyncio.get_running_loop())
        self._command(lambda: self._add(submitted, stream))
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            self._streams.pop(name, None)
            if not stream.ended:
                self._command(lambda: self._abort(name))

    def _check_running(self) -> None:
        if not self.is_running:
            raise RuntimeError("The engine does not run.") from self._runner.failure

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._runner.engine.wake()

    # --- on the engine's thread ---

    def _drive(self) -> None:
        try:
            self._drive_until_stopped()
        except Exception as error:
            # An unexpected error in this package: without this, callers would wait for their results forever.
            self._runner.failure = self._runner.failure or error
            for stream in list(self._streams.values()):
                stream.fail(error)
            raise

    def _drive_until_stopped(self) -> None:
        while not self._stopping.is_set():
            self._obey()
            if not self._runner.has_work:
                self._wait()
                continue
            for output in self._runner.step():
                self._publish(output)
        for request_id in list(self._streams):
            self._abort(request_id)
        self._runner.close()

    def _obey(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _wait(self) -> None:
        try:
            command = self._commands.get(timeout=IDLE_WAIT_S)
        except queue.Empty:
            return
        command()

    def _add(self, submitted: Submitted, stream: "_Stream") -> None:
        try:
            self._runner.add(submitted)
        except (RuntimeError, ValueError) as error:
            stream.fail(error)

    def _abort(self, request_id: str) -> None:
        output = self._runner.abort(request_id)
        if output is not None:
            self._publish(output)

    def _publish(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            stream.put(output)


class _Stream:
    """Passes the latest result of one request from the engine's thread to the request's event loop."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False
        self._event_loop = event_loop
        self._changed = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        """Replaces the latest result. Called on the engine's thread."""
        self.ended |= output.finished
        self._output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the request with an exception. Called on the engine's thread."""
        self.ended, self._error = True, error
        self._wake()

    async def next(self) -> RequestOutput:
        """Waits for a result that has not been returned yet and returns it. Raises the exception given to `fail`."""
        while self._output is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
            self._changed.clear()
        output, self._output = self._output, None
        return output

    def _wake(self) -> None:
        # The program may have closed its event loop while requests were running; then no consumer is left.
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._changed.set)
