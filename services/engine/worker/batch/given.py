"""What the rows of a worker have that token ids do not say: embeddings, and positions and spans of images.

A virtual token, that of an image or of a prompt adapter, has an id from the vocabulary's size on, which numbers the
row's given embeddings. Called by the workers.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.core.plan import NewSequence, StepPlan
from antiphon.services.engine.kernels.paged_attention import Spans
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.models.layers.given import GivenEmbeddings
from antiphon.services.engine.worker.batch.images import SpatialPositions, embedding_rows, spatial_positions
from antiphon.services.engine.worker.batch.inputs import Integers, VirtualTokens


class GivenRows:
    """The given embeddings of all rows, in the model's `dtype` on its `device`, and what images change of the rows.

    `embeds`: whether this worker embeds tokens; later pipeline stages do not. `mutual`: whether the tokens of an image
    attend to each other.
    """

    def __init__(
        self,
        description: DecoderDescription,
        dtype: torch.dtype,
        device: torch.device,
        *,
        mutual: bool,
        embeds: bool = True,
    ) -> None:
        self._image_layers, self._dtype, self._device = description.image_layers, dtype, device
        self._has_sections = description.rope is not None and bool(description.rope.sections)
        self._mutual, self._embeds = mutual, embeds
        self._tables: dict[int, Tensor] = {}
        self._positions: dict[int, SpatialPositions] = {}
        self._spans: dict[int, Spans] = {}

    def join(self, plan: StepPlan, vectors: Callable[[str], Tensor]) -> None:
        """Takes the new sequences of a plan. `vectors`: those of a prompt adapter's version, [virtual tokens, hidden].

        What a row gets is on its way to the device when this returns.
        """
        held = (self._tables, self._positions, self._spans)
        if any(held):
            for row in (*plan.freed_rows, *(sequence.row for sequence in plan.new)):
                for each in held:
                    each.pop(row, None)
        for sequence in plan.new:
            if sequence.prompt_adapter and self._embeds:
                rows = vectors(sequence.prompt_adapter)
                # Padded to the width of the embeddings of images, which may be in the same step.
                self._tables[sequence.row] = F.pad(rows, (0, rows.shape[1] * self._image_layers))
            if sequence.images:
                self._take_images(sequence)

    def table(self, row: int) -> Tensor:
        """Returns the given embeddings of a row that has any, [virtual tokens, width]."""
        return self._tables[row]

    def embeddings(self, virtual: VirtualTokens | None) -> GivenEmbeddings | None:
        """Returns the embeddings of a step's virtual tokens on the device; None if it has none."""
        if virtual is None or not self._embeds:
            return None
        starts = np.flatnonzero(np.diff(virtual.rows, prepend=-1))
        parts = list[Tensor]()
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(virtual.rows)], strict=True):
            first, last = int(virtual.indices[start]), int(virtual.indices[end - 1])
            assert last - first == end - start - 1, "a step leaves out virtual tokens"
            parts.append(self._tables[int(virtual.rows[start])][first : last + 1])
        tokens = torch.from_numpy(virtual.tokens)
        if self._device.type == "cuda":
            # See `embedding_rows`.
            tokens = tokens.pin_memory().to(self._device, non_blocking=True)
        return GivenEmbeddings(tokens, torch.cat(parts))

    def positions(self, plan: StepPlan, positions: Integers, query_starts: Integers) -> Integers | None:
        """See `spatial_positions`."""
        return spatial_positions(plan, positions, query_starts, self._positions) if self._positions else None

    def spans(self, plan: StepPlan) -> list[Spans] | None:
        """Returns the images of each sequence of a plan whose tokens attend to each other; None if no row has any."""
        return [self._spans.get(share.row, ()) for share in plan.scheduled] if self._spans else None

    def _take_images(self, sequence: NewSequence) -> None:
        if self._embeds:
            self._tables[sequence.row] = embedding_rows(sequence.images, self._dtype, self._device)
        if self._has_sections:
            self._positions[sequence.row] = SpatialPositions(sequence.num_prompt_tokens, sequence.images)
        if self._mutual:
            self._spans[sequence.row] = [(one.start, one.start + one.num_tokens) for one in sequence.images]
