"""The description of a decoder as data: written by the model families, read by every backend.

A family's module turns a config.json into a `DecoderDescription`; the forward pass (`decoder.py`) and the faster
backends do not depend on families. If the description cannot express a detail, add a field here instead of a branch on
a family's name.
"""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "swigluoai"]
"""`swigluoai` is for gated MLPs only, see `kernels/activation`."""
ScoringKind = Literal["softmax", "sigmoid"]
NormKind = Literal["rms", "rms_plus_one", "layer"]
"""`rms_plus_one` multiplies by 1 + weight; `layer` subtracts the mean too and has a bias."""
ResidualKind = Literal["sequential", "parallel", "normed", "post_normed"]
"""How the outputs of attention and MLP are added to the residual stream h; n, m, n2, m2 are norms.

    sequential  h += attention(n(h));  h += mlp(m(h))
    parallel    h += attention(n(h)) + mlp(m(h))
    normed      h += n2(attention(n(h)));  h += m2(mlp(m(h)))
    post_normed h += n2(attention(h));  h += m2(mlp(h))
"""
DtypeName = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Rotary position embedding. The fields from `factor` on are used only by the kinds that scale positions."""

    rotary_dim: int
    """Number of dimensions of a head that are rotated, the first ones; even, at most the head's."""
    theta: float = 10_000.0
    interleaved: bool = False
    """Whether pairs are (2i, 2i+1) instead of (i, i + rotary_dim/2)."""
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """Context length of the original training, before positions were scaled."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn rounds the bounds of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """Factor on the cosines and sines."""
    divisors: tuple[float, ...] = ()
    """Longrope: the divisor of each frequency."""
    sections: tuple[int, ...] = ()
    """For a model with images (M-RoPE): how many frequencies, in order, use a token's position in time, its row and
    its column. Empty: all frequencies use the same position. For text all three positions are equal.
    """
    interleaved_sections: bool = False
    """Whether the frequencies of the three sections alternate, instead of one section following the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of gated MLPs that replaces a single MLP: a router selects some of them for each token."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    """Intermediate size of one expert."""
    layers: frozenset[int]
    """The layers that have experts; the others have the ordinary MLP."""
    normalise: bool
    """Whether the weights of a token's experts are divided by their sum."""
    shared_intermediate_size: int = 0
    """Intermediate size of the shared expert, which every token uses; 0: there is none."""
    shared_gate: bool = True
    """Whether the output of the shared expert is multiplied by the sigmoid of its own gate."""
    scoring: ScoringKind = "softmax"
    """How the router's logits become scores. A token's experts are those with the highest scores, weighted by them."""
    correction: bool = False
    """Whether each expert has a correction that is added to its score for the selection, but not for the weight. Such a
    router is computed in float32, because it selects among scores that are close to each other.
    """
    num_groups: int = 1
    """Number of groups of consecutive experts. A group's score is the sum of its `best_of_group` highest scores."""
    num_chosen_groups: int = 1
    """Number of groups, those with the highest scores, from which a token's experts are chosen."""
    best_of_group: int = 2
    scale: float = 1.0
    """Factor on the weights, after they were divided by their sum."""
    exact_router: bool = False
    """Whether a router without correction is computed in float32 too."""
    router_bias: bool = False
    bias: bool = False
    """Whether the matrices of experts have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads follow from one row per token.

        row    [rank + rope_dim]: a normed latent, and the rotated part of the key, which all heads share
        key    of a head: [W_key latent | rotated part],  W_key [nope_dim, rank]
        value  of a head: W_value latent,                 W_value [value_dim, rank]

    The KV cache stores only the rows, as if they were one key head, and no values (`DecoderDescription.cache_parts`).
    """

    rank: int
    rope_dim: int
    nope_dim: int
    """Number of dimensions of a query or key that are not rotated; they precede the rotated ones."""
    value_dim: int
    query_rank: int = 0
    """Width of the normed latent from which queries are computed; 0: they are computed from the hidden states."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of both latents."""

    @property
    def row_size(self) -> int:
        """Width of a row in the cache."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Width of a query head, and of a key head that is computed from a row."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderDescription:
    """A decoder: each layer has attention and an MLP, each with a residual connection (`ResidualKind`)."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Divides `num_heads`: each key/value head serves a group of query heads."""
    head_dim: int
    """Width of a key head in the cache; without `latent`, of query and value heads too."""
    intermediate_size: int
    max_positions: int
    """Longest context that the model supports, with its scaling of positions."""
    rope: RopeParameters | None
    """None: the model has no rotary embedding and encodes positions in another way."""
    dtype: DtypeName
    """Type of the checkpoint's weights."""
    norm: NormKind = "rms"
    norm_bias: bool = True
    """Whether norms of the kind `layer` have a bias."""
    norm_eps: float = 1e-6
    activation: ActivationKind = "silu"
    gated_mlp: bool = True
    """Whether the MLP computes down(act(gate) * up) instead of down(act(up))."""
    residual: ResidualKind = "sequential"
    shared_norm: bool = False
    """Whether the MLP of a parallel residual uses the attention's input norm instead of its own."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before rotation."""
    whole_qk_norm: bool = False
    """Whether `qk_norm` is one norm over all query heads, and one over all key heads, in place of one per head."""
    qk_norm_rotated: bool = False
    """Whether the norms per head come after the rotation instead of before it. The rotation then has no factor."""
    query_scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap); None: no cap."""
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    """Factor on the logits, before the cap."""
    attention_sinks: bool = False
    """Whether each head of each layer may have a sink, a score without a value (see `kernels/paged_attention`)."""
    alibi_scale: float | None = None
    """ALiBi (arXiv 2108.12409): slope * distance * this number is added to the scores; None: no ALiBi."""
    local_rope: RopeParameters | None = None
    """Rotary embedding of the layers with a sliding window; None: the same as `rope`."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers without rotary embedding, in a model whose other layers have one."""
    num_learned_positions: int = 0
    """Number of rows of the position embedding table; 0: there is none."""
    learned_position_offset: int = 0
    """Row of position 0 in the position embedding table."""
    embedding_scale: float = 1.0
    rounded_embedding_scale: bool = True
    """Whether the embeddings' scale is rounded to the compute data type, as it was when checkpoints were trained."""
    sliding_windows: tuple[int | None, ...] = ()
    """For each layer, the number of tokens that a query sees, itself included; None: all tokens up to itself."""
    tied_embeddings: bool = False
    """Whether the output projection is the embedding matrix."""
    has_head: bool = True
    """Whether the checkpoint has an output projection. Without one the model computes embeddings only, and a backend
    may use the embedding matrix in its place.
    """
    normalised_head: bool = False
    """Whether the rows of the output projection are normalised to length one."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """Latent attention, whose rows are the only key head of the cache; None: ordinary attention."""
    eos_token_ids: tuple[int, ...] = ()
    other_parts: tuple[str, ...] = ()
    """Prefixes, with the dot, of checkpoint tensors that do not belong to the decoder, such as those of a vision
    encoder.
    """

    mutual_images: bool = False
    """Whether the tokens of an image attend to all tokens of this image, also to later ones."""
    image_layers: int = 0
    """Number of first layers to whose outputs further embeddings of an image's tokens are added."""

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.sliding_windows) == self.num_layers
        assert not self.qk_norm_rotated or (self.rope is not None and self.rope.attention_factor == 1.0)
        assert self.latent is None or (self.num_kv_heads, self.head_dim) == (1, self.latent.row_size)
        assert self.gated_mlp or self.activation != "swigluoai"

    def rope_of(self, layer: int) -> RopeParameters | None:
        """Returns the rotary embedding of a layer; None if the layer has none."""
        if layer in self.unrotated_layers:
            return None
        windowed = self.sliding_windows[layer] is not None
        return self.local_rope if windowed and self.local_rope is not None else self.rope

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def q_size(self) -> int:
        """Width of all query heads together, in the form that is multiplied with the cached keys."""
        return self.num_heads * self.head_dim

    @property
    def attended_size(self) -> int:
        """Width of the attention output: the values of all query heads together."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def cache_parts(self) -> int:
        """Number of tensors that a layer has in the KV cache: 2 for keys and values, 1 for latents."""
        return 2 if self.latent is None else 1

    @property
    def kv_size(self) -> int:
        """Width of all key heads together in the cache; the value heads, if it has any, have the same width."""
        return self.num_kv_heads * self.head_dim
