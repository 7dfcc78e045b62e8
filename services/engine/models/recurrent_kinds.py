"""What layers may have in place of attention or beside it: mixers of tokens with a recurrent state, as data.

All kinds have the same properties besides their fields, so that most code does not need to know which one it is. To add
a kind, add it here, its parameters in `layout`, its reference in `layers/recurrent`, and a kernel to each backend that
computes it.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A gated short convolution, in some layers in place of attention (LFM2).

    For each of `channels` channels:

        B, C, x = parts of in(h);   y_t = C_t · (Σ_j w_j · (B · x)_{t - kernel_size + 1 + j} + bias);   out(y)

    The recurrent state is the last `kernel_size` - 1 products B · x. `in` and `out` are the matrices `mix_in` and
    `mix_out` of the layer, w and bias its `conv`.
    """

    layers: frozenset[int]
    channels: int
    kernel_size: int
    bias: bool = False

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Rows of the parts of `mix_in`."""
        return (self.channels,) * 3

    @property
    def width(self) -> int:
        """Number of inputs of `mix_out`."""
        return self.channels

    @property
    def num_gates(self) -> int:
        """Rows of `mix_gate`; 0: there is no such matrix."""
        return 0

    @property
    def num_divided(self) -> int:
        """What ranks divide among them: a number that must be a multiple of theirs."""
        return self.channels

    @property
    def state_size(self) -> int:
        """Number of float32 values of a layer's state."""
        return (self.kernel_size - 1) * self.channels

    def among(self, count: int, layers: frozenset[int]) -> "ShortConvolution":
        """Returns the part of one of `count` ranks, with its numbers of the layers."""
        return replace(self, layers=layers, channels=self.channels // count)


STATE_COLUMNS = 32
"""Columns of a tile of a `GatedDelta`'s state, which a processor takes through many tokens in its fastest memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule (arXiv 2412.06464), in some layers in place of attention (Qwen 3.5).

    `mix_in` computes queries, keys and values, which pass a convolution of each channel over `kernel_size` tokens and
    silu, and gates z of the values. `mix_gate` computes b and a, a number for each value head. Each key head serves
    consecutive value heads. A value head has a state S [key_dim, value_dim]; with q and k of length one:

        S ← exp(-exp(A_log) · softplus(a + dt_bias)) · S;   S ← S + k (sigmoid(b) · (v - Sᵀ k))ᵀ
        y = Sᵀ q / √key_dim;   mix_out(norm(y) · silu(z))

    The recurrent state of a layer is the last `kernel_size` - 1 inputs of the convolution, and then S of each head: the
    columns in tiles of `STATE_COLUMNS`, the last one padded, and of each tile the rows one after the other.
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    norm_eps: float

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return sum(self.in_widths[:3])

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Rows of the parts of `mix_in`: queries, keys, values, gates of the values."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return keys, keys, values, values

    @property
    def width(self) -> int:
        """Number of inputs of `mix_out`."""
        return self.num_value_heads * self.value_dim

    @property
    def num_gates(self) -> int:
        """Rows of `mix_gate`: b, then a."""
        return 2 * self.num_value_heads

    @property
    def num_divided(self) -> int:
        """See `ShortConvolution`."""
        return self.num_key_heads

    @property
    def state_size(self) -> int:
        """Number of float32 values of a layer's state."""
        return _state_size(self, self.num_value_heads * self.key_dim, self.value_dim)

    def among(self, count: int, layers: frozenset[int]) -> "GatedDelta":
        """See `ShortConvolution`."""
        keys, values = self.num_key_heads // count, self.num_value_heads // count
        return replace(self, layers=layers, num_key_heads=keys, num_value_heads=values)


PartNormKind = Literal["none", "plain", "weighted"]
"""Whether r, B and C of a `ChannelSpace` are normed, and whether these norms have weights."""
SpaceNormKind = Literal["gated", "before_gates", "none"]
"""Where a `StateSpace` has its norm: of the products with the gates, before them, or nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """A state space with one decay for each head (Mamba 2, arXiv 2405.21060), in some layers in place of attention.

    `mix_in` computes gates z, values x, B, C and a number d for each head. x, B and C pass a convolution of each
    channel over `kernel_size` tokens and silu. The heads of a group share B and C [state_dim]. A head has a state S
    [state_dim, head_dim]; with dt = softplus(d + dt_bias), kept within `step_limits`:

        S ← exp(-exp(A_log) · dt) · S + B (dt · x)ᵀ;   y = Sᵀ C + D · x;   mix_out(norm(y · silu(z)))

    The norm, of all heads of a group together, may precede the gates, mix_out(norm(y) · silu(z)), or be left out. The
    recurrent state of a layer is the last `kernel_size` - 1 inputs of the convolution, and then S of each head: the
    columns in tiles of `STATE_COLUMNS`, the last one padded, and of each tile the rows one after the other.
    """

    layers: frozenset[int]
    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    """Divides `num_heads`: the heads of a group are consecutive."""
    kernel_size: int
    norm_eps: float
    bias: bool = False
    """Whether `mix_in` and `mix_out` have biases."""
    conv_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    norm: SpaceNormKind = "gated"
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on z, x, B, C and d. Those on x, B and C are in the weights of the convolution."""
    out_scale: float = 1.0
    """Factor on the inputs of `mix_out`, which is in the weights of the norm."""

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return sum(self.in_widths[1:4])

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Rows of the parts of `mix_in`: z, x, B, C, d."""
        shared = self.num_groups * self.state_dim
        return self.width, self.width, shared, shared, self.num_heads

    @property
    def width(self) -> int:
        """Number of inputs of `mix_out`."""
        return self.num_heads * self.head_dim

    @property
    def num_gates(self) -> int:
        """See `ShortConvolution`."""
        return 0

    @property
    def num_divided(self) -> int:
        """See `ShortConvolution`."""
        return self.num_groups

    @property
    def state_size(self) -> int:
        """Number of float32 values of a layer's state."""
        return _state_size(self, self.num_heads * self.state_dim, self.head_dim)

    def among(self, count: int, layers: frozenset[int]) -> "StateSpace":
        """See `ShortConvolution`."""
        return replace(self, layers=layers, num_heads=self.num_heads // count, num_groups=self.num_groups // count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpace:
    """A state space with decays of its own for each channel (Mamba 1, arXiv 2312.00752), in place of attention.

    `mix_in` computes values x and gates z of each channel. x pass a convolution of each channel over `kernel_size`
    tokens and silu. Of them `mix_select` computes r [step_rank], B and C [state_dim], which may be normed. A channel
    has a state s [state_dim] and decays A_log [state_dim]; with dt = softplus(`mix_step` r + dt_bias) of the channel:

        s ← exp(-exp(A_log) · dt) · s + dt · x · B;   y = s · C + D · x;   mix_out(y · silu(z))

    The recurrent state of a layer is the last `kernel_size` - 1 inputs of the convolution, and then s of all channels,
    as the columns of a matrix with `state_dim` rows: the columns in tiles of `STATE_COLUMNS`, the last one padded, and
    of each tile the rows one after the other.
    """

    layers: frozenset[int]
    channels: int
    state_dim: int
    step_rank: int
    kernel_size: int
    part_norms: PartNormKind = "none"
    norm_eps: float = 1e-6
    bias: bool = False
    """Whether `mix_in` and `mix_out` have biases."""
    conv_bias: bool = True

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Rows of the parts of `mix_in`: x, z."""
        return self.channels, self.channels

    @property
    def select_widths(self) -> tuple[int, ...]:
        """Rows of the parts of `mix_select`: r, B, C."""
        return self.step_rank, self.state_dim, self.state_dim

    @property
    def width(self) -> int:
        """Number of inputs of `mix_out`."""
        return self.channels

    @property
    def num_gates(self) -> int:
        """See `ShortConvolution`."""
        return 0

    @property
    def num_divided(self) -> int:
        """See `ShortConvolution`."""
        return self.channels

    @property
    def state_size(self) -> int:
        """Number of float32 values of a layer's state."""
        return _state_size(self, self.state_dim, self.channels)

    def among(self, count: int, layers: frozenset[int]) -> "ChannelSpace":
        """See `ShortConvolution`."""
        return replace(self, layers=layers, channels=self.channels // count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDelta:
    """Linear attention by the delta rule with a decay for each dimension of keys (Kimi Delta Attention).

    As `GatedDelta` (arXiv 2510.26692), but `mix_in` computes queries, keys and values of equally many heads, and of
    narrow vectors f and g [rank] of a token `mix_decay` and `mix_out_gate` compute the numbers a of the decays
    [heads, key_dim] and the gates z [heads, value_dim]. `mix_gate` computes f, g, and b, a number for each head:

        S ← exp(-exp(A_log) · softplus(a + dt_bias)) ∘ S;   S ← S + k (sigmoid(b) · (v - Sᵀ k))ᵀ
        y = Sᵀ q / √key_dim;   mix_out(norm(y) · sigmoid(z))

    Each row of S has a factor of its own. The layout of the recurrent state is that of `GatedDelta`.
    """

    layers: frozenset[int]
    num_heads: int
    key_dim: int
    value_dim: int
    rank: int
    kernel_size: int
    norm_eps: float

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return sum(self.in_widths)

    @property
    def in_widths(self) -> tuple[int, ...]:
        """Rows of the parts of `mix_in`: queries, keys, values."""
        keys = self.num_heads * self.key_dim
        return keys, keys, self.width

    @property
    def gate_widths(self) -> tuple[int, ...]:
        """Rows of the parts of `mix_gate`: f, g, b."""
        return self.rank, self.rank, self.num_heads

    @property
    def width(self) -> int:
        """Number of inputs of `mix_out`."""
        return self.num_heads * self.value_dim

    @property
    def num_gates(self) -> int:
        """Rows of `mix_gate`."""
        return sum(self.gate_widths)

    @property
    def num_divided(self) -> int:
        """See `ShortConvolution`. The vectors of `mix_gate` are not divided."""
        return 1

    @property
    def state_size(self) -> int:
        """Number of float32 values of a layer's state."""
        return _state_size(self, self.num_heads * self.key_dim, self.value_dim)

    def among(self, count: int, layers: frozenset[int]) -> "ChannelDelta":
        """See `ShortConvolution`."""
        assert count == 1
        return replace(self, layers=layers)


Recurrent = ShortConvolution | GatedDelta | StateSpace | ChannelSpace | ChannelDelta


def _state_size(mixer: Recurrent, rows: int, columns: int) -> int:
    """Number of float32 values of the last inputs of the convolution and of a matrix whose columns are in tiles."""
    tiles = -(-columns // STATE_COLUMNS)
    return (mixer.kernel_size - 1) * mixer.channels + rows * tiles * STATE_COLUMNS
