"""The convolution of a recurrent layer over the last tokens, and the states that it leaves.

    gated   `ShortConvolution`: rows [3 channels] with B, C and x → C times the convolution of the inputs B · x
    plain   `GatedDelta`: rows that begin with [channels] inputs → silu of their convolution

    result  [num_tokens, channels], like the rows; weight [size, channels], the last row for the token itself
    states  [slots, state size] float32, of which the first (size - 1) · channels are the last inputs of a sequence

    convolve   one program computes a piece of the channels of one token. In a step that decodes it also writes the
               sequence's state, otherwise that is done by
    keep       one program writes a piece of the channels of all states of a sequence, after all tokens are computed

Each token has the same sum in the same order, so that the result does not depend on how a sequence's tokens are divided
among steps: inputs of tokens before the step come from the state, where they are not rounded. A state may be written to
the slot that was read, so each program waits until all its threads have read before one writes: in `convolve` inputs
move towards the front, so what is still to be read is behind what is written. Everything is computed in float32 and the
result rounded once.

Reference: `kernels/recurrent/convolution`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import activate
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import DeviceMoves
from antiphon.services.engine.backends.triton.kernels.runtime import ceil_div, launch, power_of_two

_PIECE = 512


@triton.jit
def _input(rows, row_stride, token, channels, i, inside, GATED: tl.constexpr):
    """Returns the inputs of a token, float32; zeros where `inside` is false."""
    value = tl.load(rows + token * row_stride + i, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(rows + token * row_stride + 2 * channels + i, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _convolve_kernel(
    rows, weight, bias, states, out, owners, query_start_loc, sources, slots, row_stride, slot_stride, channels,
    SIZE: tl.constexpr, PIECE: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, DECODES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = i < channels
    if DECODES:
        owner = token
        first = token
        target = tl.load(slots + owner).to(tl.int64)
    else:
        owner = tl.load(owners + token)
        first = tl.load(query_start_loc + owner).to(tl.int64)
        target = tl.full((), -1, tl.int64)
    source = tl.load(sources + owner).to(tl.int64)
    total = tl.zeros((PIECE,), dtype=tl.float32)
    if BIASED:
        total += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(SIZE):
        # Place of the input among those of the state, of which the last one is just before the first token.
        place = token - first + k
        past = (place < SIZE - 1) & (source >= 0)
        value = tl.load(states + source * slot_stride + place * channels + i, mask=inside & past, other=0.0)
        value += _input(rows, row_stride, token - SIZE + 1 + k, channels, i, inside & (place >= SIZE - 1), GATED)
        if DECODES and k > 0:
            tl.debug_barrier()
            tl.store(states + target * slot_stride + (k - 1) * channels + i, value, mask=inside & (target >= 0))
        total += tl.load(weight + k * channels + i, mask=inside, other=0.0).to(tl.float32) * value
    if GATED:
        y = total * tl.load(rows + token * row_stride + channels + i, mask=inside, other=0.0).to(tl.float32)
    else:
        y = activate(total, "silu")
    tl.store(out + token * channels + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep_kernel(
    rows, states, query_start_loc, sources, starts, ends, slots, row_stride, slot_stride, channels,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PIECE: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    k = tl.arange(0, PADDED)[:, None]
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)[None, :]
    inside = (k < SIZE - 1) & (i < channels)
    first = tl.load(query_start_loc + sequence).to(tl.int64)
    source = tl.load(sources + sequence).to(tl.int64)
    for each in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
        end, slot = tl.load(ends + each).to(tl.int64), tl.load(slots + each).to(tl.int64)
        place = end - first + k
        past = inside & (place < SIZE - 1) & (source >= 0)
        value = tl.load(states + source * slot_stride + place * channels + i, mask=past, other=0.0)
        value += _input(rows, row_stride, end - SIZE + 1 + k, channels, i, inside & (place >= SIZE - 1), GATED)
        tl.debug_barrier()
        tl.store(states + slot * slot_stride + k * channels + i, value, mask=inside)


def convolve(
    rows: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, moves: DeviceMoves, *, gated: bool
) -> Tensor:
    """Returns the outputs of a step's tokens and writes states, see the module. `gated`: which of the two."""
    assert rows.stride(1) == states.stride(-1) == 1, "rows and states must be contiguous"
    assert weight.is_contiguous(), "the weight must be contiguous"
    (size, channels), num_tokens = weight.shape, rows.shape[0]
    strides = rows.stride(0), states.stride(0), channels
    piece = min(_PIECE, power_of_two(channels))
    pieces = ceil_div(channels, piece)
    out = torch.empty((num_tokens, channels), dtype=rows.dtype, device=rows.device)
    launch(
        _convolve_kernel, (num_tokens, pieces), rows, weight, bias, states, out, moves.owners, moves.query_start_loc,
        moves.sources, moves.slots, *strides,
        warps=4, SIZE=size, PIECE=piece, BIASED=bias is not None, GATED=gated, DECODES=moves.decodes,
    )  # fmt: skip
    if not moves.decodes:
        launch(
            _keep_kernel, (moves.num_sequences, pieces), rows, states, moves.query_start_loc, moves.sources,
            moves.starts, moves.ends, moves.slots, *strides,
            warps=4, SIZE=size, PADDED=power_of_two(size - 1), PIECE=piece, GATED=gated,
        )  # fmt: skip
    return out
