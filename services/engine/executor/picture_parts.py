"""Messages that send embeddings of pictures from the first rank, which reads them, to the ranks of its pipeline stage.

Only the first stage computes token embeddings, so the other stages get plans without embeddings. A picture's embeddings
are sent once, before the plan whose new sequences have the picture, in parts that are much smaller than the largest
message. A rank keeps the parts until that plan. The messages are sent over `channel`.
"""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from services.engine.core.plan import PlacedPicture, StepPlan

PART_BYTES = 64 * 2**20


class EmbeddingsPart(msgspec.Struct, frozen=True, tag=True):
    """The next bytes of the embeddings `key` (`PlacedPicture.key`), for the plan that comes next."""

    key: bytes
    data: bytes


def parts_of(plan: StepPlan, part_bytes: int = PART_BYTES) -> Iterator[EmbeddingsPart]:
    """Yields the messages that send a rank the embeddings of a plan's pictures; equal pictures are sent once."""
    for key, embeddings in {each.key: each.embeddings for each in _pictures(plan)}.items():
        for start in range(0, len(embeddings), part_bytes):
            yield EmbeddingsPart(key, embeddings[start : start + part_bytes])


def without_embeddings(plan: StepPlan) -> StepPlan:
    """Returns the plan with empty embeddings, and the plan itself if it has no pictures."""
    return _with_embeddings(plan, {each.key: b"" for each in _pictures(plan)})


class EmbeddingsReceiver:
    """Receives the embeddings of a plan's pictures on a rank, and puts them into the plan."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytearray] = {}

    def take(self, part: EmbeddingsPart) -> None:
        """Keeps a part for the next plan."""
        self._parts.setdefault(part.key, bytearray()).extend(part.data)

    def complete(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with the embeddings that were received before it; if there are none, the plan itself."""
        received, self._parts = self._parts, {}
        return _with_embeddings(plan, {key: bytes(data) for key, data in received.items()})


def _pictures(plan: StepPlan) -> Iterator[PlacedPicture]:
    return (picture for sequence in plan.new for picture in sequence.pictures)


def _with_embeddings(plan: StepPlan, embeddings: Mapping[bytes, bytes]) -> StepPlan:
    if not embeddings:
        return plan
    new = (
        replace(sequence, pictures=tuple(replace(one, embeddings=embeddings[one.key]) for one in sequence.pictures))
        for sequence in plan.new
    )
    return replace(plan, new=tuple(new))
