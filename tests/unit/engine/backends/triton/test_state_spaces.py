"""State spaces against the reference: steps of every kind, sizes of heads and states, norms, types, small steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.recurrent.convolution import convolve
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import NO_MOVES, put_moves
from antiphon.services.engine.backends.triton.kernels.recurrent.state_space import (
    gate_heads,
    norm_parts,
    scan_channels,
    scan_heads,
)
from antiphon.services.engine.kernels.recurrent.channel_space import channel_space
from antiphon.services.engine.kernels.recurrent.convolution import causal_convolution
from antiphon.services.engine.kernels.recurrent.moves import StateMoves
from antiphon.services.engine.kernels.recurrent.state_space import state_space
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.models.recurrent_kinds import STATE_COLUMNS, ChannelSpace, SpaceNormKind, StateSpace
from tests.unit.engine.backends.triton.close import assert_close
from tests.unit.engine.backends.triton.moves import DECODES, MIXED, NUM_SLOTS, Share, moves_of, put

HEADS = StateSpace(
    layers=frozenset({0}), num_heads=4, head_dim=16, state_dim=8, num_groups=2, kernel_size=4, norm_eps=1e-5
)
CHANNELS = ChannelSpace(layers=frozenset({0}), channels=40, state_dim=8, step_rank=5, kernel_size=4)
SHAPES = {
    "heads": HEADS,
    "one group, padded states": replace(HEADS, num_groups=1, num_heads=3, state_dim=37),
    "heads of two tiles": replace(HEADS, head_dim=48, state_dim=16),
    "scaled steps with limits": replace(HEADS, scales=(1.0, 1.0, 1.0, 1.0, 0.7), step_limits=(0.01, 0.5)),
    "channels": CHANNELS,
    "channels of whole tiles": replace(CHANNELS, channels=64, state_dim=16),
    "few channels, padded states": replace(CHANNELS, channels=7, state_dim=5),
}
Shape = StateSpace | ChannelSpace


class Layer:
    """What a layer has, and its inputs between the convolution and the gates."""

    def __init__(self, shape: Shape = HEADS, dtype: torch.dtype = torch.float32) -> None:
        self.random = torch.Generator().manual_seed(3)
        self.shape, self.dtype = shape, dtype
        self.columns = shape.num_heads if isinstance(shape, StateSpace) else shape.channels
        decays = (self.columns,) if isinstance(shape, StateSpace) else (self.columns, shape.state_dim)
        self.decay = -self.normal(*decays).exp()
        self.bias, self.skip = self.normal(self.columns), self.normal(self.columns)
        self.states = self.normal(NUM_SLOTS, shape.state_size)
        self.first = (shape.kernel_size - 1) * shape.channels

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def inputs(self, num_tokens: int) -> list[Tensor]:
        """What a scan reads: x, B and C, steps, gates. The last two are parts of wider rows.

        The first step is beyond where softplus is its argument.
        """
        s, steps = self.shape, self.normal(num_tokens, 3 + self.columns) * 3
        steps[0, -1] = 30.0
        found = [self.normal(num_tokens, s.channels), steps[:, 3:]]
        if isinstance(s, ChannelSpace):
            selected = self.normal(num_tokens, sum(s.select_widths))
            found = [found[0], selected, steps[:, 3:], self.normal(num_tokens, 2 * s.channels)[:, s.channels :]]
        return [each.to(self.dtype) for each in found]

    def tiles(self, states: Tensor) -> Tensor:
        """The columns of each state, [slots, heads, state_dim, columns], without those of the padding."""
        s = self.shape
        heads, dim = (s.num_heads, s.head_dim) if isinstance(s, StateSpace) else (1, s.channels)
        parts = states[:, self.first :].unflatten(1, (heads, -1, s.state_dim, STATE_COLUMNS))
        return parts.transpose(2, 3).flatten(3)[..., :dim]

    def scanned(self, inputs: list[Tensor], moves: StateMoves, states: Tensor, capacity: int = 0) -> Tensor:
        every = put_moves(moves, put, capacity)
        if isinstance(self.shape, StateSpace):
            mixed, steps = inputs
            return scan_heads(self.shape, mixed, steps, self.decay, self.bias, self.skip, states, every)
        values, selected, steps, gates = inputs
        vectors = self.decay.t().contiguous(), self.bias, self.skip
        return scan_channels(self.shape, values, selected, steps, gates, *vectors, states, every)

    def reference(self, inputs: list[Tensor], moves: StateMoves, states: Tensor) -> Tensor:
        s, wide = self.shape, [each.to(torch.float32) for each in inputs]
        if isinstance(s, ChannelSpace):
            values, selected, steps, gates = wide
            _, inner, outer = selected.split(s.select_widths, dim=1)
            parts = states[:, self.first :].unflatten(1, (-1, s.state_dim, STATE_COLUMNS))
            times = F.softplus(steps + self.bias)
            read = channel_space(values, times, self.decay, inner, outer, moves, parts)
            return ((read + self.skip * values) * F.silu(gates)).to(self.dtype)
        mixed, steps = wide
        values, inner, outer = (
            x.unflatten(1, (-1, width))
            for x, width in zip(
                mixed.split(s.in_widths[1:4], dim=1), (s.head_dim, s.state_dim, s.state_dim), strict=True
            )
        )
        inner, outer = (x.repeat_interleave(s.num_heads // s.num_groups, dim=1) for x in (inner, outer))
        times = F.softplus(steps * s.scales[4] + self.bias).clamp(*s.step_limits)
        parts = states[:, self.first :].unflatten(1, (s.num_heads, -1, s.state_dim, STATE_COLUMNS))
        read = state_space(values * times[:, :, None], torch.exp(self.decay * times), inner, outer, moves, parts)
        return (read + self.skip[:, None] * values).flatten(1)


def check(layer: Layer, shares: tuple[Share, ...]) -> None:
    moves, mine, theirs = moves_of(shares), layer.states.clone(), layer.states.clone()
    inputs = layer.inputs(int(moves.query_start_loc[-1]))
    assert_close(layer.scanned(inputs, moves, mine), layer.reference(inputs, moves, theirs), factor=4)
    torch.testing.assert_close(layer.tiles(mine), layer.tiles(theirs), rtol=1e-4, atol=1e-4)
    # The inputs of the convolution are not its part of the slot.
    assert torch.equal(mine[:, : layer.first], layer.states[:, : layer.first])


@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, shares: tuple[Share, ...]) -> None:
    check(Layer(SHAPES[name]), shares)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [HEADS, CHANNELS], ids=["heads", "channels"])
def test_types(shape: Shape, dtype: torch.dtype) -> None:
    check(Layer(shape, dtype), MIXED)


@pytest.mark.parametrize("shape", [HEADS, CHANNELS], ids=["heads", "channels"])
def test_what_small_steps_add_has_the_precision_of_what_large_ones_add(shape: Shape) -> None:
    layer, moves = Layer(shape), moves_of((Share(3, -1, ((3, 0),)),))
    layer.bias, layer.skip = layer.bias - 12.0, torch.zeros_like(layer.skip)
    inputs = layer.inputs(3)
    steps = inputs[1 if isinstance(shape, StateSpace) else 2]
    steps.clamp_(max=3.0)
    mine, theirs = layer.states.clone(), layer.states.clone()
    layer.scanned(inputs, moves, mine)
    layer.reference(inputs, moves, theirs)
    # Sums of three products, which may cancel each other.
    torch.testing.assert_close(layer.tiles(mine)[0], layer.tiles(theirs)[0], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("shape", [HEADS, CHANNELS], ids=["heads", "channels"])
def test_a_sequence_in_pieces_gets_the_bits_of_a_sequence_at_once(shape: Shape) -> None:
    layer = Layer(shape)
    inputs, whole, parts = layer.inputs(9), layer.states.clone(), layer.states.clone()
    at_once = layer.scanned(inputs, moves_of((Share(9, -1, ((9, 0),)),)), whole)
    pieces, first = list[Tensor](), 0
    for count in (2, 1, 1, 4, 1):
        shares = (Share(count, 0 if first else -1, ((count, 0),)),)
        pieces.append(layer.scanned([each[first : first + count] for each in inputs], moves_of(shares), parts))
        first += count
    assert torch.equal(torch.cat(pieces), at_once)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("shape", [HEADS, CHANNELS], ids=["heads", "channels"])
def test_the_padding_of_a_captured_graph_writes_nothing(shape: Shape) -> None:
    layer, moves = Layer(shape), moves_of(DECODES)
    inputs, mine, theirs = layer.inputs(8), layer.states.clone(), layer.states.clone()
    padded = layer.scanned(inputs, moves, mine, capacity=8)
    assert torch.equal(padded[:3], layer.scanned([each[:3] for each in inputs], moves, theirs))
    assert bool(padded.isfinite().all())
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("shape", [HEADS, CHANNELS], ids=["heads", "channels"])
def test_a_step_without_sequences_writes_nothing(shape: Shape) -> None:
    layer = Layer(shape)
    states = layer.states.clone()
    layer.scanned(layer.inputs(2), NO_MOVES, states, capacity=2)
    assert torch.equal(states, layer.states)


@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("biased", [False, True])
def test_their_convolution_reads_a_part_of_each_row_and_may_have_a_bias(
    biased: bool, shares: tuple[Share, ...]
) -> None:
    layer, moves = Layer(), moves_of(shares)
    s, mine, theirs = layer.shape, layer.states.clone(), layer.states.clone()
    inputs = layer.normal(int(moves.query_start_loc[-1]), sum(HEADS.in_widths))[:, s.width : s.width + s.channels]
    kernel, bias = layer.normal(s.channels, s.kernel_size), layer.normal(s.channels) if biased else None
    ours = convolve(inputs, kernel.t().contiguous(), bias, mine, put_moves(moves, put), gated=False)
    past = theirs[:, : layer.first].unflatten(1, (-1, s.channels))
    assert_close(ours, F.silu(causal_convolution(inputs, kernel, bias, moves, past)))
    assert torch.equal(mine, theirs)


def gated(s: StateSpace, read: Tensor, z: Tensor) -> Tensor:
    gates = F.silu(z.to(torch.float32) * s.scales[0])
    norm: Callable[[Tensor], Tensor] = lambda y: rms_norm(  # noqa: E731
        y.unflatten(1, (s.num_groups, -1)), None, s.norm_eps
    ).flatten(1)
    if s.norm == "gated":
        return norm(read * gates)
    return (read if s.norm == "none" else norm(read)) * gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_groups": 1, "num_heads": 3}, {"scales": (0.4, 1.0, 1.0, 1.0, 1.0)}])
@pytest.mark.parametrize("norm", ["gated", "before_gates", "none"])
def test_gates_and_norms_of_groups(norm: SpaceNormKind, changes: dict[str, Any], dtype: torch.dtype) -> None:
    shape = replace(HEADS, norm=norm, **changes)
    layer = Layer(shape, dtype)
    read, weight = layer.normal(5, shape.width), layer.normal(shape.width)
    z = layer.normal(5, 2 * shape.width).to(dtype)[:, : shape.width]
    assert_close(gate_heads(shape, read, z, weight), (weight * gated(shape, read, z)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_are_normed_each_on_its_own(weighted: bool, dtype: torch.dtype) -> None:
    shape = replace(CHANNELS, step_rank=19, part_norms="weighted" if weighted else "plain")
    layer, width = Layer(shape, dtype), sum(shape.select_widths)
    selected, weight = layer.normal(5, width).to(dtype), layer.normal(width) if weighted else None
    parts = [rms_norm(part.to(torch.float32), None, shape.norm_eps) for part in selected.split(shape.select_widths, 1)]
    expected = torch.cat(parts, dim=1) * (1.0 if weight is None else weight)
    norm_parts(shape, selected, weight)
    assert_close(selected, expected.to(dtype))
