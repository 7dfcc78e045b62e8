"""The delta rules against the reference: steps of every kind, sizes of heads, types, and their convolution."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.recurrent.convolution import convolve
from antiphon.services.engine.backends.triton.kernels.recurrent.delta import attend_delta, finish_delta
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import put_moves
from antiphon.services.engine.kernels.recurrent.convolution import causal_convolution
from antiphon.services.engine.kernels.recurrent.delta_rule import delta_rule, normalised
from antiphon.services.engine.kernels.recurrent.moves import StateMoves
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.models.recurrent_kinds import STATE_COLUMNS, ChannelDelta, GatedDelta
from tests.unit.engine.backends.triton.close import assert_close
from tests.unit.engine.backends.triton.moves import DECODES, MIXED, NUM_SLOTS, Share, moves_of, put

SHAPE = GatedDelta(
    layers=frozenset({0}), num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, kernel_size=4, norm_eps=1e-6
)
BY_ROW = ChannelDelta(
    layers=frozenset({0}), num_heads=3, key_dim=16, value_dim=24, rank=5, kernel_size=4, norm_eps=1e-6
)
SHAPES = {
    "heads alike": replace(SHAPE, num_value_heads=2),
    "three for one": replace(SHAPE, num_key_heads=1, num_value_heads=3),
    "wide": replace(SHAPE, key_dim=40, value_dim=72),
    "decays of each dimension": BY_ROW,
    "decays of each dimension, wide": replace(BY_ROW, key_dim=40, value_dim=72),
}


class Layer:
    def __init__(self, shape: GatedDelta | ChannelDelta = SHAPE, dtype: torch.dtype = torch.float32) -> None:
        self.random = torch.Generator().manual_seed(3)
        self.shape, self.dtype = shape, dtype
        self.by_row, self.heads = isinstance(shape, ChannelDelta), shape.width // shape.value_dim
        self.kernel = self.normal(shape.channels, shape.kernel_size).to(dtype)
        self.norm = self.normal(shape.value_dim).to(dtype)
        self.decay = -self.normal(self.heads).exp()
        self.decay_bias = self.normal(self.heads, *([shape.key_dim] if self.by_row else []))
        self.states = self.normal(NUM_SLOTS, shape.state_size)
        self.first = (shape.kernel_size - 1) * shape.channels

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def tiles(self, states: Tensor) -> Tensor:
        """The columns of each head's state, [slots, heads, key_dim, columns]."""
        parts = states[:, self.first :].unflatten(1, (self.heads, -1, self.shape.key_dim, STATE_COLUMNS))
        return parts.transpose(2, 3).flatten(3)

    def projected(self, num_tokens: int) -> Tensor:
        return self.normal(num_tokens, sum(self.shape.in_widths)).to(self.dtype)

    def gates(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """b of each head and a, parts of wider rows. The first a is beyond where softplus is its argument."""
        count = self.heads * (self.shape.key_dim if self.by_row else 1)
        found = self.normal(num_tokens, self.heads + count) * 3
        found[0, -1] = 30.0
        betas, speeds = found.to(self.dtype).split((self.heads, count), dim=1)
        return betas, speeds

    def attended(
        self, mixed: Tensor, gates: tuple[Tensor, Tensor], moves: StateMoves, states: Tensor, capacity: int = 0
    ) -> Tensor:
        every = put_moves(moves, put, capacity)
        return attend_delta(self.shape, mixed, *gates, self.decay, self.decay_bias, states, every)

    def reference(self, mixed: Tensor, gates: tuple[Tensor, Tensor], moves: StateMoves, states: Tensor) -> Tensor:
        g = self.shape
        queries, keys, values = (
            x.unflatten(1, (-1, width))
            for x, width in zip(
                mixed.to(torch.float32).split(g.in_widths[:3], dim=1), (g.key_dim, g.key_dim, g.value_dim), strict=True
            )
        )
        repeats = values.shape[1] // keys.shape[1]
        queries, keys = (normalised(x).repeat_interleave(repeats, dim=1) for x in (queries, keys))
        beta, speed = (x.to(torch.float32).unflatten(1, (self.heads, -1)) for x in gates)
        bias = self.decay_bias.unflatten(0, (self.heads, -1)).flatten(1)
        return delta_rule(
            queries * g.key_dim**-0.5,
            keys,
            values,
            torch.exp(self.decay[:, None] * F.softplus(speed + bias)),
            beta[:, :, 0].sigmoid(),
            moves,
            states[:, self.first :].unflatten(1, (self.heads, -1, g.key_dim, STATE_COLUMNS)),
        ).flatten(1)


def taken(gates: tuple[Tensor, Tensor], part: slice) -> tuple[Tensor, Tensor]:
    return gates[0][part], gates[1][part]


def check(layer: Layer, shares: tuple[Share, ...]) -> None:
    moves, mine, theirs = moves_of(shares), layer.states.clone(), layer.states.clone()
    count = int(moves.query_start_loc[-1])
    mixed, gates = layer.normal(count, layer.shape.channels).to(layer.dtype), layer.gates(count)
    assert_close(layer.attended(mixed, gates, moves, mine), layer.reference(mixed, gates, moves, theirs), factor=4)
    # Beyond the last column a tile has whatever it had, or nothing.
    tiles = (layer.tiles(states)[..., : layer.shape.value_dim] for states in (mine, theirs))
    torch.testing.assert_close(*tiles, rtol=1e-4, atol=1e-4)
    # The inputs of the convolution are not its part of the slot.
    assert torch.equal(mine[:, : layer.first], layer.states[:, : layer.first])


@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_heads(name: str, shares: tuple[Share, ...]) -> None:
    check(Layer(SHAPES[name]), shares)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [SHAPE, BY_ROW], ids=["decays of heads", "decays of each dimension"])
def test_types(shape: GatedDelta | ChannelDelta, dtype: torch.dtype) -> None:
    check(Layer(shape, dtype), MIXED)


@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_its_convolution_has_a_part_of_each_slot(shares: tuple[Share, ...]) -> None:
    layer, moves = Layer(), moves_of(shares)
    mine, theirs = layer.states.clone(), layer.states.clone()
    projected = layer.projected(int(moves.query_start_loc[-1]))
    inputs = projected[:, : layer.shape.channels]
    ours = convolve(inputs, layer.kernel.t().contiguous(), None, mine, put_moves(moves, put), gated=False)
    past = theirs[:, : layer.first].unflatten(1, (-1, layer.shape.channels))
    assert_close(ours, F.silu(causal_convolution(inputs, layer.kernel, None, moves, past)))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, BY_ROW], ids=["silu", "sigmoid"])
def test_what_was_read_is_normed_and_gated(shape: GatedDelta | ChannelDelta, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    attended, gates = layer.normal(5, shape.width), layer.normal(5, 3 + shape.width).to(dtype)[:, 3:]
    heads = attended.unflatten(1, (-1, shape.value_dim))
    z = gates.to(torch.float32).view_as(heads)
    factors = z.sigmoid() if layer.by_row else F.silu(z)
    expected = layer.norm.to(torch.float32) * rms_norm(heads, None, shape.norm_eps) * factors
    assert_close(finish_delta(shape, attended, gates, layer.norm), expected.flatten(1).to(dtype))


@pytest.mark.parametrize("shape", [SHAPE, BY_ROW], ids=["decays of heads", "decays of each dimension"])
def test_a_sequence_in_pieces_gets_the_bits_of_a_sequence_at_once(shape: GatedDelta | ChannelDelta) -> None:
    layer = Layer(shape)
    mixed, gates = layer.normal(9, layer.shape.channels), layer.gates(9)
    whole, parts = layer.states.clone(), layer.states.clone()
    at_once = layer.attended(mixed, gates, moves_of((Share(9, -1, ((9, 0),)),)), whole)
    pieces, first = list[Tensor](), 0
    for count in (2, 1, 1, 4, 1):
        part, shares = slice(first, first + count), (Share(count, 0 if first else -1, ((count, 0),)),)
        pieces.append(layer.attended(mixed[part], taken(gates, part), moves_of(shares), parts))
        first += count
    assert torch.equal(torch.cat(pieces), at_once)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("shape", [SHAPE, BY_ROW], ids=["decays of heads", "decays of each dimension"])
def test_the_padding_of_a_captured_graph_writes_nothing(shape: GatedDelta | ChannelDelta) -> None:
    layer, moves = Layer(shape), moves_of(DECODES)
    mine, theirs = layer.states.clone(), layer.states.clone()
    mixed, gates = layer.normal(8, layer.shape.channels), layer.gates(8)
    padded = layer.attended(mixed, gates, moves, mine, capacity=8)
    assert torch.equal(padded[:3], layer.attended(mixed[:3], taken(gates, slice(3)), moves, theirs))
    assert bool(padded.isfinite().all())
    assert torch.equal(mine, theirs)
