"""The argument `guided_options_request` of `LLM.generate`: one structure for the outputs of all prompts of a call."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from antiphon.offline.sampling_params import SamplingParams, grammar_of
from antiphon.shared.errors import ServiceError

_KINDS = "guided_json, guided_regex, guided_choice, guided_grammar and guided_json_object"


class LLMGuidedOptions(TypedDict, total=False):
    """The fields of `GuidedDecodingRequest` as a dict."""

    guided_json: Any
    guided_regex: str
    guided_choice: list[str]
    guided_grammar: str
    guided_json_object: bool
    guided_decoding_backend: str
    guided_whitespace_pattern: str


@dataclass(kw_only=True)
class GuidedDecodingRequest:
    """What outputs must follow. The constructor raises ValueError unless exactly one kind is given.

    Args:
        guided_json: A JSON Schema: a dict, its text, or a pydantic model's class.
        guided_regex: A regular expression that the whole output matches.
        guided_choice: Texts, one of which is the output.
        guided_grammar: A context-free grammar in Lark's or GBNF's notation.
        guided_json_object: Whether the output must be a JSON object.
        guided_decoding_backend: Accepted for compatibility; it does not change the result.
        guided_whitespace_pattern: Regular expression of the whitespace between JSON tokens.
    """

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            grammar = grammar_of(self)
        except ServiceError as error:
            raise ValueError(error.message) from None
        if grammar is None:
            raise ValueError(f"Give one of {_KINDS}.")
        self.grammar = grammar


def with_guidance(
    params: SamplingParams | Sequence[SamplingParams] | None,
    request: GuidedDecodingRequest | LLMGuidedOptions | Mapping[str, Any] | None,
) -> SamplingParams | Sequence[SamplingParams] | None:
    """Returns the sampling parameters with the structure that `request` asks the output to have, such as a JSON schema.

    Raises ValueError or TypeError.
    """
    if request is None:
        return params
    asked = request if isinstance(request, GuidedDecodingRequest) else _request(request)
    if isinstance(params, Sequence):
        return [_guided(one, asked) for one in params]
    return _guided(params or SamplingParams(), asked)


def _request(options: Any) -> GuidedDecodingRequest:
    return GuidedDecodingRequest(**dict(options))


def _guided(params: SamplingParams, asked: GuidedDecodingRequest) -> SamplingParams:
    if params.grammar is not None:
        raise ValueError("'guided_options_request' cannot be given if the sampling parameters have a structure.")
    if params.use_beam_search:
        raise ValueError("'guided_options_request' cannot be given together with 'use_beam_search'.")
    guided = copy.copy(params)
    guided.grammar = asked.grammar
    return guided
