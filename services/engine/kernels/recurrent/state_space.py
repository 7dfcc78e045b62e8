"""The reference of state spaces (Mamba 2): a state for each head, one token after the other.

See `models.recurrent_kinds.StateSpace` for the formula.
"""

import torch
from torch import Tensor

from antiphon.services.engine.kernels.recurrent.moves import StateMoves, take_through


def state_space(
    values: Tensor, decay: Tensor, inner: Tensor, outer: Tensor, moves: StateMoves, states: Tensor
) -> Tensor:
    """Returns Sᵀ C [num_tokens, heads, head_dim] of each token of a `StateSpace`, and writes states; all float32.

    Each token is computed by the same operations, so the result does not depend on how a sequence's tokens are divided
    among steps.

    `values` [num_tokens, heads, head_dim] = dt · x; `decay` [num_tokens, heads], the factor on the state; `inner` B and
    `outer` C [num_tokens, heads, state_dim]; `states` [slots, heads, tiles, state_dim, columns of a tile].
    """

    def step(state: Tensor, token: int) -> Tensor:
        state *= decay[token, :, None, None]
        state += inner[token, :, :, None] * values[token, :, None, :]
        return (state * outer[token, :, :, None]).sum(1)

    return take_through(torch.empty_like(values), moves, states, step)
