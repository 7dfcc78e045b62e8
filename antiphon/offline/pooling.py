"""Embeddings and scores of the offline API: their parameters, their results, and one call's run through the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

from antiphon.offline.adapters import Adapters, with_adapters
from services.engine.core.request import SequenceSpec
from shared.errors import ServiceError
from shared.pooling import PoolingParams, check, unpack_vector
from shared.sampling import SamplingParams

__all__ = ["EmbeddingOutput", "EmbeddingRequestOutput", "PoolingParams", "ScoringOutput", "ScoringRequestOutput"]


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of components."""
        return len(self.embedding)


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequestOutput:
    """The result of `embed` for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """The similarity of two texts: the cosine of their vectors, between -1 and 1."""

    score: float


@dataclass(frozen=True, kw_only=True)
class ScoringRequestOutput:
    """The result of `score` for one pair. `prompt_token_ids` are those of both texts, one after the other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def checked(params: Sequence[PoolingParams | None], embedding_size: int) -> list[PoolingParams]:
    """Returns the parameters, with defaults for None. Raises ValueError for a vector that the model cannot give."""
    found = [each or PoolingParams() for each in params]
    for each in found:
        try:
            check(each, embedding_size)
        except ServiceError as error:
            raise ValueError(error.message) from None
    return found


def pooling_spec(
    request_id: str,
    token_ids: tuple[int, ...],
    params: PoolingParams,
    arrival: int,
    adapters: Adapters = (),
) -> SequenceSpec:
    """Returns the sequence of one prompt for the engine."""
    # A pooling sequence samples nothing, so the sampling parameters have no effect.
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    spec = SequenceSpec(request_id, token_ids, sampling, arrival=arrival, pooling=params)
    return with_adapters(spec, adapters)


def embedding_output(spec: SequenceSpec, vector: bytes, num_cached_tokens: int) -> EmbeddingRequestOutput:
    """Returns the result of one prompt. `vector` is that of its outcome."""
    return EmbeddingRequestOutput(
        request_id=spec.sequence_id,
        outputs=EmbeddingOutput(unpack_vector(vector).tolist()),
        prompt_token_ids=list(spec.prompt_token_ids),
        num_cached_tokens=num_cached_tokens,
    )


def pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the texts as two lists; the first has one item, or as many as the second. Raises ValueError."""
    first, second = ([texts] if isinstance(texts, str) else list(texts) for texts in (text_1, text_2))
    if not second or len(first) not in (1, len(second)):
        raise ValueError(f"There are {len(first)} text_1 and {len(second)} text_2: give one text_1 or as many of both.")
    return first, second


def scored(
    first: Sequence[EmbeddingRequestOutput], second: Sequence[EmbeddingRequestOutput]
) -> Iterator[ScoringRequestOutput]:
    """Yields the result of each pair, from vectors of length one. A single first vector is paired with each second."""
    for index, theirs in enumerate(second):
        ours = first[index if len(first) > 1 else 0]
        yield ScoringRequestOutput(
            request_id=theirs.request_id,
            outputs=ScoringOutput(sum(map(mul, ours.outputs.embedding, theirs.outputs.embedding))),
            prompt_token_ids=ours.prompt_token_ids + theirs.prompt_token_ids,
            num_cached_tokens=ours.num_cached_tokens + theirs.num_cached_tokens,
        )
