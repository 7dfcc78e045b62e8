"""Copies of requests on another version, in virtual time: what is equal counts as equal, however the output began."""

import asyncio

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.guests.shadow.guest import Comparison, ShadowTraffic
from antiphon.services.gateway.path.generation import GenerationRequest, GuestOptions, PromptInputs, ResumedOutput
from antiphon.shared import limits
from antiphon.shared.deployment.model_versions import ModelState, ModelStates, ModelVersion
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.request.images import ImageInput
from tests.sim.society import Society
from tests.sim.test_society import expected, model_dir, simulate

__all__ = ["model_dir"]
PROMPT, COUNT = "one of many", 20
PLAIN = GenerationRequest(
    request_id="plain",
    model="",
    params=SamplingParams(max_tokens=COUNT, temperature=0.0),
    inputs=PromptInputs(token_ids=(tuple(PROMPT.encode()),)),
)


async def compared(society: Society, request: GenerationRequest) -> Comparison | None:
    """Returns what the copy of a request gave, on the only version there is; None if there was no copy."""
    actor = society.members["gateway0"].service.actor
    card = actor.backend.resolve_model("")
    versions = tuple(
        ModelVersion(number=number, directory="", state="ready", created=0, share=number - 1.0) for number in (1, 2)
    )
    actor.versions._use(ModelStates(1, (ModelState(name=card.name, active=1, versions=versions),)))
    shadow = society.members["gateway0"].service.guests[ShadowTraffic]
    shadow._find_card = lambda _: card
    answer = await society.ask(request)
    assert answer.error is None, answer.error
    await asyncio.sleep(5)
    return shadow.comparisons.get((card.name, 2))


def resumed(tokens: list[int]) -> ResumedOutput:
    return ResumedOutput(token_ids=(tuple(tokens),), cumulative_logprobs=(0.0,), num_cached_tokens=(None,), fence=1)


@pytest.mark.parametrize(
    "request_",
    [
        PLAIN,
        replace(PLAIN, guests=GuestOptions(begun=(65, 66, 67))),
        replace(PLAIN, guests=GuestOptions(resumed=resumed(expected(PROMPT, 7)))),
    ],
    ids=["plain", "forked", "resumed"],
)
def test_a_copy_of_the_same_model_is_equal(model_dir, request_):
    async def scenario(society: Society) -> None:
        found = await compared(society, request_)
        assert found == Comparison(equal=1)

    simulate(model_dir, scenario)


def test_a_resumed_request_is_computed_from_its_beginning(model_dir):
    async def scenario(society: Society) -> None:
        wrong = [*expected(PROMPT, 6), 65]
        found = await compared(society, replace(PLAIN, guests=GuestOptions(resumed=resumed(wrong))))
        assert found == Comparison(different=1, position=6, request_id="plain")

    simulate(model_dir, scenario)


def test_a_request_with_images_has_no_copy(model_dir):
    async def scenario(society: Society) -> None:
        actor = society.members["gateway0"].service.actor
        await compared(society, PLAIN)
        shadow = society.members["gateway0"].service.guests[ShadowTraffic]
        ended = actor.backend.start_alone(replace(PLAIN, request_id="other"), actor.backend.resolve_model(""))
        async for _ in ended.updates():
            pass
        ended.request = replace(ended.request, inputs=PromptInputs(images=(ImageInput("messages[0]", b"x"),)))
        shadow.served(ended)
        await asyncio.sleep(2 * limits.IMAGE_ENCODE_S)
        assert list(shadow.comparisons.values()) == [Comparison(equal=1)]

    simulate(model_dir, scenario)
