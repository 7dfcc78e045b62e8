"""Images of a prompt in the worker: the embeddings of their tokens, and the positions of all tokens.

A token of such a prompt has three positions: in time, row and column (arXiv 2409.12191). For text all three are equal
and continue from the largest position before. An image that begins at position p has the positions (p, p + row, p +
column); the text after it continues at p + max(rows, columns). The output continues from the prompt, so the positions
of output tokens differ from their indices in the sequence by a constant. Called by `given`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.core.plan import PlacedImage, StepPlan

Integers = NDArray[np.int64]
AXES = 3


class SpatialPositions:
    """The positions of one sequence with images."""

    def __init__(self, num_prompt_tokens: int, images: Sequence[PlacedImage]) -> None:
        parts: list[Integers] = []
        place = position = 0
        for image in images:
            parts.append(_text(position, image.start - place))
            position += image.start - place
            parts.append(position + _grid(image.rows, image.columns))
            position += max(image.rows, image.columns)
            place = image.start + image.num_tokens
        parts.append(_text(position, num_prompt_tokens - place))
        self._prompt = np.concatenate(parts, axis=1)
        self._offset = position - place
        """Offset between index and position for tokens after the last image."""

    def at(self, start: int, end: int) -> Integers:
        """Returns the positions of the tokens [start, end), [3, end - start]."""
        known = self._prompt[:, start:end]
        behind = max(start, self._prompt.shape[1])
        if behind >= end:
            return known
        return np.concatenate((known, _text(behind + self._offset, end - behind)), axis=1)


def spatial_positions(
    plan: StepPlan, positions: Integers, query_starts: Integers, rows: Mapping[int, SpatialPositions]
) -> Integers | None:
    """Returns the positions of a step's tokens, [3, num_tokens]; None if no sequence of the step has images.

    `positions` [num_tokens]: the tokens' indices in their sequences; `query_starts` [S]: the first token of each
    sequence; `rows`: the positions of each row with images; free rows may be among them.
    """
    if not any(share.row in rows for share in plan.scheduled):
        return None
    found = np.tile(positions, (AXES, 1))
    for share, first in zip(plan.scheduled, query_starts.tolist(), strict=True):
        if share.row in rows:
            end = share.start + share.num_tokens
            found[:, first : first + share.num_tokens] = rows[share.row].at(share.start, end)
    return found


def embedding_rows(images: Sequence[PlacedImage], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the embeddings of the images, [all embedded tokens, width], see `PlacedImage`."""
    return torch.cat([_embeddings(image, device).to(dtype) for image in images])


def _embeddings(image: PlacedImage, device: torch.device) -> Tensor:
    numbers = torch.frombuffer(bytearray(image.embeddings), dtype=getattr(torch, image.dtype))
    if device.type == "cuda":
        # A copy from pageable memory would wait for the steps under way.
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    return numbers.view(image.rows * image.columns, -1)


def _text(position: int, count: int) -> Integers:
    return np.tile(np.arange(position, position + count, dtype=np.int64), (AXES, 1))


def _grid(rows: int, columns: int) -> Integers:
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    return np.stack((np.zeros_like(row), row, column))
