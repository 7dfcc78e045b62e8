"""The reference of convolutions of each channel over the last tokens. A recurrent state has those before a step."""

import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.kernels.recurrent.moves import StateMoves


def causal_convolution(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, moves: StateMoves, states: Tensor
) -> Tensor:
    """Returns the convolution of each channel with its own kernel over the inputs up to each token.

    `inputs` [num_tokens, channels]; `weight` [channels, k], the last column for the token itself; `bias` [channels];
    `states` [slots, k - 1, channels] float32: the last inputs before the tokens. Writes states.
    """
    if moves.decodes:
        return _decode(inputs, weight, bias, moves, states)
    outputs = torch.empty_like(inputs)
    for sequence, source in enumerate(moves.sources.tolist()):
        first, end = moves.query_start_loc[sequence : sequence + 2].tolist()
        before = torch.zeros_like(states[0]) if source < 0 else states[source]
        known = torch.cat((before, inputs[first:end].to(torch.float32)))
        outputs[first:end] = _convolved(known.t()[None], weight, bias)[0].t()
        for each in range(*moves.starts[sequence : sequence + 2].tolist()):
            last = int(moves.ends[each]) - first + len(before)
            states[int(moves.slots[each])] = known[last - len(before) : last]
    return outputs


def _decode(inputs: Tensor, weight: Tensor, bias: Tensor | None, moves: StateMoves, states: Tensor) -> Tensor:
    sources = torch.from_numpy(moves.sources).to(states.device)
    before = states[sources.clamp(min=0)] * (sources >= 0)[:, None, None]
    known = torch.cat((before, inputs[:, None].to(torch.float32)), dim=1)
    states[torch.from_numpy(moves.slots).to(states.device)] = known[:, 1:]
    return _convolved(known.transpose(1, 2), weight, bias)[..., 0].to(inputs.dtype)


def _convolved(known: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`known` [n, channels, k - 1 + tokens] → [n, channels, tokens], float32."""
    return F.conv1d(
        known, weight[:, None].to(torch.float32), None if bias is None else bias.to(torch.float32), groups=len(weight)
    )
