"""Recorded requests run again, in virtual time."""

import asyncio

import pytest
from msgspec.structs import replace

from antiphon.operate import offline_replay
from antiphon.services.gateway.guests.replay.comparison import replay
from antiphon.services.gateway.guests.replay.content import content_of
from antiphon.services.gateway.guests.replay.rerun import forked, whole
from antiphon.services.gateway.ops.timeline.recorder import Recorder
from antiphon.services.gateway.ops.timeline.request_record import RequestRecord
from antiphon.services.gateway.path.generation import GenerationRequest, GuestOptions, Origin, PromptInputs
from antiphon.services.gateway.path.messages import Prompt
from antiphon.services.gateway.path.record import RequestFacts
from antiphon.services.gateway.path.sequence_state import SequenceState
from antiphon.shared.codec import pack_ids
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.parameters.sampling import SamplingParams
from antiphon.shared.recorded_request import RecordedContent, decode
from antiphon.shared.request.images import ImageInput
from tests.sim.society import Society
from tests.sim.test_society import model_dir, simulate
from tests.unit.gateway.bodies import CARD

__all__ = ["model_dir"]
REQUEST = GenerationRequest(
    request_id="r",
    model="",
    params=SamplingParams(max_tokens=20, temperature=0.0),
    inputs=PromptInputs(token_ids=((65, 66),)),
)


def record() -> RequestRecord:
    begun = Recorder(4, content_bytes=1 << 20).begin(RequestFacts(request_id="r", model="", key=""), 0.0)
    assert isinstance(begun, RequestRecord)
    return begun


@pytest.mark.parametrize("begun", [(), (70, 71)], ids=["whole", "forked"])
def test_what_was_recorded_is_equal_when_it_runs_again(model_dir, begun):
    async def scenario(society: Society) -> None:
        kept = record()
        answer = await society.ask(replace(REQUEST, guests=GuestOptions(begun=begun), origin=Origin(record=kept)))
        assert answer.error is None, answer.error
        actor, content = society.members["gateway0"].service.actor, decode(kept.data)
        assert content.sequences[0].token_ids == [*begun, *answer.token_ids[0]]
        found = await replay(actor.backend, content, "again", actor.backend.resolve_model(""))
        assert found["equal"], found
        assert found["sequences"] == [{"index": 0, "equal": True, "num_tokens": 20}]

    simulate(model_dir, scenario)


def test_a_request_for_one_engine_runs_there_or_not_at_all(model_dir):
    async def scenario(society: Society) -> None:
        while "engine1" not in {beat.id for beat in society.members["gateway0"].service.actor.engines()}:
            await asyncio.sleep(0.01)
        for number in range(3):
            kept = record()
            answer = await society.ask(
                replace(
                    REQUEST, request_id=f"r{number}", guests=GuestOptions(engine="engine1"), origin=Origin(record=kept)
                )
            )
            assert answer.error is None, answer.error
            assert decode(kept.data).sequences[0].engines == ["engine1"]
        error = (await society.ask(replace(REQUEST, guests=GuestOptions(engine="engine9")))).error
        assert error is not None
        assert (error.code, error.param) == ("no_engine", "engine")
        assert error.message.startswith("No engine 'engine9' of the model ")

    simulate(model_dir, scenario, engine=2)


def recorded(**fields) -> RecordedContent:
    prompt = Prompt(packed=pack_ids([65, 66]), block_hashes=b"")
    return decode(
        content_of(replace(REQUEST, **fields), CARD, [prompt], [SequenceState(sequence_id="r", num_prompt_logprobs=0)])
    )


def test_a_request_with_images_cannot_run_again():
    content = recorded(inputs=PromptInputs(images=(ImageInput("messages[0].content[0].image_url", b"x"),)))
    for run in (lambda: whole(content, CARD, "again"), lambda: forked(content, CARD, "again", index=0, position=0)):
        with pytest.raises(ServiceError, match="has images, whose files are not recorded"):
            run()
    with pytest.raises(SettingsError, match="has images"):
        offline_replay.replay(content, "demo")


def test_a_fork_does_not_run_again_without_a_server():
    with pytest.raises(SettingsError, match="leave --model out"):
        offline_replay.replay(recorded(guests=GuestOptions(begun=(70,))), "demo")
