"""A request that has ended is freed at once, without the garbage collector."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.path.generation import GenerationRequest, GuestOptions, PromptInputs
from antiphon.shared.parameters.sampling import SamplingParams
from tests.sim.society import Society
from tests.sim.test_society import model_dir, simulate

__all__ = ["model_dir"]
REQUEST = GenerationRequest(
    request_id="r",
    model="",
    params=SamplingParams(max_tokens=8, temperature=0.0),
    inputs=PromptInputs(token_ids=((65, 66, 67),)),
)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("end", ["complete", "cancelled", "cancelled early", "unknown engine"])
def test_an_ended_request_is_freed_without_the_garbage_collector(model_dir, end: str) -> None:
    async def scenario(society: Society) -> None:
        actor = society.members["gateway0"].service.actor
        request = actor.backend.generate(
            replace(REQUEST, n=2, best_of=2, guests=GuestOptions(engine="other" if end == "unknown engine" else ""))
        )
        freed = weakref.ref(request)
        if end == "cancelled early":
            await request.cancel("abort")
        try:
            async for _ in request.updates():
                if end == "cancelled":
                    await request.cancel("abort")
        except Exception as error:
            error.__traceback__ = None
        del request
        await asyncio.sleep(1)
        assert freed() is None

    simulate(model_dir, scenario)
