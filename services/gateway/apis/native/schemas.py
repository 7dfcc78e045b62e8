"""The request bodies of `/generate` as structs."""

import msgspec

from antiphon.services.gateway.apis.openai.body import SamplingFields
from antiphon.shared.request.conversation import Turn


class GenerateBody(SamplingFields, kw_only=True):
    """A prompt with its sampling parameters beside it. The answer is the text of prompt and output."""

    prompt: str | list[str] | None = None
    """A text, or several texts."""
    suffix: str | None = None
    """Text after the output, as at `/v1/completions`."""
    model: str | None = None
    """Has no effect without OpenAI's API (`USE_OPENAI=0`)."""
    stream: bool | None = None
    timings: bool | None = None
    """Whether the answer, or the last object of a stream, has the times of the request's phases."""


class EngineSampling(SamplingFields, kw_only=True):
    """The object `sampling_params` of a request in the engine form."""

    logprobs: int | None = None
    """Number of candidates to report with each token, 0 to 5."""
    prompt_logprobs: bool | int | None = None
    """Number of candidates to report with each token of the prompt, 0 to 20."""


class EngineBody(msgspec.Struct, kw_only=True):
    """A request in the engine form. The answer is a `RequestOutput`, or a list of them for several conversations.

    The input is `prompt`, or `prompt_token_ids` (then `prompt` is only repeated in the answer), or `messages`, or a
    conversation of `system`, `history` and `prompt` as the user's latest message.
    """

    request_id: str | None = None
    """Repeated in the answer. Must differ from the ids of all running requests of the same gateway."""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_token_ids_len: int | None = None
    """If given, the number of `prompt_token_ids`."""
    messages: list[Turn | list[Turn]] | None = None
    """Conversations, each of which is a list of messages. Messages without the outer list are one conversation."""
    history: list[list[str]] | None = None
    """Earlier turns, oldest first: pairs of the user's text and the assistant's."""
    system: str | None = None
    """Text of the system message."""
    sampling_params: EngineSampling | None = None
    eos_token_ids: list[int] | None = None
    """The same as `sampling_params.eos_token_ids`."""
    arrival_time: float | None = None
    """Unix time in seconds; repeated in the metrics."""
    preprocess_start_time: float | None = None
    preprocess_end_time: float | None = None
    """Given with `preprocess_start_time`: the difference is the preprocessing time in the metrics, in seconds."""
    model: str | None = None
    """Has no effect without OpenAI's API (`USE_OPENAI=0`)."""
    stream: bool | None = None


ENGINE_ONLY = frozenset(EngineBody.__struct_fields__) - frozenset(GenerateBody.__struct_fields__)
"""A body with any of these fields is an `EngineBody`."""
GENERATE_DECODER = msgspec.json.Decoder(GenerateBody)
ENGINE_DECODER = msgspec.json.Decoder(EngineBody)
