"""The fields that the bodies of several APIs have, as structs. The rest of the bodies is in the `schemas` of each API.

They are msgspec structs, not pydantic models: msgspec is strict (a boolean is not a number, "1" is not an integer, NaN
is not JSON), takes a quarter of the time, and the same structs describe the bodies in `/openapi.json`. null always
means the default.
"""

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    """The field `stream_options`: additional content of a stream."""

    include_usage: bool | None = None
    """Whether the stream has a last chunk with the token counts."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the token counts so far."""


class SamplerFields(msgspec.Struct, kw_only=True):
    """The sampling parameters that have the same name and meaning in several APIs. None means the default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_a: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


class TokenFields(SamplerFields, kw_only=True):
    """How each token of a sequence is chosen, and how many there are. None means the default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None


class SamplingFields(TokenFields, kw_only=True):
    """How the tokens of a sequence are chosen, where it ends, and how it becomes text. None means the default."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    eos_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    """Value to add to a token's logit, by the token's id as text; -100 to 100."""
    allowed_token_ids: list[int] | None = None
    bad_words: list[int | str] | None = None
    """Token ids and texts that the output must not contain."""


class GenerationFields(SamplingFields, kw_only=True):
    """Fields that completions and chat have in common. None means the default."""

    model: str | None = None
    max_completion_tokens: int | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    prompt_logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether tokens in log probabilities are written as `token_id:7` instead of their text."""
    timings: bool | None = None
    """Whether the answer has the times of the request's phases."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    service_tier: str | None = None
    """`flex`: the request gives way to others for a while. The other tiers of OpenAI's API have no effect."""
    cache_salt: str | None = None
    prompt_cache_retention: str | None = None
    """`24h`: the KV of the prompt is kept on the engines' disk for so long. `in_memory`: nothing more than usual."""
    response_format: Any = None
    """OpenAI's structured output: an object with `type`."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's structured output: `json`, `regex`, `choice`, `grammar`, `json_object` or `structural_tag`."""
    guided_json: Any = None
    """A JSON Schema that the output must follow: an object or its text."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    timeout: float | None = None
    """Seconds after which the request fails."""
