"""`Runner`: an engine in this process and its running requests.

`LLM` calls it on the caller's thread, `AsyncLLMEngine` on a thread of its own. All methods except `submitted` must be
called on one thread.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import msgspec

from antiphon.offline.adapters import Adapters, LoRARequests, PromptAdapterRequests, loaded_adapters
from antiphon.offline.engine_args import EngineArgs
from antiphon.offline.pooling import PoolingParams, PoolingRequestOutput, checked, pooling_output, pooling_spec
from antiphon.offline.prompts.images import NOT_ENABLED, EncodedPrompt, ImageEncoder
from antiphon.offline.prompts.inputs import Prompt
from antiphon.offline.prompts.prompt_text import Message, PromptText, TemplateOptions
from antiphon.offline.request import LiveRequest, Submitted, Times, choice_of
from antiphon.offline.sampling_params import SamplingParams
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.services.engine.engine import Engine
from antiphon.services.engine.steps.loop import StepReport
from antiphon.shared.errors import ServiceError
from antiphon.shared.models.image_models import image_limit
from antiphon.shared.models.model_files import located
from antiphon.shared.parameters.pooling import generates_nothing
from antiphon.shared.parameters.sampling import check_vocabulary
from antiphon.shared.request import checks
from antiphon.shared.request.outputs import RequestOutput
from antiphon.shared.request.sampling_fields import seeds_of

GATHER_S = 0.05
"""Longest time in seconds that `step` waits while new requests are being gathered into a batch (`--max-batch-size`)."""


class Runner:
    """An engine and its requests. The constructor loads the model.

    Raises ValueError (SettingsError) for settings or a model that cannot be used.
    """

    def __init__(self, args: EngineArgs) -> None:
        settings = located(args.settings())
        self._reports: list[StepReport] = []
        try:
            self.engine = Engine.build(settings, self._reports.append)
        except ServiceError as error:
            raise ValueError(error.message) from error
        self.text = PromptText(settings, self.engine.facts.vocab_size, self.engine.max_model_len)
        self._images: ImageEncoder | None = None
        """Encodes images; None: the engine accepts text only."""
        if settings.enable_mm:
            limit = image_limit(args.limit_mm_per_prompt, "limit_mm_per_prompt")
            self._images = ImageEncoder(settings, args.mm_processor_kwargs, limit)
        self._draw_seed = seeds_of(args.seed)
        self._live: dict[str, LiveRequest] = {}
        self._num_sequences = 0
        self._step_s = 0.0
        """Seconds that the engine has spent in steps since the start."""
        self._step_ended_at = time.monotonic()
        self.failure: Exception | None = None
        """The exception that ended the engine, after which no request can run; None while the engine works."""

    def draw_seed(self, params: SamplingParams) -> int:
        """Returns the request's own seed, or else the next seed derived from the engine's seed."""
        return self._draw_seed() if params.seed is None else params.seed

    def adapters(self, loras: LoRARequests, prompts: PromptAdapterRequests, count: int) -> list[Adapters]:
        """Returns the adapters of each of `count` prompts; may be called on any thread. See `loaded_adapters`."""
        return loaded_adapters(self.engine.adapters, loras, prompts, count)

    def submitted(
        self, request_id: str, prompt: Prompt, params: SamplingParams, arrived: Times | None = None, *,
        add_special_tokens: bool = True, is_chat: bool = False, priority: int = 0, seed: int | None = None,
        adapters: Adapters = (),
    ) -> Submitted:  # fmt: skip
        """Tokenizes and checks a prompt and returns the request for `add`. Raises ValueError.

        With a `seed` from `draw_seed` this method may be called on any thread.
        """
        facts = self.engine.facts
        if not facts.generates:
            raise ValueError(generates_nothing(len(facts.labels)).message)
        arrived = arrived or now()
        preprocessing = time.monotonic()
        form = prompt.form
        if form.eos_token_ids is not None:
            if params.eos_token_ids is not None:
                raise ValueError("'eos_token_ids' is given twice: leave it out of the prompt or of its parameters.")
            params = replace(params, eos_token_ids=form.eos_token_ids)
        encoded = self._encoded(prompt, params, adapters) if prompt.images else None
        token_ids, starts = self.text.token_ids(
            prompt,
            params.max_tokens or 0,
            add_special_tokens=add_special_tokens,
            images=() if encoded is None else encoded.tokens,
            truncate_prompt_tokens=checks.prompt_truncation(params.truncate_prompt_tokens),
        )
        bad_words = self.text.bad_word_ids([word for word in params.bad_words or () if isinstance(word, str)])
        self._check(params, bad_words)
        started = now()
        return Submitted(
            request_id=request_id,
            prompt=prompt.text,
            token_ids=token_ids,
            end_token_ids=prompt.end_token_ids,
            params=params,
            seed=self.draw_seed(params) if seed is None else seed,
            priority=priority,
            is_chat=is_chat,
            arrived=arrived,
            started=started,
            preprocess_s=started.monotonic - preprocessing if form.preprocess_s is None else form.preprocess_s,
            arrival_time=arrived.wall if form.arrival_time is None else form.arrival_time,
            bad_words=bad_words,
            adapters=adapters,
            images=() if encoded is None else encoded.placed(starts),
        )

    def _encoded(self, prompt: Prompt, params: SamplingParams, adapters: Adapters) -> EncodedPrompt:
        """Returns the encoded images of a prompt. Raises ValueError for options that do not support images."""
        if self._images is None:
            raise ValueError(f"The prompt has images, and {NOT_ENABLED}.")
        if params.prompt_logprobs is not None:
            raise ValueError("'prompt_logprobs' cannot be given with images.")
        if any(adapter.num_virtual_tokens for adapter in adapters):
            raise ValueError("Images cannot be given with a prompt adapter.")
        return self._images.encoded(prompt.images)

    def _check(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> None:
        """Raises ValueError for parameters that this model does not support."""
        wanted = params.engine_params(0, bad_words=bad_words)
        try:
            check_vocabulary(wanted, self.engine.facts.vocab_size)
            if wanted.grammar is not None:
                self.engine.compile_grammar(wanted.grammar)
        except ServiceError as error:
            raise ValueError(error.message) from None

    def submitted_all(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int | None],
        adapters: Sequence[Adapters] = (),
        *,
        is_chat: bool = False,
    ) -> list[Submitted]:
        """Returns the requests for the prompts of one call, all with the same arrival time.

        Raises ValueError, which names an invalid prompt by its index.
        """
        arrived, several = now(), len(prompts) > 1
        requests: list[Submitted] = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(
                    self.submitted(
                        request_ids[index],
                        prompt,
                        params[index] or SamplingParams(),
                        arrived,
                        add_special_tokens=not (is_chat or prompt.is_chat),
                        is_chat=is_chat or prompt.is_chat,
                        priority=priorities[index] or 0,
                        adapters=adapters[index] if adapters else (),
                    )
                )
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}" if several else str(error)) from None
        return requests

    def rendered(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the text of its conversation, if it has one. Raises ValueError."""
        if not prompt.form.messages:
            return prompt
        if prompt.images:
            raise ValueError("Images of a conversation are parts of its messages: leave 'multi_modal_data' out.")
        text = self.text.rendered(prompt.form.messages, TemplateOptions())
        return replace(text, is_chat=True, form=prompt.form)

    def conversations(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        options: TemplateOptions,
    ) -> list[Prompt]:
        """Renders a conversation, or each of a list of conversations, to a prompt. Raises ValueError."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        found = cast(Sequence[Sequence[Message]], messages if several else [messages])
        return [self.text.rendered(one, options) for one in found]

    def add(self, submitted: Submitted) -> None:
        """Adds a request to the engine. Raises RuntimeError if the engine has failed, ValueError for an id in use."""
        if self.failure is not None:
            raise RuntimeError("The engine has failed; make a new one.") from self.failure
        if submitted.request_id in self._live:
            raise ValueError(f"The request id {submitted.request_id!r} is in use.")
        request = LiveRequest(submitted, self.text.vocabulary, self.engine.max_model_len)
        self._live[submitted.request_id] = request
        for spec in request.specs(self._num_sequences):
            self.engine.add(spec)
        self._num_sequences += len(request.sequence_ids)

    def pooled(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams | None],
        adapters: Sequence[Adapters],
        truncate_prompt_tokens: int | None = None,
    ) -> Iterator[PoolingRequestOutput]:
        """Tokenizes the prompts and yields their results as they are computed, in any order.

        `truncate_prompt_tokens`: number of first tokens kept of each prompt; -1: as many as fit; None: all.

        No other request may run at the same time. Raises ValueError before anything runs if a prompt or a parameter is
        invalid, and RuntimeError if the engine fails. If the caller stops early, the remaining sequences are ended.
        """
        facts = self.engine.facts
        params = checked(params, facts.embedding_size, len(facts.labels))
        try:
            keep = checks.pooling_truncation(truncate_prompt_tokens, self.engine.max_model_len)
        except ServiceError as error:
            raise ValueError(error.message) from None
        specs = self._pooling_specs(request_ids, prompts, params, adapters, keep)
        if self.failure is not None:
            raise RuntimeError("The engine has failed; make a new one.") from self.failure
        waiting = {spec.sequence_id: spec for spec in specs}
        try:
            for spec in specs:
                self.engine.add(spec)
            while waiting:
                yield from self._vectors(waiting)
        finally:
            for sequence_id in waiting:
                self.engine.abort(sequence_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and returns its last output; returns None if no request has this id."""
        request = self._live.pop(request_id, None)
        if request is None:
            return None
        for sequence_id in request.sequence_ids:
            self.engine.abort(sequence_id)
        request.aborted(now())
        return request.output()

    @property
    def has_work(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        """Runs one step of the engine and returns the outputs of the requests that changed.

        The last output of a request is `finished`. A failure of the engine ends every request with an error and sets
        `failure`.
        """
        try:
            if not self.engine.step() and self.has_work:
                self.engine.wait(GATHER_S)
        except Exception as error:  # after any exception in a step, the state of the device is unknown
            self.failure = error
            return self._fail_all(error)
        changed: dict[str, LiveRequest] = {}
        for report in self._reports:
            self._take(report, changed)
        self._reports.clear()
        for request_id, request in changed.items():
            if request.finished:
                del self._live[request_id]
        return [request.output() for request in changed.values()]

    def close(self) -> None:
        """Frees the model's memory."""
        self._live.clear()
        self.engine.close()

    def _pooling_specs(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        adapters: Sequence[Adapters],
        keep: int,
    ) -> list[SequenceSpec]:
        specs: list[SequenceSpec] = []
        for index, prompt in enumerate(prompts):
            one = params[index]
            try:
                if prompt.images:
                    raise ValueError("Images have no embeddings here: give text.")
                if prompt.second_text is None:
                    token_ids, _ = self.text.token_ids(prompt, 0, generates=False, truncate_prompt_tokens=keep)
                else:
                    token_ids, num_first = self.text.pair_ids(prompt, keep)
                    one = msgspec.structs.replace(one, num_first_tokens=num_first)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}" if len(prompts) > 1 else str(error)) from None
            number = self._num_sequences + index
            specs.append(pooling_spec(request_ids[index], token_ids, one, number, adapters[index]))
        self._num_sequences += len(specs)
        return specs

    def _vectors(self, waiting: dict[str, SequenceSpec]) -> Iterator[PoolingRequestOutput]:
        """Runs one step of the engine; yields the results of finished sequences and removes these from `waiting`."""
        try:
            if not self.engine.step():
                self.engine.wait(GATHER_S)
        except Exception as error:  # after any exception in a step, the state of the device is unknown
            self.failure = error
            waiting.clear()
            raise RuntimeError(f"The engine failed: {type(error).__name__}: {error}") from error
        reports, self._reports[:] = list(self._reports), []
        for report in reports:
            for _, refusal in report.refused:
                raise ValueError(refusal.message)
            for outcome in report.outcomes:
                if (spec := waiting.pop(outcome.sequence_id, None)) is not None:
                    yield pooling_output(spec, outcome.vector, outcome.num_cached_tokens)

    def _take(self, report: StepReport, changed: dict[str, LiveRequest]) -> None:
        at = now()
        step_s = min((report.ended_ns - report.started_ns) / 1e9, at.monotonic - self._step_ended_at)
        began = Times(report.started_ns / 1e9, at.monotonic - (report.ended_ns - report.started_ns) / 1e9)
        for sequence_id in report.joined:
            if found := self._found(sequence_id):
                found[0].joined(began, self._step_s)
        self._step_s += max(0.0, step_s)
        self._step_ended_at = at.monotonic
        for sequence_id, error in report.refused:
            if found := self._found(sequence_id):
                found[0].fail(error, at)
                changed[found[0].submitted.request_id] = found[0]
        for outcome in report.outcomes:
            found = self._found(outcome.sequence_id)
            if found is None:
                continue
            request, choice = found
            if request.take(choice, outcome, at, self._step_s):
                self.engine.abort(outcome.sequence_id)
            changed[request.submitted.request_id] = request
        self._end_failed(changed)

    def _end_failed(self, changed: dict[str, LiveRequest]) -> None:
        """Ends all sequences of requests that have failed."""
        for request in changed.values():
            if request.error is not None:
                for sequence_id in request.sequence_ids:
                    self.engine.abort(sequence_id)

    def _fail_all(self, error: Exception) -> list[RequestOutput]:
        failure = ServiceError("engine_failure", f"The engine failed: {type(error).__name__}: {error}")
        requests = list(self._live.values())
        self._live.clear()
        self._reports.clear()
        for request in requests:
            request.fail(failure, now())
        return [request.output() for request in requests]

    def _found(self, sequence_id: str) -> tuple[LiveRequest, int] | None:
        request_id, choice = choice_of(sequence_id)
        request = self._live.get(request_id)
        return None if request is None else (request, choice)


def now() -> Times:
    """Returns the current time by both clocks."""
    return Times(time.time(), time.monotonic())
