"""Makes the request that continues a session: a cut output goes on, or a next turn follows it."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from antiphon.services.gateway.guests.replay.rerun import check_repeatable, forked
from antiphon.services.gateway.guests.sessions.schemas import ContinueBody, TurnMessage
from antiphon.services.gateway.path.generation import Backend, GenerationRequest, ModelCard, PromptInputs
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import ChatMessage
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.recorded_request import RecordedContent, RecordedPrompt, RecordedSequence, changed
from antiphon.shared.request.checks import check_token_ids, refuse
from antiphon.shared.request.choices import choice_params

_PARAMS = SamplingParams(max_tokens=1)
_PROBE = (ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b"))


async def continuing(
    content: RecordedContent,
    card: ModelCard,
    request_id: str,
    body: ContinueBody,
    changes: dict[str, Any],
    *,
    backend: Backend,
) -> GenerationRequest:
    """Returns the request. Raises ServiceError if the session cannot go on as the body asks."""
    check_repeatable(content, card)
    index = body.index or 0
    if not 0 <= index < len(content.sequences):
        refuse("index", f"must be between 0 and {len(content.sequences) - 1}")
    output = content.sequences[index]
    if body.messages is not None and body.prompt is not None:
        refuse("prompt", "cannot be given together with 'messages'")
    if body.messages is None and body.prompt is None:
        if output.finish_reason == "stop":
            message = "The output has ended by itself: give 'messages' or 'prompt', which the next output answers."
            raise ServiceError("invalid_value", message, param="messages")
        num_tokens = len(output.token_ids)
        return forked(content, card, request_id, index=index, position=num_tokens, changes=changes)
    if body.messages is not None:
        turn = await _turn(body.messages, output.token_ids, card, request_id, backend)
    else:
        turn = await _text(body.prompt or [], card, request_id, backend)
    return forked(_next_turn(content, card, index, turn), card, request_id, index=0, position=0, changes=changes)


def _next_turn(content: RecordedContent, card: ModelCard, index: int, turn: Sequence[int]) -> RecordedContent:
    """Returns a session whose prompt is the former one with its output and the next turn."""
    former = content.prompts[index // content.num_sequences]
    token_ids = [*former.token_ids, *content.sequences[index].token_ids, *turn]
    room = card.max_model_len - len(token_ids)
    if room < 1:
        message = f"The session and its next turn have {len(token_ids)} tokens; the context has {card.max_model_len}."
        raise ServiceError("context_length_exceeded", message, param="messages")
    return changed(
        content,
        params=replace(choice_params(content.params, index % content.num_sequences), beam=None),
        n=1,
        num_sequences=1,
        begun=[],
        prompts=[RecordedPrompt(token_ids, former.end_token_ids)],
        sequences=[RecordedSequence([])],
    )


async def _text(prompt: str | list[int], card: ModelCard, request_id: str, backend: Backend) -> list[int]:
    if not prompt:
        refuse("prompt", "must not be empty")
    if isinstance(prompt, str):
        inputs = PromptInputs(texts=(prompt,), add_special_tokens=False)
        return await _tokens(inputs, card, request_id, backend)
    check_token_ids(prompt, card.vocab_size, "prompt")
    return prompt


async def _turn(
    messages: list[TurnMessage], output: list[int], card: ModelCard, request_id: str, backend: Backend
) -> list[int]:
    """Returns what a chat template puts between an answer and the next one, for these messages.

    The tokens of the session are kept as they are: what is new is found by rendering the messages after a short
    conversation, without the tokens of that conversation.
    """
    if not messages:
        refuse("messages", "must not be empty")
    said = tuple(ChatMessage(role=one.role, content=one.content) for one in messages)
    begun = PromptInputs(messages=_PROBE, add_generation_prompt=False, continue_final_message=True)
    before = await _tokens(begun, card, request_id, backend)
    after = await _tokens(PromptInputs(messages=(*_PROBE, *said)), card, request_id, backend)
    if after[: len(before)] != before:
        refuse("messages", "cannot follow an answer with this chat template: give the text as 'prompt'")
    turn = after[len(before) :]
    # What ends an answer in the template is often the token that has ended the output.
    return turn[1:] if output and turn and output[-1] == turn[0] else turn


async def _tokens(inputs: PromptInputs, card: ModelCard, request_id: str, backend: Backend) -> list[int]:
    request = GenerationRequest(request_id=request_id, model=card.name, params=_PARAMS, inputs=inputs)
    return (await backend.tokenize(request, return_tokens=False))[0][0]
