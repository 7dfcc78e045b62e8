"""Messages that send embeddings of images from the first rank, which reads them, to the ranks of its pipeline stage.

Only the first stage computes token embeddings, so the other stages get plans without embeddings. An image's embeddings
are sent once, before the plan whose new sequences have the image, in parts that are much smaller than the largest
message. A rank keeps the parts until that plan. The messages are sent over `channel`.
"""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from antiphon.services.engine.core.plan import PlacedImage, StepPlan

PART_BYTES = 64 * 2**20


class EmbeddingsPart(msgspec.Struct, frozen=True, tag=True):
    """The next bytes of the embeddings `key` (`PlacedImage.key`), for the plan that comes next."""

    key: bytes
    data: bytes


def parts_of(plan: StepPlan, part_bytes: int = PART_BYTES) -> Iterator[EmbeddingsPart]:
    """Yields the messages that send a rank the embeddings of a plan's images; equal images are sent once."""
    for key, embeddings in {each.key: each.embeddings for each in _images(plan)}.items():
        for start in range(0, len(embeddings), part_bytes):
            yield EmbeddingsPart(key, embeddings[start : start + part_bytes])


def without_embeddings(plan: StepPlan) -> StepPlan:
    """Returns the plan with empty embeddings, and the plan itself if it has no images."""
    return _with_embeddings(plan, {each.key: b"" for each in _images(plan)})


class EmbeddingsReceiver:
    """Receives the embeddings of a plan's images on a rank, and puts them into the plan."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytearray] = {}

    def take(self, part: EmbeddingsPart) -> None:
        """Keeps a part for the next plan."""
        self._parts.setdefault(part.key, bytearray()).extend(part.data)

    def complete(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with the embeddings that were received before it; if there are none, the plan itself."""
        received, self._parts = self._parts, {}
        return _with_embeddings(plan, {key: bytes(data) for key, data in received.items()})


def _images(plan: StepPlan) -> Iterator[PlacedImage]:
    return (image for sequence in plan.new for image in sequence.images)


def _with_embeddings(plan: StepPlan, embeddings: Mapping[bytes, bytes]) -> StepPlan:
    if not embeddings:
        return plan
    new = (
        replace(sequence, images=tuple(replace(one, embeddings=embeddings[one.key]) for one in sequence.images))
        for sequence in plan.new
    )
    return replace(plan, new=tuple(new))
