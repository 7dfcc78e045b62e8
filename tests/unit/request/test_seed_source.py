"""Seeds of requests that bring none."""

import pytest

from antiphon.services.gateway.apis.openai import schemas
from antiphon.services.gateway.apis.openai.bodies import parameters
from antiphon.services.gateway.apis.openai.chat import generation_request
from antiphon.services.gateway.apis.openai.completions import completion_request
from antiphon.shared.request.sampling_fields import random_seed, seeds_of
from tests.unit.gateway.bodies import CARD


@pytest.mark.spec("S-SRV-031")
def test_without_a_seed_of_the_server_no_two_requests_have_the_same() -> None:
    assert seeds_of(None) is random_seed
    drawn = {random_seed() for _ in range(100)}
    assert len(drawn) == 100
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.spec("S-SRV-031")
def test_with_a_seed_of_the_server_each_run_draws_the_same_and_each_request_another() -> None:
    first, again, other = seeds_of(0), seeds_of(0), seeds_of(1)
    drawn = [first() for _ in range(50)]
    assert drawn == [again() for _ in range(50)]
    assert len(set(drawn) | {other() for _ in range(50)}) == 100
    assert all(0 <= seed < 2**63 for seed in drawn)


@pytest.mark.spec("S-SRV-031")
def test_a_request_with_a_seed_keeps_it_and_takes_none_from_the_others() -> None:
    draw, reference = seeds_of(5), seeds_of(5)
    bodies = [schemas.CompletionBody(prompt="x", seed=seed) for seed in (None, 9, None)]
    seeds = [
        completion_request(body, CARD, "r", parameters.RequestDefaults(draw_seed=draw)).params.seed for body in bodies
    ]
    assert seeds == [reference(), 9, reference()]
    body = schemas.CHAT_DECODER.decode(b'{"messages": [{"role": "user", "content": "x"}]}')
    assert generation_request(body, CARD, "r", parameters.RequestDefaults(draw_seed=draw)).params.seed == reference()
