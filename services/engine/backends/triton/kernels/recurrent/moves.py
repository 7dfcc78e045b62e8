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


def put_moves(moves: StateMoves, put: Put, capacity: int = 0, num_tokens: int = 0) -> DeviceMoves:
    """Returns the moves of a step on the device.

    `capacity`: number of sequences of a captured graph, to which the moves are padded. `num_tokens`: number of tokens
    of a captured graph for steps that do not only decode, else 0.
    """
    if num_tokens:
        return _put_mixed(moves, put, capacity, num_tokens)
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


def _put_mixed(moves: StateMoves, put: Put, num_sequences: int, num_tokens: int) -> DeviceMoves:
    """Returns moves padded with sequences without tokens, which write nothing. Padding tokens are the first one's."""
    owners = np.repeat(np.arange(len(moves.sources)), np.diff(moves.query_start_loc))
    bounds = (moves.query_start_loc, num_sequences + 1), (moves.starts, num_sequences + 1)
    query_start_loc, starts = (put(np.append(x, np.full(n - len(x), x[-1])), n) for x, n in bounds)
    return DeviceMoves(
        num_sequences=num_sequences,
        decodes=False,
        owners=put(np.append(owners, np.zeros(num_tokens - len(owners), dtype=np.int64)), num_tokens),
        query_start_loc=query_start_loc,
        sources=put(np.append(moves.sources, np.full(num_sequences - len(moves.sources), -1)), num_sequences),
        starts=starts,
        # No two states are after the same token.
        ends=put(moves.ends, num_tokens),
        slots=put(moves.slots, num_tokens),
    )


def moves_words(max_tokens: int, max_num_seqs: int) -> int:
    """Returns the number of words that the arrays of the largest step have: no two states are after the same token."""
    return 3 * max_tokens + 3 * (max_num_seqs + 1)
