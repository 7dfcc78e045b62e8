"""State spaces (Mamba 1 and 2): states with a row for each number of B and C; formulas as in `models/recurrent_kinds`.

    `StateSpace`     values x, B and C are in one row, mixed [num_tokens, channels], after their convolution and silu.
                     steps d [num_tokens, heads]; a head has a matrix [state_dim, head_dim], a decay, D and dt_bias
    `ChannelSpace`   values x [num_tokens, channels], after their convolution and silu; selected [num_tokens,
                     step_rank + 2 state_dim] with r, B, C; steps [num_tokens, channels]. All channels are the columns
                     of one matrix [state_dim, channels], and each has decays [state_dim], D and dt_bias

    states   [slots, state size] float32, which end with the matrices, in tiles of columns

    scan     one program takes a tile of a matrix through the tokens of a sequence, one after the other, so that the
             result does not depend on how a sequence's tokens are divided among steps. It gives y [num_tokens, width]:
             of a `StateSpace` float32, of a `ChannelSpace` already multiplied by silu of its gates
    gate     one program multiplies what the heads of a group give for a token by silu of gates, and norms it
    parts    one program norms r, B or C of a token, in place

A state may be written to the slot that was read; a program reads its tile before it writes it, and no other program has
the same one. Everything is computed in float32 and what `scan` or `gate` gives is rounded once. Rows may be further
apart than they are wide, but for those of x and mixed.

References: `kernels/recurrent/state_space`, `kernels/recurrent/channel_space`, arXiv 2405.21060, arXiv 2312.00752.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import activate, softplus
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import DeviceMoves
from antiphon.services.engine.backends.triton.kernels.runtime import LOG2E, ceil_div, launch, power_of_two
from antiphon.services.engine.models.recurrent_kinds import STATE_COLUMNS, ChannelSpace, StateSpace


@triton.jit
def _scan_kernel(
    values, inner, outer, steps, gates, decays, step_biases, skips, states, out,
    query_start_loc, sources, starts, ends, slots,
    value_stride, inner_stride, step_stride, gate_stride, slot_stride, first_state, step_scale, least, most,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, STATE_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    j = tile * COLUMNS + column
    in_state, in_head = i < STATE_DIM, j < DIM
    # The last tile is padded in the slots, too.
    inside = (i[:, None] < STATE_DIM) & (column[None, :] < COLUMNS)
    first_row = (head * tl.num_programs(2) + tile) * STATE_DIM
    places = states + first_state + (first_row + i[:, None]) * COLUMNS + column[None, :]
    shared, own = head // PER_GROUP * STATE_DIM + i, head * DIM + j
    if CHANNELS:
        in_matrix = in_state[:, None] & in_head[None, :]
        decay = tl.load(decays + i[:, None] * DIM + j[None, :], mask=in_matrix, other=0.0)
    else:
        decay = tl.load(decays + head)
    # Each column of the state has a step, a bias and D, or all of them have one.
    which = j if CHANNELS else head
    known = in_head if CHANNELS else True
    bias = tl.load(step_biases + which, mask=known, other=0.0)
    skip = tl.load(skips + which, mask=known, other=0.0)
    source = tl.load(sources + sequence).to(tl.int64)
    state = tl.load(places + source * slot_stride, mask=inside & (source >= 0), other=0.0)
    tl.debug_barrier()
    first = tl.load(query_start_loc + sequence).to(tl.int64)
    for each in range(tl.load(starts + sequence), tl.load(starts + sequence + 1)):
        end, slot = tl.load(ends + each).to(tl.int64), tl.load(slots + each).to(tl.int64)
        for token in range(first, end):
            x = tl.load(values + token * value_stride + own, mask=in_head, other=0.0).to(tl.float32)
            b = tl.load(inner + token * inner_stride + shared, mask=in_state, other=0.0).to(tl.float32)
            c = tl.load(outer + token * inner_stride + shared, mask=in_state, other=0.0).to(tl.float32)
            d = tl.load(steps + token * step_stride + which, mask=known, other=0.0).to(tl.float32)
            dt = tl.minimum(tl.maximum(softplus(d * step_scale + bias), least), most)
            state *= tl.exp2(decay * (dt[None, :] if CHANNELS else dt) * LOG2E)
            state += b[:, None] * (dt * x)[None, :]
            y = tl.sum(state * c[:, None], 0) + skip * x
            if CHANNELS:
                z = tl.load(gates + token * gate_stride + own, mask=in_head, other=0.0).to(tl.float32)
                y *= activate(z, "silu")
            tl.store(out + token * HEADS * DIM + own, y.to(out.dtype.element_ty), mask=in_head)
        tl.store(places + slot * slot_stride, state, mask=inside & (slot >= 0))
        first = end


@triton.jit
def _gate_kernel(
    read, gates, weight, out, row_stride, eps, gate_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, PADDED)
    inside, place = i < WIDTH, group * WIDTH + i
    row = token * tl.num_programs(1) * WIDTH
    y = tl.load(read + row + place, mask=inside, other=0.0)
    gate = tl.load(gates + token * row_stride + place, mask=inside, other=0.0).to(tl.float32) * gate_scale
    if NORM == "gated":
        y *= activate(gate, "silu")
    if NORM != "none":
        y *= 1.0 / tl.sqrt(tl.sum(y * y, 0) / WIDTH + eps)
    if NORM != "gated":
        y *= activate(gate, "silu")
    y *= tl.load(weight + place, mask=inside, other=0.0)
    tl.store(out + row + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _parts_kernel(
    selected, weight, row_stride, eps,
    RANK: tl.constexpr, STATE_DIM: tl.constexpr, PADDED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = tl.where(part == 0, RANK, STATE_DIM)
    i = tl.arange(0, PADDED)
    inside, place = i < width, tl.where(part == 0, 0, RANK + (part - 1) * STATE_DIM) + i
    x = tl.load(selected + token * row_stride + place, mask=inside, other=0.0).to(tl.float32)
    x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    if WEIGHTED:
        x *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(selected + token * row_stride + place, x.to(selected.dtype.element_ty), mask=inside)


def scan_heads(
    shape: StateSpace, mixed: Tensor, steps: Tensor, decay: Tensor, step_bias: Tensor, skip: Tensor, states: Tensor,
    moves: DeviceMoves,
) -> Tensor:  # fmt: skip
    """Returns y of a step's tokens [num_tokens, width] float32, and writes states, see the module.

    `decay`: -exp(A_log), `step_bias`: dt_bias, and `skip`: D, [heads] float32.
    """
    assert mixed.is_contiguous(), "the rows must be contiguous"
    assert steps.stride(1) == states.stride(1) == 1, "rows must be contiguous"
    out = torch.empty((mixed.shape[0], shape.width), dtype=torch.float32, device=mixed.device)
    launch(
        _scan_kernel, (moves.num_sequences, shape.num_heads, ceil_div(shape.head_dim, STATE_COLUMNS)),
        mixed, mixed[:, shape.width :], mixed[:, shape.width + shape.in_widths[2] :], steps, None, decay, step_bias,
        skip, states, out, moves.query_start_loc, moves.sources, moves.starts, moves.ends, moves.slots,
        mixed.stride(0), mixed.stride(0), steps.stride(0), 0, states.stride(0),
        (shape.kernel_size - 1) * shape.channels, shape.scales[4], *shape.step_limits,
        warps=4, HEADS=shape.num_heads, PER_GROUP=shape.num_heads // shape.num_groups, DIM=shape.head_dim,
        STATE_DIM=shape.state_dim, ROWS=power_of_two(shape.state_dim), COLUMNS=STATE_COLUMNS, CHANNELS=False,
    )  # fmt: skip
    return out


def gate_heads(shape: StateSpace, read: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    """Returns the inputs of the layer's `mix_out`, in the type of the gates z. `weight`: the norm's [width] float32."""
    assert gates.stride(1) == 1, "rows must be contiguous"
    out, width = torch.empty(read.shape, dtype=gates.dtype, device=gates.device), shape.width // shape.num_groups
    padded = power_of_two(width)
    launch(
        _gate_kernel, (read.shape[0], shape.num_groups),
        read, gates, weight, out, gates.stride(0), shape.norm_eps, shape.scales[0],
        warps=min(16, max(1, padded // 512)), WIDTH=width, PADDED=padded, NORM=shape.norm,
    )  # fmt: skip
    return out


def norm_parts(shape: ChannelSpace, selected: Tensor, weight: Tensor | None) -> None:
    """Norms r, B and C, of which the rows consist, each on its own, in place. `weight` [step_rank + 2 state_dim]."""
    assert selected.stride(1) == 1, "rows must be contiguous"
    launch(
        _parts_kernel, (selected.shape[0], 3), selected, weight, selected.stride(0), shape.norm_eps,
        warps=1, RANK=shape.step_rank, STATE_DIM=shape.state_dim,
        PADDED=power_of_two(max(shape.select_widths)), WEIGHTED=weight is not None,
    )  # fmt: skip


def scan_channels(
    shape: ChannelSpace, values: Tensor, selected: Tensor, steps: Tensor, gates: Tensor, decay: Tensor,
    step_bias: Tensor, skip: Tensor, states: Tensor, moves: DeviceMoves,
) -> Tensor:  # fmt: skip
    """Returns the inputs of the layer's `mix_out`, in the type of the values, and writes states, see the module.

    `decay`: -exp(A_log) [state_dim, channels]; `step_bias`: dt_bias, and `skip`: D, [channels]; all float32.
    """
    assert decay.is_contiguous(), "the decays must be contiguous"
    assert selected.stride(1) == steps.stride(1) == gates.stride(1) == states.stride(1) == 1, "rows must be contiguous"
    out = torch.empty((len(values), shape.channels), dtype=values.dtype, device=values.device)
    rows, first = power_of_two(shape.state_dim), shape.step_rank
    launch(
        _scan_kernel, (moves.num_sequences, 1, ceil_div(shape.channels, STATE_COLUMNS)),
        values, selected[:, first:], selected[:, first + shape.state_dim :], steps, gates, decay, step_bias, skip,
        states, out, moves.query_start_loc, moves.sources, moves.starts, moves.ends, moves.slots,
        values.stride(0), selected.stride(0), steps.stride(0), gates.stride(0), states.stride(0),
        (shape.kernel_size - 1) * shape.channels, 1.0, 0.0, float("inf"),
        warps=1 if rows <= 32 else 4, HEADS=1, PER_GROUP=1, DIM=shape.channels, STATE_DIM=shape.state_dim, ROWS=rows,
        COLUMNS=STATE_COLUMNS, CHANNELS=True,
    )  # fmt: skip
    return out
