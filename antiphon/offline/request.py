"""One running request: a prompt with its text streams, outputs so far and times.

The module reads no clock: the runner passes times in. The text of a sequence comes from `TextStream`, the class that
the detokenizer service uses, so that it is equal to the text that the server sends.
"""

from dataclasses import dataclass

import msgspec

from antiphon.offline.adapters import Adapters, with_adapters
from antiphon.offline.sampling_params import SamplingParams
from antiphon.services.engine.core.plan import PlacedImage
from antiphon.services.engine.core.request import Outcome, SequenceSpec
from antiphon.services.engine.steps.events import token_events
from antiphon.shared import limits
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import OpenStream, PositionLogprobs, TextEvent
from antiphon.shared.request.choices import best_first, choice_params
from antiphon.shared.request.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    logprobs_by_token,
    prompt_logprobs_by_token,
)
from antiphon.shared.text.detokenization.stream import TextStream
from antiphon.shared.text.reasoning import CLOSING, OPENING, Parts, ReasoningSplitter
from antiphon.shared.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Times:
    """A point in time by two clocks, in seconds: Unix time (`wall`) and the monotonic clock."""

    wall: float
    monotonic: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A request for one prompt, after preprocessing.

    `arrived` is the time of the call and `started` the time at which preprocessing ended.
    """

    request_id: str
    prompt: str | None
    token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...] = ()
    params: SamplingParams
    seed: int
    priority: int = 0
    is_chat: bool = False
    arrived: Times
    started: Times
    preprocess_s: float
    arrival_time: float
    """Unix time that the result repeats: the caller's, or that of the call."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids of the texts in the parameters' `bad_words`."""
    adapters: Adapters = ()
    images: tuple[PlacedImage, ...] = ()


class LiveRequest:
    """A running request: one prompt with its sequences. `output()` may be called at any time."""

    def __init__(self, submitted: Submitted, vocabulary: Vocabulary, max_model_len: int) -> None:
        self.submitted = submitted
        self._vocabulary = vocabulary
        virtual = sum(adapter.num_virtual_tokens for adapter in submitted.adapters)
        self._room = max_model_len - virtual - len(submitted.token_ids)
        count = submitted.params.choices.num_sequences
        self.sequence_ids = [f"{submitted.request_id}-{choice}" for choice in range(count)]
        self._streams: dict[int, TextStream] = {}
        self._outputs = [_Output(_splitter(submitted)) for _ in range(count)]
        self._prompt_logprobs: list[PositionLogprobs] = []
        self.error: ServiceError | None = None
        self._began_at: Times | None = None
        self._first_at = self._last_at = 0.0
        self._forward_at_start = self._forward_s = 0.0
        self._ended_at: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every output has ended, or the request has failed."""
        return self.error is not None or all(output.finish_reason is not None for output in self._outputs)

    def specs(self, first_arrival: int) -> list[SequenceSpec]:
        """Returns the request's sequences for the engine, with consecutive arrival numbers from `first_arrival`."""
        submitted = self.submitted
        params = submitted.params.engine_params(submitted.seed, self._room, submitted.bad_words)
        params = msgspec.structs.replace(params, end_token_ids=submitted.end_token_ids)
        sequence_group = self.sequence_ids[0] if len(self.sequence_ids) > 1 else ""
        specs = [
            SequenceSpec(
                sequence_id=sequence_id,
                prompt_token_ids=submitted.token_ids,
                params=choice_params(params, choice).within(self._room),
                priority=submitted.priority,
                arrival=first_arrival + choice,
                sequence_group=sequence_group,
                images=submitted.images,
            )
            for choice, sequence_id in enumerate(self.sequence_ids)
        ]
        return [with_adapters(spec, submitted.adapters) for spec in specs]

    def joined(self, at: Times, forward_s: float) -> None:
        """Records that a sequence joined a step that began at `at`; only the first call counts.

        `forward_s` is the time in seconds that the engine has spent in steps before this one.
        """
        if self._began_at is None:
            self._began_at, self._forward_at_start = at, forward_s

    def take(self, choice: int, outcome: Outcome, at: Times, forward_s: float) -> bool:
        """Adds a step's outcome for one choice. Returns whether the engine has to end the sequence.

        That is the case after a stop string. `forward_s` is the time in seconds that the engine has spent in steps so
        far.
        """
        stream = self._streams.get(choice) or self._open(choice)
        events = token_events(outcome, self.sequence_ids[choice], 1)
        for text in (text for event in events for text in stream.push(event)):
            self._prompt_logprobs += text.prompt_logprobs
            self._outputs[choice].add(text)
            if text.finish_reason == "error":
                self.fail(ServiceError(text.error_code or "engine_failure", text.error_message), at)
        self._first_at = self._first_at or at.monotonic
        self._last_at, self._forward_s = at.monotonic, forward_s - self._forward_at_start
        if self.finished:
            self._ended_at = at.monotonic
        return stream.stopped

    def fail(self, error: ServiceError, at: Times) -> None:
        """Ends the request with an error. Its outputs keep the tokens and text generated so far."""
        if self.finished:
            return
        self.error, self._ended_at = error, at.monotonic
        for output in self._outputs:
            output.finish_reason = output.finish_reason or "error"

    def aborted(self, at: Times) -> None:
        """Ends the request because the caller aborted it; `finish_reason` is "abort"."""
        self._ended_at = at.monotonic
        for output in self._outputs:
            output.finish_reason = output.finish_reason or "abort"

    def output(self) -> RequestOutput:
        """Returns the result so far."""
        submitted = self.submitted
        cached = [output.num_cached_tokens for output in self._outputs if output.token_ids]
        return RequestOutput(
            request_id=submitted.request_id,
            prompt=submitted.prompt,
            prompt_token_ids=list(submitted.token_ids),
            prompt_logprobs=self._shown_prompt_logprobs(),
            outputs=[one.shown(index, submitted, self._vocabulary) for index, one in enumerate(self._returned())],
            finished=self.finished,
            num_cached_tokens=min(cached, default=0),
            metrics=self._metrics(),
            error_code=None if self.error is None else self.error.status,
            error_msg=None if self.error is None else self.error.message,
        )

    def _returned(self) -> "list[_Output]":
        """Returns the outputs to show: with `best_of`, those with the highest log probability so far."""
        choices = self.submitted.params.choices
        if choices.n == choices.num_sequences:
            return self._outputs
        order = best_first([output.cumulative_logprob for output in self._outputs], choices.n)
        return [self._outputs[index] for index in order]

    def _shown_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Returns the log probabilities of the prompt; None if they are not requested or not computed yet."""
        if not self._prompt_logprobs:
            return None
        return prompt_logprobs_by_token(self._prompt_logprobs)

    def _open(self, choice: int) -> TextStream:
        submitted = self.submitted
        params = submitted.params
        message = OpenStream(
            sequence_id=self.sequence_ids[choice],
            attempt=1,
            model="",
            reply_subject="",
            engine_subject="",
            prompt_token_ids=pack_ids(submitted.token_ids[-limits.PROMPT_TAIL_TOKENS :]),
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            detokenize=params.detokenize,
            shown_special_tokens=(OPENING, CLOSING) if submitted.is_chat else (),
        )
        stream = self._streams[choice] = TextStream(message, self._vocabulary)
        return stream

    def _metrics(self) -> RequestMetrics:
        submitted, began = self.submitted, self._began_at
        arrived = submitted.arrived
        metrics = RequestMetrics(
            arrival_time=submitted.arrival_time,
            request_start_time=submitted.started.wall,
            preprocess_cost_time=submitted.preprocess_s,
        )
        if began is not None:
            metrics.inference_start_time = metrics.scheduled_ts = began.wall
            metrics.time_in_queue = max(0.0, began.monotonic - submitted.started.monotonic)
            metrics.model_forward_time = self._forward_s
        if self._first_at:
            metrics.first_token_time = self._first_at - arrived.monotonic
            metrics.first_token_ts = arrived.wall + metrics.first_token_time
            metrics.last_token_ts = arrived.wall + self._last_at - arrived.monotonic
        if self._ended_at is not None:
            metrics.model_execute_time = self._ended_at - arrived.monotonic
        return metrics


class _Output:
    """The output of one sequence so far."""

    __slots__ = (
        "_splitter", "cumulative_logprob", "finish_reason", "logprobs", "num_cached_tokens", "reasoning", "stop_reason",
        "text", "token_ids",
    )  # fmt: skip

    def __init__(self, splitter: ReasoningSplitter | None) -> None:
        """`splitter`: separates the reasoning; None: the reasoning stays in the text."""
        self._splitter = splitter
        self.text = ""
        self.reasoning: str | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.cumulative_logprob = 0.0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, event: TextEvent) -> None:
        """Appends the text, tokens and log probabilities of the next text event."""
        if self._splitter is None:
            self.text += event.text
        else:
            self._show(self._splitter.feed(event.text))
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if event.token_ids:
            self.cumulative_logprob = event.cumulative_logprob
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason

    def shown(self, index: int, submitted: Submitted, vocabulary: Vocabulary) -> CompletionOutput:
        """Returns the output in the form of the public API, with the model's reasoning separated for chat requests."""
        if self._splitter is not None and self.finish_reason is not None:
            self._show(self._splitter.finish())
        return CompletionOutput(
            index=index,
            token_ids=list(self.token_ids),
            text=self.text,
            reasoning_content=self.reasoning,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if submitted.params.logprobs is None else [logprobs_by_token(one) for one in self.logprobs],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _show(self, parts: Parts) -> None:
        assert self._splitter is not None
        self.text += parts.answer
        if self._splitter.found:
            self.reasoning = (self.reasoning or "") + parts.reasoning


def _splitter(submitted: Submitted) -> ReasoningSplitter | None:
    """Returns a parser that separates a chat's reasoning from its text; None for other requests."""
    if not submitted.is_chat:
        return None
    return ReasoningSplitter(inside=(submitted.prompt or "").rstrip().endswith(OPENING))


def choice_of(sequence_id: str) -> tuple[str, int]:
    """Splits a sequence id into the request id and the number of the choice."""
    request_id, _, choice = sequence_id.rpartition("-")
    return request_id, int(choice)
