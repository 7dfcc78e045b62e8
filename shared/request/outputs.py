"""Results of a request: one `RequestOutput` for each prompt, one `CompletionOutput` for each of its `n` outputs.

The offline API returns these objects; the server's `/generate` sends them as JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.shared.messages import PositionLogprobs


@dataclass(kw_only=True)
class RequestMetrics:
    """Times of one request, in seconds.

    `arrival_time` and the fields whose names end in `start_time` or `_ts` are points in time (Unix time). All other
    fields are durations, measured with a monotonic clock.
    """

    arrival_time: float
    """Time at which the API was called, or at which the request arrived at the server."""
    inference_start_time: float | None = None
    """Start of the first step that computed a sequence of the request."""
    first_token_time: float | None = None
    """Duration from `arrival_time` to the first token."""
    time_in_queue: float | None = None
    """Duration between `request_start_time` and `inference_start_time`."""
    preprocess_cost_time: float | None = None
    """Duration of rendering and tokenizing the prompt."""
    model_forward_time: float | None = None
    """Time that the engine spent in steps, from the request's first step to its last."""
    model_execute_time: float | None = None
    """Duration from `arrival_time` to the end of the request, including preprocessing and queueing."""
    request_start_time: float | None = None
    """Time at which preprocessing ended and the request could be passed to the engine."""
    scheduled_ts: float | None = None
    """The same as `inference_start_time`."""
    first_token_ts: float | None = None
    last_token_ts: float | None = None

    @property
    def first_token_latency(self) -> float | None:
        """The same as `first_token_time`."""
        return self.first_token_time


@dataclass(frozen=True)
class Logprob:
    """A token's log probability: the natural logarithm in the model's own distribution.

    `rank` is 1 for the likeliest token, and None for a chosen token that is not among the reported candidates.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(kw_only=True)
class CompletionOutput:
    """One output of a prompt."""

    index: int
    token_ids: list[int]
    text: str | None = None
    reasoning_content: str | None = None
    """The text between the model's think tags, if the model writes them. This text is not repeated in `text`."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """For each output token: the chosen token and the likeliest tokens, by token id."""
    finish_reason: str | None = None
    """None while the output is being generated; then "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the output; None for the model's end token."""

    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """The result of one prompt. After an error, `error_code` is the HTTP status with which the server would answer."""

    outputs: list[CompletionOutput]
    finished: bool = False
    request_id: str = "default"
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token: the token and the likeliest tokens, by token id. None for the first token."""
    num_cached_tokens: int | None = 0
    """Prompt tokens that were taken from the prefix cache."""
    metrics: RequestMetrics | None = field(default=None)
    error_code: int | None = None
    error_msg: str | None = None


def prompt_logprobs_by_token(positions: Sequence[PositionLogprobs]) -> list[dict[int, Logprob] | None]:
    """Returns the candidates of each token of a prompt. The first token, which has no probability, has None."""
    return [None, *map(logprobs_by_token, positions[1:])]


def logprobs_by_token(position: PositionLogprobs) -> dict[int, Logprob]:
    """Returns the chosen token and the likeliest tokens at one position, by token id."""
    candidates: dict[int, Logprob] = {}
    for rank, one in enumerate(position.top, start=1):
        candidates[one.token_id] = Logprob(one.logprob, rank, one.token)
    chosen = position.chosen
    candidates.setdefault(chosen.token_id, Logprob(chosen.logprob, position.rank or None, chosen.token))
    return candidates
