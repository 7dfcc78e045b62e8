"""The tokens that are reserved for a request before its true number of tokens is known."""

from services.gateway.access.guarded_generation import estimated_tokens
from services.gateway.generation import GenerationRequest
from shared import limits
from shared.pooling import PoolingParams
from shared.sampling import SamplingParams


def request(**fields: object) -> GenerationRequest:
    return GenerationRequest("r", "m", SamplingParams(max_tokens=10), texts=("12345678",), **fields)  # type: ignore[arg-type]


def test_every_sequence_that_is_computed_counts_with_its_output():
    assert estimated_tokens(request()) == 2 + 10
    assert estimated_tokens(request(n=2)) == 2 + 2 * 10
    assert estimated_tokens(request(n=2, best_of=3)) == 2 + 3 * 10
    unlimited = GenerationRequest("r", "m", SamplingParams(max_tokens=0), token_ids=((1, 2, 3),))
    assert estimated_tokens(unlimited) == 3 + limits.OUTPUT_ESTIMATE_TOKENS


def test_embeddings_have_no_output():
    assert estimated_tokens(request(pooling=PoolingParams())) == 2
