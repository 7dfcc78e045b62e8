"""What the offline API returns: one `RequestOutput` a prompt, with a `CompletionOutput` for each of its `n` outputs."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class RequestMetrics:
    """Times of one request, in seconds.

    `..._time` fields that end in `start_time`, and `arrival_time` and those that end in `_ts`, are points in time (Unix
    time); all others are durations, measured with a monotonic clock.
    """

    arrival_time: float
    """When the request was given to the API."""
    inference_start_time: float | None = None
    """When the first step that computes it began."""
    first_token_time: float | None = None
    """Duration from the arrival to the first token."""
    time_in_queue: float | None = None
    """Duration between `request_start_time` and `inference_start_time`."""
    preprocess_cost_time: float | None = None
    """Duration of rendering and tokenizing the prompt."""
    model_forward_time: float | None = None
    """Duration of the steps from its first to its last."""
    model_execute_time: float | None = None
    """Duration from the arrival to the end, preprocessing and queueing included."""
    request_start_time: float | None = None
    """When the request was handed to the engine."""
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
    """A token's log probability (natural logarithm, of the model's own distribution). `rank`: 1 is the likeliest.

    `rank` is None for a chosen token that is not among the candidates reported.
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
    """The text between the model's think tags, for models that write them; it is then not part of `text`."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: the chosen one and the likeliest, by token id."""
    finish_reason: str | None = None
    """None while it is being generated; "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for the model's end token."""

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """The result of one prompt. With an error, `error_code` is the HTTP status that the server would answer with."""

    outputs: list[CompletionOutput]
    finished: bool = False
    request_id: str = "default"
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = 0
    """Prompt tokens that were taken from the prefix cache."""
    metrics: RequestMetrics | None = field(default=None)
    error_code: int | None = None
    error_msg: str | None = None
