"""Runs a recorded request again and compares its tokens with the recorded ones."""

from typing import Any

from antiphon.services.gateway.edge.access.call import new_id
from antiphon.services.gateway.guests.replay.rerun import forked, whole
from antiphon.services.gateway.path.generation import Backend, GenerationRequest, ModelCard, SequenceUpdate
from antiphon.shared import limits
from antiphon.shared.recorded_request import RecordedContent, first_difference


async def replay(
    backend: Backend, content: RecordedContent, request_id: str, card: ModelCard, engine: str = ""
) -> dict[str, Any]:
    """Returns the answer of `POST /v1/requests/{id}/replay`. Raises ServiceError if the request cannot run.

    For the first position at which a sequence differs, the answer has both tokens with their texts and log
    probabilities. To get these log probabilities, a further request computes one token after the recorded tokens before
    that position. It runs on the engine `engine` if this is given.
    """
    tokens = await _tokens(backend, whole(content, card, request_id, engine), len(content.sequences))
    sequences: list[dict[str, Any]] = []
    for index, (recorded, now) in enumerate(zip(content.sequences, tokens, strict=True)):
        position = first_difference(recorded, now)
        found: dict[str, Any] = {"index": index, "equal": position is None, "num_tokens": len(recorded.token_ids)}
        if position is not None:
            here = recorded.token_ids[position : position + 1], now[position : position + 1]
            found |= await _difference(backend, content, card, index, position, here, engine)
        sequences.append(found)
    return {
        "object": "request.replay",
        "id": content.request_id,
        "replay_id": request_id,
        "equal": all(one["equal"] for one in sequences),
        "model": {"recorded": content.path, "now": card.path},
        "configuration": {"recorded": content.configuration, "now": list(card.configuration)},
        "sequences": sequences,
    }


async def _tokens(backend: Backend, request: GenerationRequest, count: int) -> list[list[int]]:
    """Returns the tokens of each sequence, including those with which it begins (`begun`)."""
    found = [list(request.guests.begun) for _ in range(count)]
    for update in await _updates(backend, request):
        found[update.index].extend(update.token_ids)
    return found


async def _updates(backend: Backend, request: GenerationRequest) -> list[SequenceUpdate]:
    generation, reason, found = backend.generate(request), "error", list[SequenceUpdate]()
    try:
        async for batch in generation.updates():
            found.extend(batch)
        reason = "stop"
    finally:
        await generation.cancel(reason)
    return found


async def _difference(
    backend: Backend,
    content: RecordedContent,
    card: ModelCard,
    index: int,
    position: int,
    tokens: tuple[list[int], list[int]],
    engine: str,
) -> dict[str, Any]:
    """Describes a difference. A sequence that ended there has no token, and a beam search has no probabilities."""
    logprobs: dict[int, float] = {}
    if content.params.beam is None:
        logprobs = await _logprobs(backend, content, card, index, position, engine)
    sides: list[dict[str, Any] | None] = []
    for side in tokens:
        if not side:
            sides.append(None)
            continue
        text = await backend.detokenize(content.model, (side[0],))
        sides.append({"token_id": side[0], "text": text, "logprob": logprobs.get(side[0])})
    values = [None if one is None else one["logprob"] for one in sides]
    gap = abs(values[0] - values[1]) if values[0] is not None and values[1] is not None else None
    return {"position": position, "recorded": sides[0], "replayed": sides[1], "logprob_gap": gap}


async def _logprobs(
    backend: Backend,
    content: RecordedContent,
    card: ModelCard,
    index: int,
    position: int,
    engine: str,
) -> dict[int, float]:
    """Returns the log probabilities of the likeliest tokens at a position, after the recorded tokens before it."""
    changes = {"max_tokens": position + 1, "min_tokens": 0, "logprobs": limits.LOGPROBS_MAX, "temperature": 0.0}
    request = forked(content, card, new_id(), index=index, position=position, changes=changes, engine=engine)
    found: dict[int, float] = {}
    for update in await _updates(backend, request):
        for one in update.logprobs:
            found |= {top.token_id: top.logprob for top in (one.chosen, *one.top)}
    return found
