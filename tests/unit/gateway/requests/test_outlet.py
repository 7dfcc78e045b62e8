"""New output of a request reaches its consumer in order and once."""

import asyncio
import itertools
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.gateway.path.generation import GenerationRequest
from antiphon.services.gateway.path.requests.request_actor import RequestActor
from antiphon.services.gateway.path.sequence_state import Address, SequenceState
from antiphon.shared.errors import ServiceError
from antiphon.shared.messages import TextEvent
from antiphon.shared.parameters.sampling import SamplingParams
from tests.unit.gateway.bodies import CARD

ENGINE, DETOKENIZER = Address("e", "1"), Address("d", "1")


class Request:
    """A request actor with one running sequence, whose other parts do nothing, and the consumer of its updates."""

    def __init__(self) -> None:
        parts = MagicMock()
        parts.clients = AsyncMock()
        parts.host.clock.monotonic.return_value = 0.0
        request = GenerationRequest(request_id="r", model=CARD.name, params=SamplingParams())
        self.actor = RequestActor(parts, request, CARD, 1, lambda: None)
        sequence = SequenceState(sequence_id="r-0")
        sequence.start_placement(ENGINE, DETOKENIZER, 0.0)
        prompt = SimpleNamespace(num_tokens=3, block_hashes=b"")
        messages = SimpleNamespace(
            request=request, card=CARD, idle_until=0.0, prompts=[prompt], sequences=[sequence], prompt=lambda _: prompt
        )
        self.actor.tokenized(messages, 3)  # type: ignore[arg-type]
        sequence.accepted(0.0)
        self.has_room = True
        self.read: list[list[int]] = []
        self._next = itertools.count()

    def add(self, *, last: bool = False) -> None:
        """The next token arrives."""
        number = next(self._next)
        event = TextEvent(
            sequence_id="r-0",
            attempt=1,
            position=number,
            token_ids=(number,),
            text_offset=number,
            text="x",
            finish_reason="length" if last else None,
        )
        self.actor.on_text(0, event, ENGINE)

    async def consume(self) -> None:
        """Reads to the end."""
        async for batch in self.actor.updates():
            self.read.append([number for update in batch for number in update.token_ids])
            while not self.has_room:
                await asyncio.sleep(0)


async def passes(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_arrives_together_or_while_there_is_no_room_is_one_batch():
    request = Request()
    consumer = asyncio.create_task(request.consume())
    await passes()
    request.add()
    await passes()
    request.has_room = False
    request.add()
    request.add()
    await passes()
    request.add()
    await passes()
    request.add(last=True)
    request.has_room = True
    await consumer
    assert request.read == [[0], [1, 2], [3, 4]]


async def test_output_before_an_error_is_delivered():
    request = Request()
    consumer = asyncio.create_task(request.consume())
    await passes()
    request.add()
    request.actor.fail(ServiceError("timeout", "late"))
    with pytest.raises(ServiceError, match="late"):
        await consumer
    assert request.read == [[0]]


async def test_text_that_contradicts_what_the_client_has_is_told_of_its_sender():
    request = Request()
    consumer = asyncio.create_task(request.consume())
    request.add()
    request.actor.on_text(
        0, TextEvent(sequence_id="r-0", attempt=1, position=0, token_ids=(7,), text_offset=0, text="y"), ENGINE
    )
    with pytest.raises(ServiceError, match="The detokenizer d sent text of the engine e that contradicts") as failure:
        await consumer
    assert failure.value.code == "internal_error"


def test_text_of_a_sequence_comes_from_its_detokenizer_only():
    async def main() -> None:
        actor = Request().actor
        assert actor.placements.has_stream(0, DETOKENIZER)
        assert not actor.placements.has_stream(0, Address("d", "2"))
        assert not actor.placements.has_stream(0, Address("d2", "1"))

    asyncio.run(main())


STEPS = st.lists(st.sampled_from(["add", "add", "pass", "full", "room"]), max_size=40)


@given(STEPS)
def test_output_arrives_in_order_and_once(steps: list[str]):
    async def run() -> list[int]:
        request = Request()
        consumer = asyncio.create_task(request.consume())
        for step in steps:
            if step == "add":
                request.add()
            elif step == "pass":
                await asyncio.sleep(0)
            else:
                request.has_room = step == "room"
        request.has_room = True
        request.add(last=True)
        await consumer
        return [number for batch in request.read for number in batch]

    assert asyncio.run(run()) == [*range(steps.count("add") + 1)]
