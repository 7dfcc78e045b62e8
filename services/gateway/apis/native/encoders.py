"""Encodes the answers of `/generate`. A stream repeats the whole output so far in each object. Pure.

text form      {"text": ["prompt and output", …]}     one object for each update, each ended by a NUL byte
engine form    a RequestOutput                        one object a line, for each prompt with new output
"""

from typing import Any

import msgspec

from antiphon.services.gateway.apis.native.convert import ClientFacts
from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.choices import Choice
from antiphon.services.gateway.apis.openai.answers.timings import timings
from antiphon.services.gateway.apis.openai.request_context import RequestContext
from antiphon.services.gateway.edge.http.errors import error_body
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import PositionLogprobs
from antiphon.shared.request.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    logprobs_by_token,
    prompt_logprobs_by_token,
)

_encode = msgspec.json.Encoder().encode


class TextEncoder:
    """Encodes answers to a `GenerateBody`. Implements `SnapshotEncoder`."""

    content_type = b"text/plain; charset=utf-8"

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._changed = False

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        choices = state.accumulator.choices
        body: dict[str, Any] = {"text": [self._context.echo(choice.index) + _text(choice) for choice in choices]}
        if self._context.timings and all(choice.finish_reason is not None for choice in choices):
            body["timings"] = timings(state)
        return _encode(body)

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder. The text is kept for `flush`."""
        choice.text.append(text)
        self._changed |= bool(text) or choice.finish_reason is not None
        return b""

    def flush(self, state: GenerationState) -> bytes:
        """See SnapshotEncoder."""
        if not self._changed:
            return b""
        self._changed = False
        return self.whole(state) + b"\0"

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder."""
        return error_body(error) + b"\0"


class RequestOutputEncoder:
    """Encodes answers to an `EngineBody`. Implements `SnapshotEncoder`."""

    content_type = b"application/x-ndjson"

    def __init__(self, context: RequestContext, facts: ClientFacts) -> None:
        self._context = context
        self._facts = facts
        self._changed: dict[int, None] = {}
        """Indexes of prompts with output that is not sent yet, in the order of their updates."""
        self._prompts: list[list[int]] | None = None

    def whole(self, state: GenerationState) -> bytes:
        """See AnswerEncoder. The answer is one object, or a list of them for several conversations."""
        outputs = [self._output(state, index) for index in range(self._context.request.inputs.num_prompts)]
        return _encode(outputs if len(outputs) > 1 else outputs[0])

    def opening(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerEncoder. The text is kept for `flush`."""
        choice.text.append(text)
        self._changed[choice.index // self._context.request.n] = None
        return b""

    def flush(self, state: GenerationState) -> bytes:
        """See SnapshotEncoder."""
        changed, self._changed = list(self._changed), {}
        return b"".join(_encode(self._output(state, index)) + b"\n" for index in changed)

    def closing(self, state: GenerationState) -> bytes:
        """See AnswerEncoder."""
        return b""

    def failure(self, error: ServiceError) -> bytes:
        """See AnswerEncoder."""
        return engine_error(error, self._facts.answer_id, self._facts.prompt) + b"\n"

    def _output(self, state: GenerationState, index: int) -> RequestOutput:
        """Returns the result of one prompt so far. Only the last line repeats the prompt, which may be long."""
        request, facts = self._context.request, self._facts
        n = request.n
        choices = state.accumulator.choices[index * n : (index + 1) * n]
        finished = all(choice.finish_reason is not None for choice in choices)
        return RequestOutput(
            request_id=facts.answer_id if request.inputs.num_prompts == 1 else f"{facts.answer_id}-{index}",
            prompt=facts.prompt if finished else None,
            prompt_token_ids=self._prompt_ids(state)[index] if finished else None,
            prompt_logprobs=self._prompt_logprobs(state.accumulator.prompts[index]),
            outputs=[self._completion(number, choice) for number, choice in enumerate(choices)],
            finished=finished,
            num_cached_tokens=min((one.num_cached_tokens for one in choices if one.num_tokens), default=0),
            metrics=_metrics(state, facts, finished=finished),
        )

    def _prompt_ids(self, state: GenerationState) -> list[list[int]]:
        if self._prompts is None:
            self._prompts = state.generation.prompt_token_ids
        return self._prompts

    def _prompt_logprobs(self, positions: list[PositionLogprobs]) -> list[dict[int, Logprob] | None] | None:
        num_asked = self._context.request.params.prompt_logprobs
        return None if num_asked is None else prompt_logprobs_by_token(positions)

    def _completion(self, number: int, choice: Choice) -> CompletionOutput:
        with_logprobs = self._context.request.params.logprobs is not None
        return CompletionOutput(
            index=number,
            token_ids=choice.token_ids or [],
            text=_text(choice),
            cumulative_logprob=choice.cumulative_logprob,
            logprobs=[logprobs_by_token(one) for one in choice.logprobs] if with_logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


def engine_error(error: ServiceError, answer_id: str, prompt: str | None = None) -> bytes:
    """Returns the JSON of a failed request in the engine form: a `RequestOutput` with the error, and OpenAI's error."""
    output = RequestOutput(
        request_id=answer_id,
        prompt=prompt,
        outputs=[],
        finished=True,
        error_code=error.status,
        error_msg=error.message,
    )
    return _encode(output)[:-1] + b"," + error_body(error)[1:]


def _text(choice: Choice) -> str:
    """Returns the text of a choice, and keeps it joined for the next call."""
    text = "".join(choice.text)
    choice.text[:] = [text]
    return text


def _metrics(state: GenerationState, facts: ClientFacts, *, finished: bool) -> RequestMetrics:
    times = state.generation.times
    metrics = RequestMetrics(arrival_time=facts.arrival_time, preprocess_cost_time=facts.preprocess_s)
    if times.tokenized_s is not None:
        metrics.request_start_time = facts.received_at + times.tokenized_s
        if facts.preprocess_s is None:
            metrics.preprocess_cost_time = times.tokenized_s
    if times.placed_s is not None and times.tokenized_s is not None:
        metrics.inference_start_time = metrics.scheduled_ts = facts.received_at + times.placed_s
        metrics.time_in_queue = times.placed_s - times.tokenized_s
    if state.time_to_first_token_s:
        metrics.first_token_time = state.time_to_first_token_s
        metrics.first_token_ts = facts.received_at + state.time_to_first_token_s
        metrics.last_token_ts = facts.received_at + state.time_to_last_token_s
        metrics.model_forward_time = max(0.0, state.time_to_last_token_s - (times.placed_s or 0.0))
    if finished:
        metrics.model_execute_time = state.elapsed_s + (facts.preprocess_s or 0.0)
    return metrics
