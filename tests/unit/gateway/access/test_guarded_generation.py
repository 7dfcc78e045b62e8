"""The tokens that are reserved for a request before its true number of tokens is known."""

from typing import Any

from msgspec.structs import replace

from antiphon.services.gateway.edge.access.guard import estimated_tokens
from antiphon.services.gateway.path.generation import GenerationRequest, PromptInputs
from antiphon.shared import limits
from antiphon.shared.codec import pack_ids
from antiphon.shared.messages import ChatMessage
from antiphon.shared.parameters.pooling import PoolingParams
from antiphon.shared.parameters.sampling import SamplingParams


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        model="m",
        params=SamplingParams(max_tokens=10),
        inputs=PromptInputs(texts=("12345678",)),
        **fields,
    )


def test_every_sequence_that_is_computed_counts_with_its_output():
    assert estimated_tokens(request()) == 2 + 10
    assert estimated_tokens(request(n=2)) == 2 + 2 * 10
    assert estimated_tokens(request(n=2, best_of=3)) == 2 + 3 * 10
    unlimited = GenerationRequest(
        request_id="r", model="m", params=SamplingParams(max_tokens=0), inputs=PromptInputs(token_ids=((1, 2, 3),))
    )
    assert estimated_tokens(unlimited) == 3 + limits.OUTPUT_ESTIMATE_TOKENS


def test_everything_of_a_prompt_counts():
    def estimated(n: int = 1, **fields: Any) -> int:
        return estimated_tokens(replace(request(n=n), inputs=PromptInputs(**fields)))

    hello, packed = (
        ChatMessage(role="user", content="x" * 36),
        ChatMessage(role="user", content="", token_ids=pack_ids(range(20))),
    )
    tools = ChatMessage(role="user", content="x" * 36, fields=b"y" * 40)
    assert estimated(messages=(hello, hello)) == 18 + 10
    assert estimated(messages=(tools,), template_variables=b"z" * 40) == 9 + 10 + 10 + 10
    assert estimated(messages=(packed,)) == 1 + 20 + 10
    assert estimated(conversations=((hello,), (hello, hello)), n=2) == 27 + 4 * 10
    assert estimated(conversations=((hello,), (hello,)), template_variables=b"z" * 40) == 18 + 20 + 2 * 10
    assert estimated(texts=("x" * 4, "x" * 4), suffix="y" * 4) == 4 + 2 * 10
    assert estimated(texts=("x",) * 9) == 9 + 9 * 10


def test_embeddings_have_no_output():
    assert estimated_tokens(request(pooling=PoolingParams())) == 2
