"""Makes requests from recorded ones. Pure."""

from typing import Any

import msgspec

from antiphon.services.gateway.path.generation import (
    GenerationRequest,
    GuestOptions,
    ModelCard,
    OutputText,
    PromptInputs,
)
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import SamplingParams, check
from antiphon.shared.recorded_request import RecordedContent
from antiphon.shared.request.checks import refuse
from antiphon.shared.request.choices import choice_params


def whole(content: RecordedContent, card: ModelCard, request_id: str, engine: str = "") -> GenerationRequest:
    """Returns the recorded request as a new one. Raises ServiceError if it cannot run again (`check_repeatable`)."""
    check_repeatable(content, card)
    params = content.params
    if len(content.prompts) == 1 and not params.max_tokens:
        # As many tokens as fitted when the request was recorded.
        room = content.max_model_len - len(content.prompts[0].token_ids)
        params = msgspec.structs.replace(params, max_tokens=max(1, room))
    return GenerationRequest(
        **_common(content, card, request_id),
        params=_with_ends(params, content.prompts[0].end_token_ids),
        inputs=PromptInputs(token_ids=tuple(tuple(prompt.token_ids) for prompt in content.prompts)),
        n=content.n,
        best_of=content.num_sequences,
        guests=GuestOptions(begun=tuple(content.begun), engine=engine),
    )


def forked(
    content: RecordedContent,
    card: ModelCard,
    request_id: str,
    *,
    index: int,
    position: int,
    token_id: int | None = None,
    changes: dict[str, Any] | None = None,
    engine: str = "",
) -> GenerationRequest:
    """Returns a request whose output begins with `position` tokens of sequence `index`, then `token_id` if given.

    Without changes the request continues exactly as the recorded one did, because token positions and seed are the
    same. Raises ServiceError for an index, a position or parameters that are not possible.
    """
    check_repeatable(content, card)
    if content.params.beam is not None:
        refuse("position", "cannot be chosen in a beam search, whose sequences depend on each other")
    if not 0 <= index < len(content.sequences):
        refuse("index", f"must be between 0 and {len(content.sequences) - 1}")
    recorded = content.sequences[index].token_ids
    if not 0 <= position <= len(recorded):
        refuse("position", f"must be between 0 and {len(recorded)}, the number of tokens that were recorded")
    begun = tuple(recorded[:position]) + (() if token_id is None else (token_id,))
    if token_id is not None and not 0 <= token_id < card.vocab_size:
        refuse("token_id", f"must be between 0 and {card.vocab_size - 1}")
    prompt = content.prompts[index // content.num_sequences]
    room = card.max_model_len - len(prompt.token_ids)
    params = choice_params(content.params, index % content.num_sequences).within(room)
    params = msgspec.structs.replace(params, prompt_logprobs=None, **(changes or {}))
    check(params)
    if len(begun) >= params.max_tokens:
        message = f"must be greater than {len(begun)}, the number of tokens that the output begins with"
        refuse("max_tokens", message)
    return GenerationRequest(
        **_common(content, card, request_id),
        params=_with_ends(params, prompt.end_token_ids),
        inputs=PromptInputs(token_ids=(tuple(prompt.token_ids),)),
        guests=GuestOptions(begun=begun, engine=engine),
    )


def _common(content: RecordedContent, card: ModelCard, request_id: str) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "model": card.name,
        "output": OutputText(
            stop=tuple(content.stop),
            include_stop_str_in_output=content.include_stop_str_in_output,
            skip_special_tokens=content.skip_special_tokens,
            spaces_between_special_tokens=content.spaces_between_special_tokens,
            detokenize=content.detokenize,
            shown_special_tokens=tuple(content.shown_special_tokens),
        ),
    }


def _with_ends(params: SamplingParams, end_token_ids: list[int]) -> SamplingParams:
    return msgspec.structs.replace(params, end_token_ids=tuple(end_token_ids))


def check_repeatable(content: RecordedContent, card: ModelCard) -> None:
    """Raises ServiceError if the request cannot run again: it has images, or its adapter was replaced."""
    if content.num_images:
        message = (
            "The request has images, whose files are not recorded: it cannot run again. Send it as it was sent then."
        )
        raise ServiceError("unsupported_parameter", message)
    if content.adapter_version != card.adapter_version:
        message = (
            f"The adapter {content.model!r} was replaced since the request ran, or is not loaded: it cannot be equal."
        )
        raise ServiceError("invalid_value", message, param="model")
