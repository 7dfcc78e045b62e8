"""What a decoder is made of, as data: the one vocabulary that families write and that every backend reads.

A family file turns a config.json into a `DecoderDescription`; the forward pass (`decoder.py`) and faster backends know
nothing of families. A detail that some family needs and the description cannot say is a new field here, not a branch on
a family's name.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ActivationKind = Literal["silu"]
NormKind = Literal["rms"]
DtypeName = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary position embedding. The fields from `factor` on matter only to the kinds that scale."""

    rotary_dim: int
    """Dimensions of a head that rotate, the first ones; even, at most the head's."""
    theta: float = 10_000.0
    interleaved: bool = False
    """Pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2)."""
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length of the training before it was stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds the bounds of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Scale of the cosines and sines."""


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """A pre-norm decoder: per layer, attention and a gated MLP, each with a residual connection around it."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`: each serves a group of query heads."""
    head_dim: int
    intermediate_size: int
    max_positions: int
    """Longest context that the model is made for, scaling of the positions included."""
    rope: RopeParameters
    dtype: DtypeName
    """Type of the checkpoint's weights."""
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    activation: ActivationKind = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head before they rotate."""
    sliding_windows: tuple[int | None, ...] = ()
    """For each layer the tokens that a query sees, itself included; None: all before it."""
    tied_embeddings: bool = False
    """The output projection is the embedding matrix."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.sliding_windows) == self.num_layers

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads have the same."""
        return self.num_kv_heads * self.head_dim
