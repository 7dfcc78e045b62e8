"""Steps of recurrent layers for the tests of their kernels: which tokens, which slots are read and written."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from antiphon.services.engine.kernels.recurrent.moves import StateMoves

NUM_SLOTS = 9


@dataclass(frozen=True)
class Share:
    """A sequence's tokens in a step, the slot it reads, and (tokens, slot) of each state that it writes."""

    num_tokens: int
    source: int
    writes: tuple[tuple[int, int], ...]


DECODES = (Share(1, 3, ((1, 3),)), Share(1, -1, ((1, 0),)), Share(1, 5, ((1, 2),)))
"""In place, the first token of a sequence, from one slot to another."""
MIXED = (
    Share(1, 3, ((1, 3),)),
    Share(7, -1, ((7, 0),)),
    Share(3, 5, ((1, 1), (2, 2), (3, 5))),
    Share(9, 4, ((8, 6), (9, 7))),
)
"""A decode, a prompt, drafts whose last state is written where the first was read, a chunk with a snapshot."""


def moves_of(shares: tuple[Share, ...]) -> StateMoves:
    firsts = np.cumsum([0, *(share.num_tokens for share in shares)])
    writes = [(first + end, slot) for first, share in zip(firsts, shares, strict=False) for end, slot in share.writes]
    ends, slots = np.array(writes).T
    starts = np.cumsum([0, *(len(share.writes) for share in shares)])
    sources = np.array([share.source for share in shares])
    return StateMoves(query_start_loc=firsts, sources=sources, starts=starts, ends=ends, slots=slots)


def put(array: np.ndarray, capacity: int) -> Tensor:
    out = np.full(capacity, 99_999, dtype=np.int32)
    out[: len(array)] = array
    return torch.from_numpy(out)
