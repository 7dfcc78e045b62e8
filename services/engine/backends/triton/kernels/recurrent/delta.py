"""Delta rules: linear attention over a state of each value head; formulas as in `GatedDelta` and `ChannelDelta`.

    mixed     [num_tokens, channels]: queries, keys and values after their convolution and silu
    betas     [num_tokens, heads]: b of each value head
    speeds    [num_tokens, heads] or [num_tokens, heads · key_dim]: a of each value head, or of each row of its state
    states    [slots, state size] float32, which end with a matrix [key_dim, value_dim] of each value head, in tiles
    attended  [num_tokens, heads · value_dim] float32: what the queries read
    gates     [num_tokens, heads · value_dim]: z

    delta     one program takes a tile of a head's state through the tokens of a sequence, one after the other, so that
              the result does not depend on how a sequence's tokens are divided among steps
    finish    one program norms what a head has read for a token, and multiplies it by the weight and by silu or the
              sigmoid of gates

A state may be written to the slot that was read; a program reads its tile before it writes it, and no other program has
the same one. Everything is computed in float32 and the result of `finish` rounded once.

Rows of betas, speeds and gates may be further apart. Reference: `kernels/recurrent/delta_rule`, arXiv 2412.06464,
arXiv 2510.26692.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import softplus
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import DeviceMoves
from antiphon.services.engine.backends.triton.kernels.runtime import LOG2E, ceil_div, launch, power_of_two
from antiphon.services.engine.models.recurrent_kinds import STATE_COLUMNS, ChannelDelta, GatedDelta


@triton.jit
def _unit(vector):
    return vector * (1.0 / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6))


@triton.jit
def _delta_kernel(
    mixed, betas, speeds, decays, decay_biases, states, attended, query_start_loc, sources, starts, ends, slots,
    beta_stride, speed_stride, slot_stride, first_state, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    j = tile * COLUMNS + column
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    # The last tile is padded in the slots, too.
    inside = (i[:, None] < KEY_DIM) & (column[None, :] < COLUMNS)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    query = mixed + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + i
    value = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    first_row = (head * tl.num_programs(2) + tile) * KEY_DIM
    places = states + first_state + (first_row + i[:, None]) * COLUMNS + column[None, :]
    # Each row of the state has a number a, or all of them have one.
    which = head * KEY_DIM + i if BY_ROW else head
    known = in_key if BY_ROW else True
    decay, bias = tl.load(decays + head), tl.load(decay_biases + which, mask=known, other=0.0)
    source = tl.load(sources + sequence).to(tl.int64)
    state = tl.load(places + source * slot_stride, mask=inside & (source >= 0), other=0.0)
    tl.debug_barrier()
    first = tl.load(query_start_loc + sequence).to(tl.int64)
    for each in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
        end, slot = tl.load(ends + each).to(tl.int64), tl.load(slots + each).to(tl.int64)
        for token in range(first, end):
            row = token * channels
            q = _unit(tl.load(query + row, mask=in_key, other=0.0).to(tl.float32)) * scale
            k = _unit(tl.load(query + row + KEY_HEADS * KEY_DIM, mask=in_key, other=0.0).to(tl.float32))
            v = tl.load(value + row, mask=in_value, other=0.0).to(tl.float32)
            b = tl.load(betas + token * beta_stride + head).to(tl.float32)
            a = tl.load(speeds + token * speed_stride + which, mask=known, other=0.0).to(tl.float32) + bias
            kept = tl.exp2(decay * softplus(a) * LOG2E)
            state *= kept[:, None] if BY_ROW else kept
            missing = v - tl.sum(state * k[:, None], 0)
            state += k[:, None] * (missing / (1.0 + tl.exp2(-b * LOG2E)))[None, :]
            y = tl.sum(state * q[:, None], 0)
            tl.store(attended + token * VALUE_HEADS * VALUE_DIM + head * VALUE_DIM + j, y, mask=in_value)
        tl.store(places + slot * slot_stride, state, mask=inside & (slot >= 0))
        first = end


@triton.jit
def _finish_kernel(
    attended, gates, weight, out, row_stride, eps,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, PADDED)
    inside = i < VALUE_DIM
    place = head * VALUE_DIM + i
    values = tl.load(attended + token * VALUE_HEADS * VALUE_DIM + place, mask=inside, other=0.0)
    gate = tl.load(gates + token * row_stride + place, mask=inside, other=0.0).to(tl.float32)
    factor = (gate if SILU else 1.0) / (1.0 + tl.exp2(-gate * LOG2E))
    y = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / VALUE_DIM + eps))
    y *= tl.load(weight + i, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + token * VALUE_HEADS * VALUE_DIM + place, y.to(out.dtype.element_ty), mask=inside)


def attend_delta(
    shape: GatedDelta | ChannelDelta, mixed: Tensor, betas: Tensor, speeds: Tensor, decay: Tensor, decay_bias: Tensor,
    states: Tensor, moves: DeviceMoves,
) -> Tensor:  # fmt: skip
    """Returns what the queries of a step read, and writes states, see the module.

    `decay`: -exp(A_log) [heads]; `decay_bias` [heads], or [heads, key_dim] for a `ChannelDelta`; both float32.
    """
    by_row = isinstance(shape, ChannelDelta)
    key_heads, heads = (shape.num_heads,) * 2 if by_row else (shape.num_key_heads, shape.num_value_heads)
    assert mixed.is_contiguous(), "the rows must be contiguous"
    assert betas.stride(1) == speeds.stride(1) == states.stride(1) == 1, "rows must be contiguous"
    attended = torch.empty((mixed.shape[0], shape.width), dtype=torch.float32, device=mixed.device)
    launch(
        _delta_kernel, (moves.num_sequences, heads, ceil_div(shape.value_dim, STATE_COLUMNS)),
        mixed, betas, speeds, decay, decay_bias, states, attended,
        moves.query_start_loc, moves.sources, moves.starts, moves.ends, moves.slots,
        betas.stride(0), speeds.stride(0), states.stride(0), (shape.kernel_size - 1) * shape.channels,
        shape.key_dim**-0.5,
        warps=4, KEY_HEADS=key_heads, VALUE_HEADS=heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        ROWS=power_of_two(shape.key_dim), COLUMNS=STATE_COLUMNS, BY_ROW=by_row,
    )  # fmt: skip
    return attended


def finish_delta(shape: GatedDelta | ChannelDelta, attended: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """Returns the inputs of the layer's `mix_out`, in the type of the gates."""
    assert gates.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(attended.shape, dtype=gates.dtype, device=gates.device)
    padded, heads = power_of_two(shape.value_dim), shape.width // shape.value_dim
    launch(
        _finish_kernel, (attended.shape[0], heads), attended, gates, weight, out, gates.stride(0), shape.norm_eps,
        warps=1 if padded <= 128 else 4, VALUE_HEADS=heads, VALUE_DIM=shape.value_dim, PADDED=padded,
        SILU=isinstance(shape, GatedDelta),
    )  # fmt: skip
    return out
