"""Converts a request body to a `GenerationRequest`: defaults, ranges, limits. Every error names the parameter. Pure.

`shared.parameters.sampling.check` checks the ranges of sampling parameters; this module checks the rest of a request.
The backend checks that the prompt leaves room for `max_tokens`, because only it knows the length of the prompt in
tokens.
"""

from dataclasses import dataclass, replace

import msgspec

from services.gateway.generation import FLEX, GenerationRequest, ModelCard
from services.gateway.openai.body import GenerationFields
from services.gateway.openai.schemas import ChatBody, CompletionBody, TokenizeBody
from services.gateway.openai.tools.forced_calls import forced_calls
from services.gateway.openai.tools.tool_choice import ToolChoice, tool_choice
from shared import limits
from shared.errors import ServiceError
from shared.parameters import sampling
from shared.parameters.sampling import SamplingParams
from shared.request import conversation, rules
from shared.request.checks import check_token_ids, given, missing, refuse
from shared.request.choices import Choices, choices_of
from shared.request.pictures import PictureInput, check_pictures, taken_into
from shared.request.sampling_fields import sampling_params
from shared.request.seed_source import SeedSource, random_seed
from shared.request.structured import Constraint, constraint_of
from shared.request.token_constraints import token_constraints
from shared.request.tools import checked_documents, checked_template_kwargs, template_variables

COMPLETION_MAX_TOKENS = 16
AS_MANY_AS_FIT = 0
_INT32 = 2**31
_TIERS = ("auto", "default", FLEX, "priority", "scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Defaults for requests from the server's settings. `draw_seed` is called if a body has no seed."""

    draw_seed: SeedSource = random_seed
    chat_temperature: float = 1.0
    max_logprobs: int = limits.LOGPROBS_MAX


_DEFAULTS = RequestDefaults()


def completion(
    body: CompletionBody, card: ModelCard, request_id: str, defaults: RequestDefaults = _DEFAULTS
) -> GenerationRequest:
    """Returns the request of `/v1/completions`. Raises ServiceError naming the first parameter that is wrong."""
    texts, token_ids = prompts(body.prompt, card.vocab_size)
    logprobs = body.logprobs
    most = min(defaults.max_logprobs, limits.COMPLETION_LOGPROBS_MAX)
    if logprobs is not None and not 0 <= logprobs <= most:
        refuse("logprobs", f"must be between 0 and {most}")
    suffix = given(body.suffix, "")
    prompt_logprobs = rules.prompt_logprobs(body.prompt_logprobs, defaults.max_logprobs)
    if body.echo and logprobs is not None:
        if body.use_beam_search:
            refuse("echo", "with 'logprobs' must be false with 'use_beam_search'")
        if suffix:
            refuse("suffix", "cannot be given together with 'echo' and 'logprobs'")
        prompt_logprobs = max(logprobs, given(prompt_logprobs, 0))
    if suffix and token_ids:
        refuse("suffix", "needs a 'prompt' that is text")
    if suffix and body.truncate_prompt_tokens is not None:
        refuse("truncate_prompt_tokens", "cannot be given together with 'suffix'")
    endpoint = _Endpoint(COMPLETION_MAX_TOKENS, 1.0, may_only_echo=bool(body.echo))
    params = _params(body, card, endpoint, (logprobs, prompt_logprobs), defaults.draw_seed)
    request = _request(body, card, request_id, params, len(texts) + len(token_ids))
    request = _structured(request, constraint_of(body))
    return replace(
        request,
        texts=texts,
        token_ids=token_ids,
        suffix=suffix,
        add_special_tokens=given(body.add_special_tokens, True),
        only_echoes=_only_echoes(body),
    )


def chat(body: ChatBody, card: ModelCard, request_id: str, defaults: RequestDefaults = _DEFAULTS) -> GenerationRequest:
    """Returns the request of `/v1/chat/completions`. Raises ServiceError naming the first parameter that is wrong."""
    logprobs = _chat_logprobs(body, defaults.max_logprobs)
    asked = logprobs, rules.prompt_logprobs(body.prompt_logprobs, defaults.max_logprobs)
    params = _params(body, card, _Endpoint(AS_MANY_AS_FIT, defaults.chat_temperature), asked, defaults.draw_seed)
    choice = tool_choice(body)
    request = _structured(_request(body, card, request_id, params, 1), _chat_structure(body, choice))
    pictures: list[PictureInput] | None = [] if card.takes_pictures else None
    request = _with_conversation(request, body, card, choice, pictures)
    if not pictures:
        return request
    check_pictures(pictures)
    if request.truncate_prompt_tokens:
        refuse("truncate_prompt_tokens", "cannot be given together with pictures, which could be cut")
    if params.prompt_logprobs is not None:
        refuse("prompt_logprobs", "cannot be given together with pictures")
    return replace(request, pictures=tuple(pictures))


def tokenize(body: TokenizeBody, card: ModelCard, request_id: str) -> GenerationRequest:
    """Returns the request of `/tokenize`. Raises ServiceError naming the first parameter that is wrong."""
    if body.prompt is not None and body.messages is not None:
        refuse("messages", "cannot be given together with 'prompt'")
    request = GenerationRequest(request_id, card.name, SamplingParams())
    if body.messages is None:
        texts, _ = prompts(body.prompt, card.vocab_size)
        return replace(request, texts=texts, add_special_tokens=given(body.add_special_tokens, True))
    return _with_conversation(request, body, card, tool_choice(body))


def _with_conversation(
    request: GenerationRequest,
    body: ChatBody,
    card: ModelCard,
    choice: ToolChoice,
    pictures: list[PictureInput] | None = None,
) -> GenerationRequest:
    """Returns the request with the conversation and the inputs of the chat template.

    The pictures of the messages are appended to `pictures`; None: they may have none.
    """
    take_picture = None if pictures is None else taken_into(pictures)
    messages = conversation.messages(body.messages, card.vocab_size, take_picture)
    continued = given(body.continue_final_message, False)
    if continued:
        if body.add_generation_prompt:
            refuse("continue_final_message", "cannot be true together with 'add_generation_prompt'")
        assert body.messages is not None
        conversation.check_continuable(body.messages[-1], len(messages) - 1)
    return replace(
        request,
        messages=messages,
        # The chat template writes the special tokens itself.
        add_special_tokens=given(body.add_special_tokens, False),
        add_generation_prompt=given(body.add_generation_prompt, not continued),
        continue_final_message=continued,
        template_variables=template_variables(
            choice.tools,
            checked_documents(body.documents),
            checked_template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
        ),
    )


def _chat_structure(body: ChatBody, choice: ToolChoice) -> Constraint | None:
    """Returns what the output must follow: the structure that the request asks for, or that of calls it forces."""
    structure = constraint_of(body)
    if not choice.is_forced:
        return structure
    if structure is not None:
        refuse(choice.param, f"cannot force a call together with '{structure.param}'")
    if body.use_beam_search:
        refuse(choice.param, "cannot force a call together with 'use_beam_search'")
    return forced_calls(choice)


def _structured(request: GenerationRequest, structure: Constraint | None) -> GenerationRequest:
    if structure is None:
        return request
    params = msgspec.structs.replace(request.params, grammar=structure.grammar)
    return replace(request, params=params, grammar_param=structure.param)


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
    texts = tuple(item for item in prompt if isinstance(item, str))
    lists = tuple(tuple(item) for item in prompt if isinstance(item, list))
    ids = tuple(item for item in prompt if isinstance(item, int))
    if len(prompt) not in (len(texts), len(lists), len(ids)):
        refuse(param, "must hold only texts, only token ids or only lists of token ids")
    token_ids = (ids,) if ids else lists
    for one in token_ids:
        check_token_ids(one, vocab_size, param)
    if not 1 <= len(texts) + len(token_ids) <= number_max:
        refuse(param, f"must hold between 1 and {number_max} {param}s")
    return texts, token_ids


def _chat_logprobs(body: ChatBody, most: int) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= most:
        refuse("top_logprobs", f"must be between 0 and {most}")
    if body.logprobs is None or body.logprobs is False:
        if top:
            refuse("top_logprobs", "needs 'logprobs' to be true")
        return None
    if body.logprobs is True:
        return top or 0
    most = min(most, limits.COMPLETION_LOGPROBS_MAX)
    if not 0 <= body.logprobs <= most:
        refuse("logprobs", f"must be true, false or between 0 and {most}")
    return body.logprobs if top is None else top


def _only_echoes(body: GenerationFields) -> bool:
    """Returns whether the request asks for its prompt and no output: `max_tokens` 0, which only an echo may have."""
    return (body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens) == 0


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """The defaults of an endpoint. `may_only_echo`: whether `max_tokens` may be 0; then one token is generated."""

    max_tokens: int
    temperature: float
    may_only_echo: bool = False


def _params(
    body: GenerationFields,
    card: ModelCard,
    endpoint: _Endpoint,
    logprobs: tuple[int | None, int | None],
    draw_seed: SeedSource,
) -> SamplingParams:
    """Returns the checked sampling parameters. `logprobs`: of the output and of the prompt."""
    max_tokens = 1 if endpoint.may_only_echo and _only_echoes(body) else _max_tokens(body, card, endpoint.max_tokens)
    constraints = token_constraints(body)
    params = sampling_params(
        body,
        max_tokens=max_tokens or card.max_model_len,
        temperature=given(body.temperature, endpoint.temperature),
        # A top_k above the vocabulary size means all tokens; clamped, it fits into a message.
        top_k=min(given(body.top_k, -1), card.vocab_size),
        seed=draw_seed() if body.seed is None else body.seed,
        logprobs=logprobs[0],
        prompt_logprobs=logprobs[1],
        logit_bias=constraints.logit_bias,
        allowed_token_ids=constraints.allowed_token_ids,
        bad_words=constraints.bad_words,
    )
    sampling.check(params)
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
    if value > card.max_model_len:
        message = f"'{name}' must not exceed the model's context length of {card.max_model_len} tokens."
        raise ServiceError("context_length_exceeded", message, param=name)
    return value


def _request(
    body: GenerationFields, card: ModelCard, request_id: str, params: SamplingParams, num_prompts: int
) -> GenerationRequest:
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "needs 'stream' to be true")
    choices = choices_of(body, params.temperature, params.top_k, num_prompts)
    if choices.beam is not None:
        if _only_echoes(body):
            refuse("max_tokens", "must be at least 1 with 'use_beam_search'")
        params = msgspec.structs.replace(params, beam=choices.beam)
        sampling.check_beam(params)
    _check_stream(body, params, choices)
    stop, detokenize = rules.stop_strings(body.stop), given(body.detokenize, True)
    rules.check_detokenize(detokenize, stop)
    if body.echo and not detokenize:
        refuse("echo", "needs text: leave 'detokenize' at its default")
    return GenerationRequest(
        request_id=request_id,
        model=card.name,
        params=params,
        n=choices.n,
        best_of=choices.num_sequences,
        stop=stop,
        include_stop_str_in_output=given(body.include_stop_str_in_output, False),
        skip_special_tokens=given(body.skip_special_tokens, True),
        spaces_between_special_tokens=given(body.spaces_between_special_tokens, True),
        detokenize=detokenize,
        truncate_prompt_tokens=rules.prompt_truncation(body.truncate_prompt_tokens, card.max_model_len),
        cache_salt=_cache_salt(body),
        priority=check_priority(body.priority),
        service_tier=check_tier(body.service_tier),
        bad_word_texts=token_constraints(body).bad_word_texts,
        timeout_s=_timeout_s(body),
    )


def _check_stream(body: GenerationFields, params: SamplingParams, choices: Choices) -> None:
    """Raises ServiceError if an answer is to be streamed that is made only at the end."""
    causes = {
        "'use_beam_search'": choices.beam is not None,
        "'best_of' greater than 'n'": choices.num_sequences > choices.n,
        "log probabilities of the prompt": params.prompt_logprobs is not None,
        "'max_tokens' 0": _only_echoes(body),
    }
    for cause, applies in causes.items():
        if body.stream and applies:
            refuse("stream", f"must be false with {cause}")


def _cache_salt(body: GenerationFields) -> bytes:
    salt = body.cache_salt
    if salt is None:
        return b""
    if not 1 <= len(salt) <= limits.CACHE_SALT_CHARS_MAX:
        refuse("cache_salt", f"must have between 1 and {limits.CACHE_SALT_CHARS_MAX} characters")
    return salt.encode()


def check_priority(value: int | None) -> int:
    """Returns a request's priority, 0 by default. Raises ServiceError if it does not fit into a message."""
    priority = given(value, 0)
    if not -_INT32 <= priority < _INT32:
        refuse("priority", "must be a 32-bit integer")
    return priority


def check_tier(value: str | None) -> str:
    """Returns the tier that an answer names, empty without one. Raises ServiceError for an unknown tier."""
    if value is not None and value not in _TIERS:
        refuse("service_tier", f"must be one of {', '.join(_TIERS)}")
    return "" if value is None else FLEX if value == FLEX else "default"


def _timeout_s(body: GenerationFields) -> float:
    if body.timeout is None:
        return 0.0
    if body.timeout <= 0:
        refuse("timeout", "must be a number of seconds above 0")
    return body.timeout
