"""The convolution of recurrent layers against the reference: steps of every kind, slots read and written, types."""

import pytest
import torch
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.recurrent.convolution import convolve
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import NO_MOVES, put_moves
from antiphon.services.engine.kernels.recurrent.convolution import causal_convolution
from antiphon.services.engine.kernels.recurrent.moves import StateMoves
from tests.unit.engine.backends.triton.close import assert_close
from tests.unit.engine.backends.triton.moves import DECODES, MIXED, NUM_SLOTS, Share, moves_of, put


class Layer:
    def __init__(
        self, size: int = 3, channels: int = 40, dtype: torch.dtype = torch.float32, bias: bool = True
    ) -> None:
        self.random = torch.Generator().manual_seed(size)
        self.channels, self.dtype = channels, dtype
        self.kernel = self.normal(channels, size).to(dtype)
        self.bias = self.normal(channels).to(dtype) if bias else None
        self.states = self.normal(NUM_SLOTS, size - 1, channels)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def mixed(self, num_tokens: int) -> Tensor:
        return self.normal(num_tokens, 3 * self.channels).to(self.dtype)

    def ours(self, mixed: Tensor, moves: StateMoves, states: Tensor, capacity: int = 0) -> Tensor:
        device_moves = put_moves(moves, put, capacity)
        return convolve(mixed, self.kernel.t().contiguous(), self.bias, states, device_moves, gated=True)

    def reference(self, mixed: Tensor, moves: StateMoves, states: Tensor) -> Tensor:
        gate_in, gate_out, values = mixed.to(torch.float32).chunk(3, dim=1)
        products = causal_convolution(gate_in * values, self.kernel, self.bias, moves, states)
        return (gate_out * products).to(self.dtype)


def check(layer: Layer, shares: tuple[Share, ...]) -> None:
    moves, mine, theirs = moves_of(shares), layer.states.clone(), layer.states.clone()
    mixed = layer.mixed(int(moves.query_start_loc[-1]))
    assert_close(layer.ours(mixed, moves, mine), layer.reference(mixed, moves, theirs))
    # What is kept of a token is exact, and what is not written stays.
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_sizes_of_the_kernel(size: int, shares: tuple[Share, ...]) -> None:
    check(Layer(size), shares)


@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype, shares: tuple[Share, ...]) -> None:
    check(Layer(dtype=dtype, bias=False), shares)


@pytest.mark.parametrize("shares", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_more_channels_than_a_program_takes(shares: tuple[Share, ...]) -> None:
    check(Layer(channels=1030), shares)


def test_a_sequence_in_pieces_gets_the_bits_of_a_sequence_at_once() -> None:
    layer = Layer(size=4)
    mixed = layer.mixed(11)
    whole, parts = layer.states.clone(), layer.states.clone()
    at_once = layer.ours(mixed, moves_of((Share(11, -1, ((11, 0),)),)), whole)
    pieces, first = list[Tensor](), 0
    for count in (2, 1, 1, 4, 1, 2):
        shares = (Share(count, 0 if first else -1, ((count, 0),)),)
        pieces.append(layer.ours(mixed[first : first + count], moves_of(shares), parts))
        first += count
    assert torch.equal(torch.cat(pieces), at_once)
    assert torch.equal(parts, whole)


def test_the_padding_of_a_captured_graph_writes_nothing() -> None:
    layer = Layer()
    moves, mine, theirs = moves_of(DECODES), layer.states.clone(), layer.states.clone()
    mixed = layer.mixed(8)
    mine_out = layer.ours(mixed, moves, mine, capacity=8)
    assert torch.equal(mine_out[:3], layer.ours(mixed[:3].contiguous(), moves, theirs))
    assert torch.equal(mine, theirs)


def test_a_step_without_sequences_computes_nothing() -> None:
    layer = Layer()
    states = layer.states.clone()
    layer.ours(layer.mixed(2), NO_MOVES, states, capacity=2)
    assert torch.equal(states, layer.states)
