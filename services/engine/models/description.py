"""What a decoder is made of, as data: the one vocabulary that families write and that every backend reads.

A family file turns a config.json into a `DecoderDescription`; the forward pass (`decoder.py`) and faster backends know
nothing of families. A detail that some family needs and the description cannot say is a new field here, not a branch on
a family's name.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu"]
NormKind = Literal["rms", "rms_plus_one", "layer"]
"""`rms_plus_one` multiplies by 1 + weight; `layer` subtracts the mean too and has a bias."""
ResidualKind = Literal["sequential", "parallel", "normed"]
"""How attention and MLP meet the residual stream h; n, m, n2, m2 are norms.

    sequential  h += attention(n(h));  h += mlp(m(h))
    parallel    h += attention(n(h)) + mlp(m(h))
    normed      h += n2(attention(n(h)));  h += m2(mlp(m(h)))
"""
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
    divisors: tuple[float, ...] = ()
    """What longrope divides each frequency by."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated MLPs in place of one: a router picks some of them for each token."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    """Of one expert."""
    layers: frozenset[int]
    """The layers that have experts; the others have the ordinary MLP."""
    normalise: bool
    """The weights of a token's experts are divided by their sum."""
    shared_intermediate_size: int = 0
    """Of the expert that every token passes, behind a gate of its own; 0: there is none."""


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """A pre-norm decoder: per layer, attention and an MLP, each with a residual connection around it."""

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
    rope: RopeParameters | None
    """None: positions come in by other ways."""
    dtype: DtypeName
    """Type of the checkpoint's weights."""
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    activation: ActivationKind = "silu"
    gated_mlp: bool = True
    """down(act(gate) * up) instead of down(act(up))."""
    residual: ResidualKind = "sequential"
    shared_norm: bool = False
    """The MLP of a parallel residual reads what the attention reads, through one norm."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head before they rotate."""
    query_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    logits_softcap: float | None = None
    alibi_scale: float | None = None
    """Scores get slope * distance * this (arXiv 2108.12409); None: they do not."""
    local_rope: RopeParameters | None = None
    """The rotary embedding of layers with a window, where it is another one."""
    num_learned_positions: int = 0
    """Rows of the table of position embeddings; 0: there is none."""
    learned_position_offset: int = 0
    """Row of position 0."""
    embedding_scale: float = 1.0
    sliding_windows: tuple[int | None, ...] = ()
    """For each layer the tokens that a query sees, itself included; None: all before it."""
    tied_embeddings: bool = False
    """The output projection is the embedding matrix."""
    normalised_head: bool = False
    """The rows of the output projection have length one."""
    experts: Experts | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.sliding_windows) == self.num_layers

    def rope_of(self, layer: int) -> RopeParameters | None:
        """The rotary embedding of a layer."""
        windowed = self.sliding_windows[layer] is not None
        return self.local_rope if windowed and self.local_rope is not None else self.rope

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads have the same."""
        return self.num_kv_heads * self.head_dim
