"""Which slots of recurrent states the sequences of a step read and write.

A slot holds the state of one sequence after some of its tokens (`core.kv.states`). A step reads for each sequence the
slot of its state before the step's tokens, and writes its state after some of them, at least after the last one, to
other slots; the last one may be the slot that was read. No sequence reads what another one writes in the same step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """The slots of a step with S sequences.

    `query_start_loc` [S + 1]: index of each sequence's first token in the step. `sources` [S]: the slots that are read,
    or -1 for a sequence that begins. Sequence s writes to `slots[i]` its state after the tokens of the step before
    `ends[i]`, for i from `starts[s]` to `starts[s + 1]`, in ascending order.
    """

    query_start_loc: Integers
    sources: Integers
    starts: Integers
    ends: Integers
    slots: Integers

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one token, and writes one state."""
        return len(self.slots) == len(self.sources) == int(self.query_start_loc[-1])


def take_through(outputs: Tensor, moves: StateMoves, states: Tensor, step: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Takes the states of heads through a step's tokens, one after the other, and writes states. Returns `outputs`.

    `step(state, token)` updates a state [heads, rows, dim] and returns what `outputs` [num_tokens, heads, dim] gets for
    the token. `states` [slots, heads, tiles, rows, columns of a tile].
    """
    for sequence, source in enumerate(moves.sources.tolist()):
        state = _joined_tiles(torch.zeros_like(states[0]) if source < 0 else states[source], outputs.shape[2])
        first, end = moves.query_start_loc[sequence : sequence + 2].tolist()
        writes = range(*moves.starts[sequence : sequence + 2].tolist())
        slots = {int(moves.ends[each]): int(moves.slots[each]) for each in writes}
        for token in range(first, end):
            outputs[token] = step(state, token)
            if token + 1 in slots:
                _put_tiles(states[slots[token + 1]], state)
    return outputs


def _joined_tiles(tiles: Tensor, dim: int) -> Tensor:
    """Returns the state [heads, rows, dim] of tiles [heads, tiles, rows, columns]."""
    return tiles.transpose(1, 2).flatten(2)[..., :dim].clone()


def _put_tiles(tiles: Tensor, state: Tensor) -> None:
    """Writes a state to its tiles."""
    padded = F.pad(state, (0, tiles.shape[1] * tiles.shape[3] - state.shape[2]))
    tiles.copy_(padded.unflatten(2, (tiles.shape[1], -1)).transpose(1, 2))
