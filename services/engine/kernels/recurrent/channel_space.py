"""The reference of state spaces with decays for each channel (Mamba 1), one token after the other.

See `models.recurrent_kinds.ChannelSpace` for the formula.
"""

import torch
from torch import Tensor

from antiphon.services.engine.kernels.recurrent.moves import StateMoves, take_through


def channel_space(
    values: Tensor, times: Tensor, decay: Tensor, inner: Tensor, outer: Tensor, moves: StateMoves, states: Tensor
) -> Tensor:
    """Returns s · C [num_tokens, channels] of each token of a `ChannelSpace`, and writes states; all float32.

    Each token is computed by the same operations, so the result does not depend on how a sequence's tokens are divided
    among steps.

    `values` x and `times` dt [num_tokens, channels]; `decay` = -exp(A_log) [channels, state_dim]; `inner` B and `outer`
    C [num_tokens, state_dim]; `states` [slots, tiles, state_dim, columns of a tile].
    """
    added, speeds = values * times, decay.t()

    def step(state: Tensor, token: int) -> Tensor:
        state *= torch.exp(speeds * times[token])
        state += inner[token, :, None] * added[token]
        return (state * outer[token, :, None]).sum(1)

    return take_through(torch.empty_like(values)[:, None], moves, states[:, None], step)[:, 0]
