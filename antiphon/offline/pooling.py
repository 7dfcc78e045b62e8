"""Embeddings, labels and scores of the offline API: parameters, results, and sequences for the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Generic, TypeVar

from antiphon.offline.adapters import Adapters, with_adapters
from antiphon.services.engine.core.request import SequenceSpec
from antiphon.shared.errors import ServiceError
from antiphon.shared.parameters.pooling import PoolingParams, check, unpack_vector
from antiphon.shared.parameters.sampling import SamplingParams

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Result(Generic[T]):
    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens that were taken from the prefix cache."""
    finished: bool = True


@dataclass(frozen=True)
class PoolingOutput:
    """The model's output for one prompt: a vector, or a number for each label of its classification head."""

    data: list[float]


class PoolingRequestOutput(_Result[PoolingOutput]):
    """The result of `encode` for one prompt."""


@dataclass(frozen=True)
class ClassificationOutput:
    """The output of a classification head for one prompt, and the label with the highest number."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


class ClassificationRequestOutput(_Result[ClassificationOutput]):
    """The result of `classify` for one prompt."""


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of components."""
        return len(self.embedding)


class EmbeddingRequestOutput(_Result[EmbeddingOutput]):
    """The result of `embed` for one prompt."""


@dataclass(frozen=True)
class ScoringOutput:
    """The similarity of two texts: the cosine of their vectors (-1 to 1), or the output of a classification head."""

    score: float


class ScoringRequestOutput(_Result[ScoringOutput]):
    """The result of `score` for one pair.

    `prompt_token_ids`: the tokens of the first text, then those of the second.
    """


def checked(params: Sequence[PoolingParams | None], embedding_size: int, num_labels: int) -> list[PoolingParams]:
    """Returns the parameters, with defaults for None.

    Raises ValueError if the model cannot compute the requested vector.
    """
    found = [each or PoolingParams() for each in params]
    for each in found:
        try:
            check(each, embedding_size, num_labels)
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
    """Returns the sequence of one prompt for the engine.

    Its id is the request's id, because there is only one sequence.
    """
    # A pooling sequence samples nothing, so the sampling parameters have no effect.
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    spec = SequenceSpec(
        sequence_id=request_id, prompt_token_ids=token_ids, params=sampling, arrival=arrival, pooling=params
    )
    return with_adapters(spec, adapters)


def pooling_output(spec: SequenceSpec, vector: bytes, num_cached_tokens: int) -> PoolingRequestOutput:
    """Returns the result of one prompt. `vector`: from the engine's outcome."""
    return PoolingRequestOutput(
        request_id=spec.sequence_id,
        outputs=PoolingOutput(unpack_vector(vector).tolist()),
        prompt_token_ids=list(spec.prompt_token_ids),
        num_cached_tokens=num_cached_tokens,
    )


def embedding_output(output: PoolingRequestOutput) -> EmbeddingRequestOutput:
    """Returns the result of one prompt in the form of `embed`."""
    return EmbeddingRequestOutput(**{**vars(output), "outputs": EmbeddingOutput(output.outputs.data)})


def classification_output(output: PoolingRequestOutput, labels: Sequence[str]) -> ClassificationRequestOutput:
    """Returns the result of one prompt in the form of `classify`."""
    numbers = output.outputs.data
    found = ClassificationOutput(numbers, labels[max(range(len(numbers)), key=numbers.__getitem__)])
    return ClassificationRequestOutput(**{**vars(output), "outputs": found})


def scoring_output(output: PoolingRequestOutput) -> ScoringRequestOutput:
    """Returns the result of one pair, scored by a classification head with one label."""
    return ScoringRequestOutput(**{**vars(output), "outputs": ScoringOutput(output.outputs.data[0])})


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
