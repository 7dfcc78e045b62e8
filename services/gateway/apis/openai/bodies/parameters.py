"""The conversion that the bodies of completions and chat have in common: defaults, ranges, limits. Pure.

Every error names the parameter. `completions` and `chat` have the rest of the conversion to a `GenerationRequest`.
`antiphon.shared.parameters.sampling.check` checks the ranges of sampling parameters; this module checks the rest of a
request. The backend checks that the prompt leaves room for `max_tokens`, because only it knows the length of the prompt
in tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import msgspec
from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.bodies import retention
from antiphon.services.gateway.apis.openai.bodies.parameter_names import new_name
from antiphon.services.gateway.apis.openai.body import GenerationFields
from antiphon.services.gateway.edge.access.call import current_call
from antiphon.services.gateway.path.generation import (
    FLEX,
    GenerationRequest,
    ModelCard,
    OutputText,
    PendingParams,
    PromptInputs,
)
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters import sampling
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.request import checks
from antiphon.shared.request.checks import check_token_ids, missing, refuse
from antiphon.shared.request.choices import Choices, choices_of
from antiphon.shared.request.sampling_fields import SeedSource, TokenConstraints, random_seed, token_constraints
from antiphon.shared.request.structured import FIELDS, Constraint, constraint_of

AS_MANY_AS_FIT = 0
_INT32 = 2**31
_STRUCTURE, _NO_STRUCTURE = attrgetter(*FIELDS), (None,) * len(FIELDS)
_TOKENS, _NO_TOKENS = attrgetter("logit_bias", "allowed_token_ids", "bad_words"), (None,) * 3
_CHOICES = attrgetter("n", "best_of", "use_beam_search", "length_penalty", "early_stopping")
_NO_CHOICES, _ONE = (None,) * 5, Choices()
_TIERS = ("auto", "default", FLEX, "priority", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Defaults for requests from the server's settings. `draw_seed` is called if a body has no seed."""

    draw_seed: SeedSource = random_seed
    chat_temperature: float = 1.0
    max_logprobs: int = limits.LOGPROBS_MAX
    images_max: int = limits.IMAGES_MAX
    """Maximum number of images in a request."""


DEFAULTS = RequestDefaults()


def structure_of(body: GenerationFields) -> Constraint | None:
    """Returns the structure that the fields of a body ask for; None if they ask for none. Raises ServiceError."""
    return None if _STRUCTURE(body) == _NO_STRUCTURE else constraint_of(body)


def with_structure(request: GenerationRequest, structure: Constraint) -> GenerationRequest:
    """Returns the request with the structure that its output must follow."""
    params = msgspec.structs.replace(request.params, grammar=structure.grammar)
    pending = replace(request.pending, grammar_param=structure.param, grammar_ignored=structure.ignored)
    return replace(request, params=params, pending=pending)


def with_grammar_named(request: GenerationRequest, names: Mapping[str, str]) -> GenerationRequest:
    """Returns a converted request with the name of the grammar's field in its own API: tokenizers report it."""
    pending = replace(request.pending, grammar_param=new_name(request.pending.grammar_param, names))
    return replace(request, pending=pending)


def prompts(
    prompt: str | list[str | int | list[int]] | None,
    vocab_size: int,
    param: str = "prompt",
    number_max: int = limits.PROMPTS_MAX,
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Returns the prompts as texts and as lists of token ids; one of the two is empty.

    Raises ServiceError that names `param`, also for more than `number_max` prompts.
    """
    if prompt is None:
        missing(param)
    if isinstance(prompt, str):
        return (prompt,), ()
    kinds = set(map(type, prompt))  # one pass in C: a prompt may have many thousands of token ids
    if len(kinds) > 1:
        refuse(param, "must hold only texts, only token ids or only lists of token ids")
    texts = tuple(cast(list[str], prompt)) if kinds == {str} else ()
    token_ids = tuple(map(tuple, cast(list[list[int]], prompt))) if kinds == {list} else ()
    if kinds == {int}:
        token_ids = (tuple(cast(list[int], prompt)),)
    for one in token_ids:
        check_token_ids(one, vocab_size, param)
    if not 1 <= len(texts) + len(token_ids) <= number_max:
        refuse(param, f"must hold between 1 and {number_max} {param}s")
    return texts, token_ids


def only_echoes(body: GenerationFields) -> bool:
    """Returns whether the request asks only for the echo of its prompt: `max_tokens` is 0, which requires `echo`."""
    return (body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens) == 0


@dataclass(frozen=True, slots=True)
class EndpointDefaults:
    """The defaults of one endpoint. `may_only_echo`: whether `max_tokens` may be 0; then one token is generated."""

    max_tokens: int
    temperature: float
    may_only_echo: bool = False


def checked_params(
    body: GenerationFields,
    card: ModelCard,
    endpoint: EndpointDefaults,
    logprobs: tuple[int | None, int | None],
    draw_seed: SeedSource,
) -> SamplingParams:
    """Returns the checked sampling parameters. `logprobs`: number of candidates for the output, and for the prompt."""
    max_tokens = 1 if endpoint.may_only_echo and only_echoes(body) else _max_tokens(body, card, endpoint.max_tokens)
    names_tokens = _TOKENS(body) != _NO_TOKENS
    constraints = token_constraints(body) if names_tokens else TokenConstraints()
    params = sampling.from_fields(
        body,
        max_tokens=max_tokens or card.max_model_len,
        temperature=endpoint.temperature if body.temperature is None else body.temperature,
        # A top_k above the vocabulary size means all tokens. It is clamped so that it fits into the message's field.
        top_k=-1 if body.top_k is None else min(body.top_k, card.vocab_size),
        seed=draw_seed() if body.seed is None else body.seed,
        logprobs=logprobs[0],
        prompt_logprobs=logprobs[1],
        logit_bias=constraints.logit_bias,
        allowed_token_ids=constraints.allowed_token_ids,
        bad_words=constraints.bad_words,
    )
    sampling.check(params)
    if names_tokens:
        sampling.check_vocabulary(params, card.vocab_size)
    return params if max_tokens else without_limit(params)


def without_limit(params: SamplingParams) -> SamplingParams:
    """Returns the parameters of a request that generates as many tokens as fit."""
    return msgspec.structs.replace(params, max_tokens=AS_MANY_AS_FIT)


def _max_tokens(body: GenerationFields, card: ModelCard, default: int) -> int:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    value: int | None = getattr(body, name)
    if value is None:
        return default
    if value < 1:
        refuse(name, "must be at least 1")
    if value > card.max_model_len and current_call().strict.long_outputs:
        message = f"'{name}' must not exceed the model's context length of {card.max_model_len} tokens."
        raise ServiceError("context_length_exceeded", message, param=name)
    # What the prompt leaves no room for is cut when the prompt's length is known (`requests.preparation`).
    return min(value, card.max_model_len)


def checked_request(
    body: GenerationFields, card: ModelCard, request_id: str, params: SamplingParams, num_prompts: int
) -> GenerationRequest:
    """Returns the request without its prompts. Raises ServiceError naming the first parameter that is wrong."""
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "needs 'stream' to be true")
    choices = _ONE
    if num_prompts > 1 or _CHOICES(body) != _NO_CHOICES:
        choices = choices_of(body, params.temperature, params.top_k, num_prompts)
    if choices.beam is not None:
        if only_echoes(body):
            refuse("max_tokens", "must be at least 1 with 'use_beam_search'")
        params = msgspec.structs.replace(params, beam=choices.beam)
        sampling.check_beam(params)
    if body.stream and (choices is not _ONE or params.prompt_logprobs is not None):
        _check_stream(params, choices)
    stop, detokenize = () if body.stop is None else checks.stop_strings(body.stop), body.detokenize is not False
    if stop:
        checks.check_detokenize(detokenize, stop)
    if body.echo and not detokenize:
        refuse("echo", "needs text: leave 'detokenize' at its default")
    keep = body.truncate_prompt_tokens
    return GenerationRequest(
        request_id=request_id,
        model=card.name,
        params=params,
        n=choices.n,
        best_of=choices.num_sequences,
        inputs=PromptInputs(
            truncate_prompt_tokens=0 if keep is None else checks.prompt_truncation(keep, card.max_model_len)
        ),
        output=OutputText(
            stop=stop,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
            detokenize=detokenize,
        ),
        pending=PendingParams(bad_word_texts=token_constraints(body).bad_word_texts if body.bad_words else ()),
        cache_salt=b"" if body.cache_salt is None else _cache_salt(body.cache_salt),
        priority=0 if body.priority is None else check_priority(body.priority),
        service_tier="" if body.service_tier is None else check_tier(body.service_tier),
        timeout_s=0.0 if body.timeout is None else _timeout_s(body.timeout),
        kv_keep_s=0.0 if body.prompt_cache_retention is None else retention.keep_s(body.prompt_cache_retention, card),
    )


def _check_stream(params: SamplingParams, choices: Choices) -> None:
    """Raises ServiceError for options of a stream whose output is known only at the end."""
    causes = {
        "'use_beam_search'": choices.beam is not None,
        "'best_of' greater than 'n'": choices.num_sequences > choices.n,
        "log probabilities of the prompt": params.prompt_logprobs is not None,
    }
    for cause, applies in causes.items():
        if applies:
            refuse("stream", f"must be false with {cause}")


def _cache_salt(salt: str) -> bytes:
    if not 1 <= len(salt) <= limits.CACHE_SALT_CHARS_MAX:
        refuse("cache_salt", f"must have between 1 and {limits.CACHE_SALT_CHARS_MAX} characters")
    return salt.encode()


def check_priority(value: int | None) -> int:
    """Returns a request's priority, 0 by default. Raises ServiceError if it does not fit into a message."""
    priority = value or 0
    if not -_INT32 <= priority < _INT32:
        refuse("priority", "must be a 32-bit integer")
    return priority


def check_tier(value: str | None) -> str:
    """Returns the service tier that the answer reports; empty if the request has none.

    Raises ServiceError if unknown.
    """
    if value is not None and value not in _TIERS:
        refuse("service_tier", f"must be one of {', '.join(_TIERS)}")
    return "" if value is None else FLEX if value == FLEX else "default"


def _timeout_s(timeout: float) -> float:
    if timeout <= 0:
        refuse("timeout", "must be a number of seconds above 0")
    return timeout
