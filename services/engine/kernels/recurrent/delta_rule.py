"""The reference of the gated delta rule: linear attention over a state for each head, one token after the other.

See `models.recurrent_kinds.GatedDelta` for the formula. Each token is computed by the same operations, so the result
does not depend on how a sequence's tokens are divided among steps.
"""

import torch
from torch import Tensor

from antiphon.services.engine.kernels.recurrent.moves import StateMoves, take_through

_EPS = 1e-6
"""Added to the squared length of queries and keys before they get length one."""


def normalised(heads: Tensor) -> Tensor:
    """Returns vectors [..., dim] of length one, float32."""
    heads = heads.to(torch.float32)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPS)


def delta_rule(
    queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, beta: Tensor, moves: StateMoves, states: Tensor
) -> Tensor:
    """Returns y [num_tokens, heads, value_dim] float32, and writes states.

    `queries`, `keys` [num_tokens, heads, key_dim], of length one, queries divided by the square root of `key_dim`;
    `values` [num_tokens, heads, value_dim]; `decay` [num_tokens, heads, key_dim or 1] and `beta` [num_tokens, heads],
    factors on the rows of the state and on what is added to it; all float32. `states` [slots, heads, tiles, key_dim,
    columns of a tile] float32.
    """

    def step(state: Tensor, token: int) -> Tensor:
        state *= decay[token, :, :, None]
        missing = values[token] - (state * keys[token, :, :, None]).sum(1)
        state += keys[token, :, :, None] * (beta[token, :, None] * missing)[:, None, :]
        return (state * queries[token, :, :, None]).sum(1)

    return take_through(torch.empty_like(values), moves, states, step)
