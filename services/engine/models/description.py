"""The description of a decoder as data: written by the model families, read by every backend.

A family's module turns a config.json into a `DecoderDescription`; the forward pass (`decoder.py`) and the faster
backends do not depend on families. If the description cannot express a detail, add a field here instead of a branch on
a family's name.
"""

from dataclasses import dataclass, replace
from typing import Literal

from antiphon.services.engine.models.recurrent_kinds import Recurrent

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "swigluoai", "relu2", "xielu"]
"""See `kernels/activation`. `swigluoai` is for gated MLPs only, `xielu`, with numbers in each layer, for the others."""
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
UNSCALED = (1.0, 1.0)
"""No factors, see `DecoderDescription.mlp_scales`."""
GateKind = Literal["sigmoid", "softplus"]
"""Function of the gates on what attention gives."""
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
    long_divisors: tuple[float, ...] = ()
    """Longrope: the divisors for contexts beyond `original_max_positions`; empty: there are no others. See
    `DecoderDescription.for_context`.
    """
    num_turned: int = 0
    """Proportional: the number of frequencies, the first ones, that are not zero."""
    sections: tuple[int, ...] = ()
    """For a model with images (M-RoPE): how many frequencies, in order, use a token's position in time, its row and
    its column. Empty: all frequencies use the same position. For text all three positions are equal.
    """
    interleaved_sections: bool = False
    """Whether the frequencies of the three sections alternate, instead of one section following the other."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Factor on the queries that grows with the position: 1 + rate · log(1 + floor((position + first) / length))."""

    rate: float
    length: int
    first: int = 0
    unrotated: bool = False
    """Whether only queries of layers without rotary embedding grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of MLPs that replaces a single MLP: a router selects some of them for each token.

    They have gates if the decoder's single MLPs have them (`DecoderDescription.gated_mlp`).
    """

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
    weighted_inputs: bool = False
    """Whether a token's weights multiply the inputs of its experts instead of their outputs."""
    router_bias: bool = False
    bias: bool = False
    """Whether the matrices of experts have biases."""
    beside_mlp: bool = False
    """Whether these layers have the ordinary MLP too: h becomes norm(mlp) + norm(experts), each with a norm of its own.
    Experts and router read the residual stream through two more norms, and each expert has a factor on its weight.
    """
    latent_size: int = 0
    """Width of the inputs and outputs of experts, between which and the hidden states two matrices convert,
    `experts.in` and `experts.out`, which all but the shared expert have in common; 0: they have the hidden states.
    """


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
class LayerInputs:
    """Inputs that each layer has besides the residual stream h: per-layer embeddings, [layers, size] of each token.

    inputs = (norm(W h0 / sqrt(hidden)) + table[id] * sqrt(size)) / sqrt(2)     h0: the token's scaled embedding
    h     += norm(W_out (activation(W_gate h) * inputs[layer]))                 at the end of the layer
    """

    size: int
    vocab_size: int
    """Rows of the table; a token without a row, such as one of an image, has row 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Several residual streams s, of which attention and MLP see one (AltUp, arXiv 2301.13310).

    s0 = h0,  s_i = W_i h0, made as long as h0                               before the first layer
    p_i = s_i + sum over j of P_ij s_j,   P = A tanh(R norm(s0) / hidden)    the layer computes y from p0
    s_i = p_i + (1 + c_i) (y - p0),       c = B tanh(R norm(y) / hidden)     at its end
    h = mean of s0 and U_i s_i, made as long as s0                           behind the last layer

    At the end of a layer, its inputs (`LayerInputs`) are let in by s0 · scale and added to the streams after the first.
    Beside attention, which reads x, is a product of low rank (LAuReL, arXiv 2411.07501):

    h = (h + n2(attention(x)) + x + n(D C x)) / sqrt(2)
    """

    count: int
    side_rank: int
    """Rows of C and columns of D."""


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
    mlp_scales: tuple[float, float] = UNSCALED
    """Factors a and b with which a gated MLP that is no expert computes down(b · act(a · gate) · up)."""
    residual: ResidualKind = "sequential"
    shared_norm: bool = False
    """Whether the MLP of a parallel residual uses the attention's input norm instead of its own."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    layer_heads: tuple[int, ...] = ()
    """Number of query heads of each layer, if layers differ in it; `num_heads` is then the largest. See `of_layer`."""
    layer_kv_heads: tuple[tuple[int, int], ...] = ()
    """Number of key heads of each layer and width of a head, if layers differ in them; `num_kv_heads` and `head_dim`
    are then the largest ones."""
    layer_inner: tuple[int, ...] = ()
    """Intermediate size of each layer's MLP, if layers differ in it; `intermediate_size` is then the largest."""
    kv_sources: tuple[int, ...] = ()
    """For each layer, the layer whose keys and values it reads: itself, or an earlier one; then it has queries only.
    Empty: every layer has its own."""
    queries_only: bool = False
    """In the description of one layer (`of_layer`): whether it reads the keys and values of an earlier one."""
    kv_slabs: tuple[tuple[int, ...], ...] = ()
    """The layers that share a tensor of the KV cache, for each tensor; see `slabs`. Empty: none share one."""
    kv_groups: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """The layers in each tensor of the KV cache, for each group of layers with block tables of its own. Empty: there is
    one group. See `models/kv_groups`."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before rotation."""
    value_norm: bool = False
    """Whether values are normalised per head too, without a weight."""
    keys_as_values: frozenset[int] = frozenset()
    """Layers whose values are the keys before norm and rotation."""
    layer_scales: bool = False
    """Whether each layer has a factor by which the residual stream is multiplied at its end."""
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None
    gate_cuts: tuple[float | None, ...] = ()
    """For each layer, how many deviations above their mean the MLP's gates g are cut, before the activation: they
    become max(0, g - mean(g) - cut * deviation(g)). None: they stay as they are. Empty: those of all layers do.
    """
    whole_qk_norm: bool = False
    """Whether `qk_norm` is one norm over all query heads, and one over all key heads, in place of one per head."""
    qk_norm_rotated: bool = False
    """Whether the norms per head come after the rotation instead of before it. The rotation then has no factor, and
    layers without rotation have no norms.
    """
    qk_norm_weights: bool = True
    """Whether the norms of queries and keys have weights."""
    query_scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
    attended_scale: float = 1.0
    """Factor on what attention gives, before the output projection."""
    query_growth: QueryGrowth | None = None
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
    chunked_windows: bool = False
    """Whether windows do not slide: a query then sees the tokens up to itself of its own chunk, one of consecutive
    chunks of a window's length.
    """
    tied_embeddings: bool = False
    """Whether the output projection is the embedding matrix."""
    has_head: bool = True
    """Whether the checkpoint has an output projection. Without one the model computes embeddings only, and a backend
    may use the embedding matrix in its place.
    """
    normalised_head: bool = False
    """Whether the rows of the output projection are normalised to length one."""
    without_mlp: frozenset[int] = frozenset()
    """Layers that end after attention, or what they have in its place; only with a sequential residual."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    """Latent attention, whose rows are the only key head of the cache; None: ordinary attention."""
    attention_gate: bool = False
    """Whether the attended values are multiplied by a function of their own gates, which `attention_gate` computes of
    the attention's input, a number for each value of each query head."""
    gate_kind: GateKind = "sigmoid"
    gate_per_head: bool = False
    """Whether `attention_gate` computes one number for each query head."""
    recurrent: Recurrent | None = None
    """What some layers have in place of attention: a mixer of tokens with a recurrent state; None: all layers attend.
    """
    attends_beside: bool = False
    """Whether layers with a recurrent state attend too. Both mixers read the same input, and both outputs are added."""
    eos_token_ids: tuple[int, ...] = ()
    offers_draft_layer: bool = False
    """Whether checkpoints may have a draft layer, a further one that predicts the token after the next; it is used only
    with `with_draft_layer`."""
    num_draft_layers: int = 0
    """Number of draft layers, 0 or 1, among the `num_layers`: the last one. It reads, of each token, the hidden state
    behind the final norm and the embedding of the token after it, and shares embedding and head with the model."""
    other_parts: tuple[str, ...] = ()
    """Prefixes, with the dot, of checkpoint tensors that do not belong to the decoder, such as those of a vision
    encoder.
    """

    mutual_images: bool = False
    """Whether the tokens of an image attend to all tokens of this image, also to later ones."""
    mutual_tokens: int = 0
    """Number of tokens of an image, if they attend to each other beyond windows too; 0: they do not."""
    mutual_in_windows: bool = False
    """Whether they do so only in layers with a sliding window, within the window."""
    image_layers: int = 0
    """Number of first layers to whose outputs further embeddings of an image's tokens are added."""

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0
        assert len(self.sliding_windows) == self.num_layers
        assert not self.layer_heads or (len(self.layer_heads) == self.num_layers and self.latent is None)
        assert not self.qk_norm_rotated or (self.rope is not None and self.rope.attention_factor == 1.0)
        assert self.latent is None or (self.num_kv_heads, self.head_dim) == (1, self.latent.row_size)
        assert self.activation != ("xielu" if self.gated_mlp else "swigluoai")
        assert self.recurrent is None or self.recurrent.layers <= frozenset(range(self.num_layers))
        assert not self.without_mlp or self.residual == "sequential"
        assert all(source <= layer for layer, source in enumerate(self.kv_sources))
        added = self.layer_scales or self.layer_inputs is not None
        assert self.residual == "normed" or not (added or (self.experts is not None and self.experts.beside_mlp))
        assert self.streams is None or (self.layer_inputs is not None and not self.layer_scales)
        assert not self.attends_beside or (self.residual == "sequential" and self.num_gates == 0)

    def of_layer(self, layer: int) -> "DecoderDescription":
        """Returns the description with the heads and the intermediate size that a layer has."""
        sizes: dict[str, int] = {}
        if self.layer_heads:
            sizes["num_heads"] = self.layer_heads[layer]
        if self.layer_kv_heads:
            sizes["num_kv_heads"], sizes["head_dim"] = self.layer_kv_heads[layer]
        if self.layer_inner:
            sizes["intermediate_size"] = self.layer_inner[layer]
        if self.borrows_kv(layer):
            sizes["queries_only"] = True
        return replace(self, layer_heads=(), layer_kv_heads=(), layer_inner=(), **sizes) if sizes else self

    def with_draft_layer(self) -> "DecoderDescription":
        """Returns the description with the draft layer, which sees all tokens, and has experts if any layer has.

        Unchanged if there is none.
        """
        if not self.offers_draft_layer or self.num_draft_layers:
            return self
        layer, experts = self.num_layers, self.experts
        if experts is not None:
            experts = replace(experts, layers=experts.layers | {layer})
        return replace(
            self,
            num_layers=layer + 1,
            num_draft_layers=1,
            layer_heads=self.layer_heads + self.layer_heads[-1:],
            sliding_windows=(*self.sliding_windows, None),
            experts=experts,
            kv_groups=(),
        )

    @property
    def num_model_layers(self) -> int:
        """Number of layers without draft layers."""
        return self.num_layers - self.num_draft_layers

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a recurrent state, in place of attention and its KV cache or beside it."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention and a KV cache."""
        return self.attends_beside or not self.is_recurrent(layer)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have a KV cache, in order."""
        return tuple(layer for layer in range(self.num_layers) if self.attends(layer) and not self.borrows_kv(layer))

    def borrows_kv(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of an earlier one."""
        return bool(self.kv_sources) and self.kv_sources[layer] != layer

    @property
    def slabs(self) -> tuple[tuple[int, ...], ...]:
        """The layers in each tensor of the KV cache, in the first group if there are several.

        All tensors have the same size: narrow layers share one.

        Without attention there is one, which nothing reads: so blocks have a size, by which memory is planned, and
        states are sent in pieces of it.
        """
        if self.kv_groups:
            return self.kv_groups[0]
        return self.kv_slabs or tuple((layer,) for layer in self.attention_layers) or ((0,),)

    @property
    def slab_width(self) -> int:
        """Width of a token's keys in a tensor of the KV cache."""
        slabs = [slab for group in self.kv_groups or (self.slabs,) for slab in group]
        return max(sum(self.of_layer(one).kv_size for one in slab) for slab in slabs)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent state in all layers; 0 if there is none."""
        if self.recurrent is None:
            return 0
        return 4 * self.recurrent.state_size * len(self.recurrent.layers)

    @property
    def num_gates(self) -> int:
        """Most rows of a layer's `mix_gate` or `attention_gate`; 0: no layer has one."""
        attending = self.gate_size if self.attention_gate else 0
        return attending if self.recurrent is None else max(attending, self.recurrent.num_gates)

    def has_qk_norm(self, layer: int) -> bool:
        """Whether queries and keys of a layer that attends are normalised."""
        return self.qk_norm and (not self.qk_norm_rotated or self.rope_of(layer) is not None)

    def rope_of(self, layer: int) -> RopeParameters | None:
        """Returns the rotary embedding of a layer; None if the layer has none."""
        if layer in self.unrotated_layers:
            return None
        windowed = self.sliding_windows[layer] is not None
        return self.local_rope if windowed and self.local_rope is not None else self.rope

    @property
    def usual_positions(self) -> int:
        """Longest context unless a longer one is asked for: that of longrope's divisors for short contexts."""
        ropes = [rope for rope in (self.rope, self.local_rope) if rope is not None and rope.long_divisors]
        return min([self.max_positions, *(rope.original_max_positions for rope in ropes)])

    def for_context(self, length: int) -> "DecoderDescription":
        """Returns the description of a decoder whose sequences have at most `length` tokens.

        Longrope has two sets of divisors, for sequences within and beyond the original context. A sequence that grows
        beyond it would need all its keys anew, and a cached prefix could not serve both kinds of sequences. So one set
        serves every sequence of an engine, chosen by the longest one that is possible, as in vLLM and llama.cpp.
        Transformers chooses for each call: sequences beyond the original context are computed alike, shorter ones are
        only if `length` is within the original context.
        """
        if self.usual_positions == self.max_positions:
            return self
        return replace(
            self,
            rope=_rope_for(self.rope, length),
            local_rope=_rope_for(self.local_rope, length),
            max_positions=self.max_positions if length > self.usual_positions else self.usual_positions,
        )

    @property
    def kv_kind(self) -> str:
        """Name of the choice of `for_context`, and of a draft layer, for hashes of what determines KV values.

        Empty for the usual choice without a draft layer.
        """
        ropes = [rope for rope in (self.rope, self.local_rope) if rope is not None and rope.kind == "longrope"]
        long = any(self.max_positions > rope.original_max_positions for rope in ropes)
        return " long" * long + " drafts" * (self.num_draft_layers > 0)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    def has_both(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts beside its ordinary MLP."""
        return self.experts is not None and self.experts.beside_mlp and layer in self.experts.layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, perhaps a mixture of experts, and a norm before it."""
        return layer not in self.without_mlp

    @property
    def q_size(self) -> int:
        """Width of all query heads together, in the form that is multiplied with the cached keys."""
        return self.num_heads * self.head_dim

    @property
    def gate_size(self) -> int:
        """Number of gates of all query heads together, if attention has any."""
        return self.num_heads if self.gate_per_head else self.q_size

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


def _rope_for(rope: RopeParameters | None, length: int) -> RopeParameters | None:
    if rope is None or not rope.long_divisors:
        return rope
    long = length > rope.original_max_positions
    return replace(rope, divisors=rope.long_divisors if long else rope.divisors, long_divisors=())
