"""Which requests run in the idle lane, and for how long."""

from typing import Any, cast

import pytest
from msgspec.structs import replace

from antiphon.services.gateway.apis.openai.bodies.parameters import check_tier
from antiphon.services.gateway.edge.access.call import Call, serving
from antiphon.services.gateway.edge.access.guard import GuardedBackend
from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.sampling import SamplingParams

REQUEST = GenerationRequest(request_id="r", model="m", params=SamplingParams(), inputs=PromptInputs(texts=("hi",)))


class Backend:
    def __init__(self) -> None:
        self.request: GenerationRequest | None = None

    def generate(self, request: GenerationRequest) -> Any:
        self.request = request
        raise ServiceError("no_engine", "enough")


async def guarded(request: GenerationRequest, call: Call, timeout_max_s: float = 0.0) -> GenerationRequest:
    """The request as the guard passes it on."""
    backend = Backend()
    with serving(call):
        generation = GuardedBackend(cast(Any, backend), cast(Any, None), cast(Any, None), timeout_max_s).generate(
            request
        )
    with pytest.raises(ServiceError, match="enough"):
        async for _ in generation.updates():
            pass
    assert backend.request is not None
    return backend.request


async def test_only_what_asks_for_it_and_batches_are_idle_work() -> None:
    flex = replace(REQUEST, service_tier=check_tier("flex"))
    assert (await guarded(REQUEST, Call())).guests.idle_s == 0
    assert (await guarded(replace(REQUEST, service_tier=check_tier("priority")), Call())).guests.idle_s == 0
    assert (await guarded(flex, Call())).guests.idle_s == limits.IDLE_S
    assert (await guarded(REQUEST, Call(lane="idle"))).guests.idle_s == limits.IDLE_S
    assert (await guarded(REQUEST, Call(in_batch=True, idle_s=70_000.0))).guests.idle_s == 70_000
    assert (await guarded(flex, Call(in_batch=True))).guests.idle_s == 0, "the end of the batch is near"


async def test_with_a_timeout_a_request_gives_way_for_half_of_it_at_most() -> None:
    flex = replace(REQUEST, service_tier="flex")
    assert (await guarded(replace(flex, timeout_s=40.0), Call())).guests.idle_s == 20
    assert (await guarded(flex, Call(timeout="10"))).guests.idle_s == 5
    assert (await guarded(flex, Call(), timeout_max_s=60.0)).guests.idle_s == 30


def test_unknown_lanes_and_tiers_are_refused() -> None:
    backend = GuardedBackend(cast(Any, Backend()), cast(Any, None), cast(Any, None))
    with serving(Call(lane="fast")), pytest.raises(ServiceError, match="'X-Antiphon-Lane' must be 'idle'"):
        backend.generate(REQUEST)
    with pytest.raises(ServiceError, match="'service_tier' must be one of auto, default, flex, priority, scale"):
        check_tier("cheap")
    assert [check_tier(tier) for tier in (None, "auto", "default", "flex")] == ["", "default", "default", "flex"]
