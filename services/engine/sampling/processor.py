"""The interface of logits processors, and the adjustment that they make for one sampled token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.services.engine.sampling.masks import Mask


@dataclass(slots=True)
class Adjustment:
    """The changes to the logits of one row before a token is sampled from it.

    The biases are added first, then the sampler applies the penalties, then the mask: logits of forbidden tokens become
    -inf. `error`: no token can be sampled, and the sequence must end with this message for the user. `waits`: the mask
    is not computed yet, so nothing is sampled in this step.
    """

    mask: Mask | None = None
    """The allowed tokens; None: all. Not to be modified, because processors may keep it."""
    biases: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = field(
        default_factory=list[tuple[NDArray[np.int64], NDArray[np.float32]]]
    )
    """Token ids and the values to add to their logits."""
    error: str = ""
    waits: bool = False

    def allow(self, mask: Mask) -> None:
        """Forbids all tokens that `mask` forbids."""
        self.mask = mask if self.mask is None else self.mask & mask


class LogitsProcessor(Protocol):
    """Applies one parameter of one sequence. Made when the sequence joins, with its prompt and output so far."""

    needs_tokens: bool = False
    """Whether an adjustment depends on earlier sampled tokens, which must then be known first."""

    def append(self, token_id: int) -> None:
        """Informs the processor of an output token of the sequence."""

    def adjust(self, adjustment: Adjustment, position: int, drafts: Sequence[int]) -> None:
        """Adds to the adjustment of the token at output index `position`.

        `drafts`: the draft tokens between the output so far and this position. If one of them is not allowed, the
        adjustment is never used, and may be anything.
        """
        ...
