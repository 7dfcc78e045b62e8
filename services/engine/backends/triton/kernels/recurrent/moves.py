"""The slots of recurrent states that the sequences of a step read and write, on the device; see `kernels/recurrent`.

Plain index arithmetic on the host; the caller's `put` copies the arrays to the device. Called by the GPU worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.kernels.recurrent.moves import StateMoves

Put = Callable[[NDArray[Any], int], Tensor]
"""Puts an array on the device as int32, with room for the given number of elements."""

_NONE, _ZERO = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
NO_MOVES = StateMoves(query_start_loc=_ZERO, sources=_NONE, starts=_ZERO, ends=_NONE, slots=_NONE)
"""Those of a step without sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMoves:
    """`StateMoves` on the device, int32, and `owners` [num_tokens]: the sequence of each token.

    `decodes`: each sequence has one token and writes one state, to the slot with the index of the sequence. The padding
    of a captured graph consists of such sequences that read nothing and write nothing: their slots are -1.
    """

    num_sequences: int
    decodes: bool
    owners: Tensor
    query_start_loc: Tensor
    sources: Tensor
    starts: Tensor
    ends: Tensor
    slots: Tensor


def put_moves(moves: StateMoves, put: Put, capacity: int = 0) -> DeviceMoves:
    """Returns the moves of a step on the device.

    `capacity`: number of sequences of a captured graph, to which the moves are padded; only for steps that decode.
    """
    real = len(moves.sources)
    assert not capacity or moves.decodes, "a graph is for steps in which each sequence has one token"
    count = max(real, capacity)
    missing = count - real

    def padded(values: NDArray[np.int64], filling: "NDArray[np.int64] | int") -> Tensor:
        if missing:
            values = np.concatenate((values, np.broadcast_to(filling, missing)))
        return put(values, len(values))

    after = np.arange(real, count) + 1
    return DeviceMoves(
        num_sequences=count,
        decodes=moves.decodes,
        owners=padded(np.repeat(np.arange(real), np.diff(moves.query_start_loc)), after - 1),
        query_start_loc=padded(moves.query_start_loc, after),
        sources=padded(moves.sources, -1),
        starts=padded(moves.starts, after),
        ends=padded(moves.ends, after),
        slots=padded(moves.slots, -1),
    )


def moves_words(max_tokens: int, max_num_seqs: int) -> int:
    """Returns the number of words that the arrays of the largest step have: no two states are after the same token."""
    return 3 * max_tokens + 3 * (max_num_seqs + 1)
