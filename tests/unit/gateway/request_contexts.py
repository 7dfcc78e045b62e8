"""Exchanges and updates for the tests of answers."""

from collections.abc import AsyncIterator
from typing import Any

from antiphon.services.gateway.apis.openai.answers.answer_encoder import GenerationState
from antiphon.services.gateway.apis.openai.answers.choices import ChoiceAccumulator
from antiphon.services.gateway.apis.openai.request_context import Arrival, Kind, RequestContext
from antiphon.services.gateway.path.generation import (
    GenerationRequest,
    PromptInputs,
    RequestTimes,
    SequenceUpdate,
    TokenCounts,
)
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared.messages import ChatMessage, PositionLogprobs, TokenText
from antiphon.shared.parameters.sampling import SamplingParams
from tests.unit.gateway.bodies import CARD

ID = "A" * 22


def context(
    kind: Kind = "chat",
    *,
    n: int = 1,
    prompts: int = 1,
    stream: bool = True,
    include_usage: bool = False,
    echoes: tuple[str, ...] = (),
    logprobs: int | None = None,
    return_token_ids: bool = False,
    **options: Any,
) -> RequestContext:
    """An context of id `AAA…` that came at second 1700000000."""
    params = SamplingParams(logprobs=logprobs)
    said = (ChatMessage(role="user", content="hi"),)
    asked = PromptInputs(messages=said) if kind == "chat" else PromptInputs(texts=("hi",) * prompts)
    return RequestContext(
        kind=kind,
        arrival=Arrival(1_700_000_000, 0.0),
        card=CARD,
        request=GenerationRequest(request_id=ID, model=CARD.name, params=params, n=n, inputs=asked),
        stream=stream,
        include_usage=include_usage,
        echoes=echoes or ("",) * prompts,
        return_token_ids=return_token_ids,
        **options,
    )


class Finished:
    """What an encoder needs of a generation with one prompt of three tokens."""

    def __init__(self, times: RequestTimes) -> None:
        self.num_prompt_tokens, self.prompt_token_ids = 3, [[1, 2, 3]]
        self.times = times
        self.token_counts, self.prompt_tail = TokenCounts(3, 0, 3, 0), ""
        self.outputs: list[SequenceState] = []

    def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        raise NotImplementedError

    async def cancel(self, reason: str, cause: str = "") -> None:
        pass


def state(accumulator: ChoiceAccumulator, times: RequestTimes | None = None) -> GenerationState:
    """A generation that was placed after 1 s, had its first token after 3 s and its last one after 7 s."""
    return GenerationState(
        accumulator=accumulator,
        num_prompt_tokens=3,
        generation=Finished(times or RequestTimes(0.5, 1.0)),
        time_to_first_token_s=3.0,
        time_to_last_token_s=7.0,
        elapsed_s=8.0,
    )


def update(text: str = "", index: int = 0, **fields: Any) -> SequenceUpdate:
    """An update of one token."""
    return SequenceUpdate(index=index, text=text, **{"token_ids": (1,), **fields})


def position(token: str, logprob: float, *top: tuple[str, float]) -> PositionLogprobs:
    """The log probabilities of one token."""

    def text(token: str, logprob: float) -> TokenText:
        return TokenText(1, token, token.encode(), logprob)

    return PositionLogprobs(text(token, logprob), tuple(text(*one) for one in top))
