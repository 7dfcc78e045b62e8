"""The layout of checkpoints: which tensors make up each parameter of a decoder, and in which order they are stacked.

A parameter is one checkpoint tensor or several, joined along their first dimension: query, key and value projections
are one matrix, and so are gate and up. A family specifies its checkpoints' tensor names (`Names`). Called by the weight
loaders, which read and join the tensors; this module contains no weights.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from antiphon.services.engine.models.description import DecoderDescription, Experts, LatentAttention, LayerInputs
from antiphon.services.engine.models.recurrent_kinds import (
    ChannelDelta,
    ChannelSpace,
    GatedDelta,
    Recurrent,
    ShortConvolution,
    StateSpace,
)


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some rows of a tensor: of each of `groups` equal groups of rows those in [first, end), counted in the group."""

    groups: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the shape that it must have."""

    name: str
    shape: tuple[int, ...]
    part: RowPart | None = None
    """The rows of the tensor that belong to the parameter; None: all of them."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Row order of a fused query-key-value projection: for each key head, its queries, then its key, then its value."""

    num_groups: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the decoder and the tensors that are stacked to make it."""

    name: str
    sources: tuple[Source, ...]
    transposed: bool = False
    """Whether the checkpoint stores [in, out]."""
    grouping: Grouping | None = None
    """How the checkpoint's rows are grouped; None: in the decoder's order: all queries, then all keys, all values."""
    stacked: bool = False
    """Whether the tensor has a first dimension for experts, [experts, …]; the rows of all experts are joined."""
    alternating: bool = False
    """For a stacked tensor: whether the even rows of an expert are gates and the odd rows the ups that belong to them.
    The decoder's matrix has all gates first."""
    experts: int = 0
    """Number of experts among which the tensors are divided equally; 0: no experts, or all experts in one tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNames:
    """The names of the draft layer's tensors. `{}` stands for the number of the layer."""

    layer: str = "model.layers.{}"
    input: str = "model.layers.{}.eh_proj"
    """The matrix [hidden, 2 hidden] for the normed embedding, followed by the normed hidden state."""
    embedding_norm: str = "model.layers.{}.enorm"
    hidden_norm: str = "model.layers.{}.hnorm"
    norm: str = "model.layers.{}.shared_head.norm"
    """The norm before the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of a family's checkpoint tensors, without `.weight` and `.bias`. The defaults are Llama's.

    The names from `input_norm` to `shared_gate` are relative to a layer. If several tensors make up a parameter, they
    are listed in order: query, key, value; gate, up (also of an expert and of the shared expert).
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    attention_gate: str = ""
    """Empty: of each head, the query projection has its queries and then its gates."""
    o: str = "self_attn.o_proj"
    after_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up; a single matrix if the MLP has no gate or the checkpoint stores both in one."""
    down: str = "mlp.down_proj"
    after_mlp_norm: str = ""
    xielu: str = "mlp.act_fn"
    """Prefix of the four numbers of xielu."""

    q_latent: str = "self_attn.q_a_proj"
    q_latent_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"

    mix_in: tuple[str, ...] = ("conv.in_proj",)
    """Matrices of a layer with a recurrent state in place of attention."""
    mix_gate: tuple[str, ...] = ()
    mix_out: str = "conv.out_proj"
    mix_decay: str = ""
    mix_out_gate: str = ""
    mix_select: str = ""
    mix_step: str = ""
    select_norms: tuple[str, ...] = ()
    conv: str | tuple[str, ...] = "conv.conv"
    """Several tensors have the channels of queries, keys and values."""
    mix_norm: str = ""
    decay: str = ""
    """As it is, without `.weight` appended, as are `decay_bias` and `skip`."""
    decay_bias: str = ""
    skip: str = ""
    """The factors D of a state space."""

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    """Relative to a layer, like the others, but without `.weight` appended."""
    correction_in_row: bool = False
    """Whether the checkpoint stores the corrections as [1, experts]."""
    expert_in: str = ""
    expert_out: str = ""
    expert_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    stacked_up: str = ""
    """Name of one tensor [experts, hidden, 2m] with alternating gates and ups; with the suffix `_bias`, that of
    the biases. Used with `stacked_down`, in place of `expert_up` and `expert_down`.
    """
    stacked_in_order: bool = False
    """Whether such a tensor has all gates of an expert before its ups."""
    stacked_down: str = ""
    stacked_rows: bool = False
    """Whether these tensors are [experts, 2m, hidden] and [experts, hidden, m], with all gates of an expert first."""
    sinks: str = "self_attn.sinks"
    """Without `.weight` appended."""
    shared_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"

    layer_scale: str = ""
    """Without `.weight` appended, as are `router_scale` and `expert_scale`."""
    layer_inputs: tuple[str, str, str] = ("", "", "")
    """Table, projection and norm of per-layer embeddings; not relative to a layer."""
    input_gate: tuple[str, str, str] = ("", "", "")
    """A layer's gate of these embeddings, its projection, the norm behind it."""
    stream_ends: tuple[str, str] = ("", "")
    """The matrices that make streams, and those behind the last layer; not relative to a layer, `{}` for the number."""
    stream_mix: tuple[str, str, str, str, str] = ("", "", "", "", "")
    """A layer's router of streams and the norm before it, the matrices behind it that predict and correct, and, without
    `.weight` appended, the factors on what the gate of the layer's inputs reads."""
    side: tuple[str, str, str] = ("", "", "")
    """The matrices of the product beside attention, and the norm behind it."""
    beside_norms: tuple[str, str, str] = ("", "", "")
    """With experts beside the MLP: the norms before the experts, behind them, and behind the MLP."""
    router_scale: str = ""
    expert_scale: str = ""
    draft: DraftNames = DraftNames()
    transposed: bool = False
    """Whether the checkpoint stores the layers' matrices as [in, out]."""
    grouped_qkv: bool = False
    """Whether the rows of query, key and value are grouped by key head; see `Grouping`."""


IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
)
"""Suffixes of buffers that old checkpoints contain although the config determines them."""
KV_SCALE_ENDINGS = (".k_scale", ".v_scale", ".kv_scale")
"""Endings of the scales of keys and values in a KV cache of 8 bits (`worker/loading/kv_scales`)."""

Layout = Callable[[DecoderDescription], tuple[Parameter, ...]]


def named_layout(names: Names) -> Layout:
    """Returns the layout function of checkpoints with these names. The description decides which parameters exist."""

    def layout(d: DecoderDescription) -> tuple[Parameter, ...]:
        table = (d.vocab_size, d.hidden_size)
        outer = [Parameter(name="embedding", sources=(Source(f"{names.embedding}.weight", table),))]
        outer += _norm(d, "final_norm", names.final_norm)
        if d.num_learned_positions:
            rows = (d.num_learned_positions, d.hidden_size)
            outer.append(Parameter(name="positions", sources=(Source(f"{names.positions}.weight", rows),)))
        if not d.tied_embeddings:
            outer.append(Parameter(name="head.weight", sources=(Source(f"{names.head}.weight", table),)))
        if d.layer_inputs is not None:
            outer += _layer_inputs(d, d.layer_inputs, names)
        outer += _stream_ends(d, names)
        layers = (parameter for layer in range(d.num_model_layers) for parameter in _layer(d, names, layer))
        drafts = (
            parameter for layer in range(d.num_model_layers, d.num_layers) for parameter in _draft(d, names, layer)
        )
        return (*outer, *layers, *drafts)

    return layout


llama_layout = named_layout(Names())


def ignored_names(description: DecoderDescription) -> frozenset[str]:
    """Returns the tensors that a checkpoint may contain although the decoder does not need them.

    A name that ends with a dot stands for all tensors whose names begin with it.
    """
    head = {"lm_head.weight", "output.weight"} if description.tied_embeddings else set[str]()
    return frozenset((*head, *description.other_parts))


def _layer(d: DecoderDescription, names: Names, layer: int) -> Iterator[Parameter]:
    d, ours, theirs = d.of_layer(layer), f"layers.{layer}", names.layer.format(layer)
    if d.residual != "post_normed":
        yield from _norm(d, f"{ours}.input_norm", f"{theirs}.{names.input_norm}")
    if d.has_mlp(layer) and not d.shared_norm and d.residual != "post_normed":
        yield from _norm(d, f"{ours}.mlp_norm", f"{theirs}.{names.mlp_norm}")
    if d.residual in ("normed", "post_normed"):
        yield from _norm(d, f"{ours}.after_attention_norm", f"{theirs}.{names.after_attention_norm}")
        yield from _norm(d, f"{ours}.after_mlp_norm", f"{theirs}.{names.after_mlp_norm}")
    linear = _Linears(theirs, names.transposed)
    if d.recurrent is not None and d.is_recurrent(layer):
        yield from _recurrent(d.recurrent, d, names, ours, linear)
    if d.attends(layer):
        yield from _attention(d, names, ours, linear, layer)
    yield from _ending(d, names, ours, linear)
    yield from _streams(d, names, ours, linear)
    if d.has_experts(layer):
        yield from _experts(d, names, ours, linear)
    if d.has_mlp(layer) and (not d.has_experts(layer) or d.has_both(layer)):
        rows = (d.intermediate_size,) * (2 if d.gated_mlp else 1)
        yield from linear(f"{ours}.up", _shares(names.up, rows), d.hidden_size, d.mlp_bias)
        yield from linear(f"{ours}.down", {names.down: d.hidden_size}, d.intermediate_size, d.mlp_bias)
        if d.activation == "xielu":
            numbers = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
            sources = (Source(f"{theirs}.{names.xielu}.{name}", shape) for name, shape in numbers.items())
            yield Parameter(name=f"{ours}.xielu", sources=tuple(sources))


def _layer_inputs(d: DecoderDescription, inputs: LayerInputs, names: Names) -> Iterator[Parameter]:
    """Yields the parameters of per-layer embeddings that all layers have in common."""
    table, projection, norm = names.layer_inputs
    width = d.num_layers * inputs.size
    yield Parameter(name="layer_inputs.table", sources=(Source(f"{table}.weight", (inputs.vocab_size, width)),))
    yield Parameter(name="layer_inputs.in.weight", sources=(Source(f"{projection}.weight", (width, d.hidden_size)),))
    yield Parameter(name="layer_inputs.norm.weight", sources=(Source(f"{norm}.weight", (inputs.size,)),))


def _ending(d: DecoderDescription, names: Names, ours: str, linear: "_Linears") -> Iterator[Parameter]:
    """Yields what a layer has at its end: the gate of its inputs, and its factor."""
    if d.layer_inputs is not None:
        gate, projection, norm = names.input_gate
        yield from linear(f"{ours}.input_gate", {gate: d.layer_inputs.size}, d.hidden_size, False)
        yield from linear(f"{ours}.input_out", {projection: d.hidden_size}, d.layer_inputs.size, False)
        yield from _norm(d, f"{ours}.input_after", f"{linear.prefix}.{norm}")
    if d.layer_scales:
        yield _vector(f"{ours}.scale", f"{linear.prefix}.{names.layer_scale}", 1)


def _stream_ends(d: DecoderDescription, names: Names) -> Iterator[Parameter]:
    for which, name in zip(("in", "out"), names.stream_ends, strict=True):
        for number in range(d.streams.count - 1 if d.streams else 0):
            source = Source(f"{name.format(number)}.weight", (d.hidden_size, d.hidden_size))
            yield Parameter(name=f"streams.{which}.{number}.weight", sources=(source,))


def _streams(d: DecoderDescription, names: Names, ours: str, linear: "_Linears") -> Iterator[Parameter]:
    """Yields what a layer has for streams, and its product beside attention."""
    if d.streams is None:
        return
    n, rank, (*matrices, scale) = d.streams.count, d.streams.side_rank, names.stream_mix
    shapes = {"router": (n, d.hidden_size), "norm": (d.hidden_size,), "predict": (n * n, n), "correct": (n, n)}
    for (which, shape), name in zip(shapes.items(), matrices, strict=True):
        yield Parameter(name=f"{ours}.streams.{which}", sources=(Source(f"{linear.prefix}.{name}.weight", shape),))
    yield _vector(f"{ours}.streams.scale", f"{linear.prefix}.{scale}", d.hidden_size)
    first, last, norm = names.side
    yield from linear(f"{ours}.side.in", {first: rank}, d.hidden_size, False)
    yield from linear(f"{ours}.side.out", {last: d.hidden_size}, rank, False)
    yield from _norm(d, f"{ours}.side.after", f"{linear.prefix}.{norm}")


def _draft(d: DecoderDescription, names: Names, layer: int) -> Iterator[Parameter]:
    """Yields the parameters of a draft layer (`DecoderDescription.num_draft_layers`)."""
    ours, theirs = f"layers.{layer}", names.draft
    yield from _layer(d, replace(names, layer=theirs.layer), layer)
    shape = (d.hidden_size, 2 * d.hidden_size)
    source = Source(f"{theirs.input.format(layer)}.weight", shape)
    yield Parameter(name=f"{ours}.draft_input.weight", sources=(source,))
    yield from _norm(d, f"{ours}.draft_embedding_norm", theirs.embedding_norm.format(layer))
    yield from _norm(d, f"{ours}.draft_hidden_norm", theirs.hidden_norm.format(layer))
    yield from _norm(d, f"{ours}.draft_norm", theirs.norm.format(layer))


def _attention(d: DecoderDescription, names: Names, ours: str, linear: "_Linears", layer: int) -> Iterator[Parameter]:
    theirs = linear.prefix
    grouping = Grouping(d.num_kv_heads, d.head_dim) if names.grouped_qkv else None
    if d.latent is not None:
        yield from _latents(d, d.latent, names, ours, linear)
    else:
        if d.queries_only:
            yield from linear(f"{ours}.qkv", {names.qkv[0]: d.q_size}, d.hidden_size, d.qkv_bias)
        elif layer in d.keys_as_values:
            yield from _doubled_keys(d, names, ours, linear)
        elif d.attention_gate and not names.attention_gate:
            yield from _gated_attention(d, names, ours, linear)
        else:
            heads = _shares(names.qkv, (d.q_size, d.kv_size, d.kv_size))
            yield from linear(f"{ours}.qkv", heads, d.hidden_size, d.qkv_bias, grouping)
        if d.attention_gate and names.attention_gate:
            yield from linear(f"{ours}.attention_gate", {names.attention_gate: d.gate_size}, d.hidden_size, False)
    yield from linear(f"{ours}.o", {names.o: d.hidden_size}, d.attended_size, d.o_bias)
    if d.qk_norm and d.qk_norm_weights:
        widths = (d.q_size, d.kv_size) if d.whole_qk_norm else (d.head_dim, d.head_dim)
        for which, name, width in zip(("q_norm", "k_norm"), names.qk_norm, widths, strict=True):
            if d.queries_only and which == "k_norm":
                continue
            yield Parameter(name=f"{ours}.{which}", sources=(Source(f"{theirs}.{name}.weight", (width,)),))
    if d.attention_sinks:
        yield Parameter(name=f"{ours}.sinks", sources=(Source(f"{theirs}.{names.sinks}", (d.num_heads,)),))


def _doubled_keys(d: DecoderDescription, names: Names, ours: str, linear: "_Linears") -> Iterator[Parameter]:
    """Yields the projections of a layer in `keys_as_values`: the keys' rows are also those of the values."""
    query, key, _ = names.qkv
    for kind, width in {"weight": (d.hidden_size,), **({"bias": ()} if d.qkv_bias else {})}.items():
        first = Source(f"{linear.prefix}.{query}.{kind}", (d.q_size, *width))
        again = Source(f"{linear.prefix}.{key}.{kind}", (d.kv_size, *width))
        yield Parameter(name=f"{ours}.qkv.{kind}", sources=(first, again, again))


def _recurrent(
    shape: Recurrent, d: DecoderDescription, names: Names, ours: str, linear: "_Linears"
) -> Iterator[Parameter]:
    """Yields the parameters of a layer's mixer with a recurrent state."""
    if isinstance(shape, GatedDelta):
        yield from _delta(shape, d, names, ours, linear)
    elif isinstance(shape, StateSpace):
        yield from _state_space(shape, d, names, ours, linear)
    elif isinstance(shape, ChannelSpace):
        yield from _channel_space(shape, d, names, ours, linear)
    elif isinstance(shape, ChannelDelta):
        yield from _channel_delta(shape, d, names, ours, linear)
    else:
        yield from _convolution(shape, d, names, ours, linear)


def _convolution(
    c: ShortConvolution, d: DecoderDescription, names: Names, ours: str, linear: "_Linears"
) -> Iterator[Parameter]:
    """Yields the parameters of a layer with a `ShortConvolution` in place of attention."""
    yield from linear(f"{ours}.mix_in", _shares(names.mix_in, c.in_widths), d.hidden_size, c.bias)
    yield from linear(f"{ours}.mix_out", {names.mix_out: d.hidden_size}, c.channels, c.bias)
    yield from _kernel(c, names, ours, linear.prefix, c.bias)


def _state_space(
    s: StateSpace, d: DecoderDescription, names: Names, ours: str, linear: "_Linears"
) -> Iterator[Parameter]:
    """Yields the parameters of a layer with a `StateSpace` in place of attention."""
    yield from linear(f"{ours}.mix_in", _shares(names.mix_in, s.in_widths), d.hidden_size, s.bias)
    yield from linear(f"{ours}.mix_out", {names.mix_out: d.hidden_size}, s.width, s.bias)
    yield from _kernel(s, names, ours, linear.prefix, s.conv_bias)
    if s.norm != "none":
        yield _vector(f"{ours}.mix_norm", f"{linear.prefix}.{names.mix_norm}.weight", s.width)
    for name, theirs in (("decay", names.decay), ("decay_bias", names.decay_bias), ("skip", names.skip)):
        yield _vector(f"{ours}.{name}", f"{linear.prefix}.{theirs}", s.num_heads)


def _channel_space(
    s: ChannelSpace, d: DecoderDescription, names: Names, ours: str, linear: "_Linears"
) -> Iterator[Parameter]:
    """Yields the parameters of a layer with a `ChannelSpace` in place of attention."""
    theirs = linear.prefix
    yield from linear(f"{ours}.mix_in", _shares(names.mix_in, s.in_widths), d.hidden_size, s.bias)
    yield from linear(f"{ours}.mix_out", {names.mix_out: d.hidden_size}, s.width, s.bias)
    yield from linear(f"{ours}.mix_select", {names.mix_select: sum(s.select_widths)}, s.channels, False)
    yield from linear(f"{ours}.mix_step", {names.mix_step: s.channels}, s.step_rank, False)
    yield from _kernel(s, names, ours, theirs, s.conv_bias)
    if s.part_norms == "weighted":
        norms = zip(names.select_norms, s.select_widths, strict=True)
        sources = (Source(f"{theirs}.{name}.weight", (width,)) for name, width in norms)
        yield Parameter(name=f"{ours}.select_norm", sources=tuple(sources))
    yield Parameter(name=f"{ours}.decay", sources=(Source(f"{theirs}.{names.decay}", (s.channels, s.state_dim)),))
    for name, vector in (("decay_bias", names.decay_bias), ("skip", names.skip)):
        yield _vector(f"{ours}.{name}", f"{theirs}.{vector}", s.channels)


def _gated_attention(d: DecoderDescription, names: Names, ours: str, linear: "_Linears") -> Iterator[Parameter]:
    """Yields the projections of attention with a gate: of each head, the query projection has query, then gate."""
    query, *others = names.qkv
    kinds = {"weight": (d.hidden_size,), **({"bias": ()} if d.qkv_bias else {})}
    for part, name, rest in ((0, "qkv", others), (1, "attention_gate", ())):
        rows = RowPart(d.num_heads, part * d.head_dim, (part + 1) * d.head_dim)
        for kind, width in kinds.items():
            first = Source(f"{linear.prefix}.{query}.{kind}", (2 * d.q_size, *width), rows)
            more = (Source(f"{linear.prefix}.{other}.{kind}", (d.kv_size, *width)) for other in rest)
            yield Parameter(name=f"{ours}.{name}.{kind}", sources=(first, *more))


def _delta(g: GatedDelta, d: DecoderDescription, names: Names, ours: str, linear: "_Linears") -> Iterator[Parameter]:
    """Yields the parameters of a layer with a `GatedDelta` in place of attention."""
    widths, heads, per_key = g.in_widths, g.num_value_heads, g.num_value_heads // g.num_key_heads
    if len(names.mix_in) == len(names.mix_gate) == 1:
        # Of each key head: query, key, the values of its value heads, their gates; and their b, their a.
        sizes = (g.key_dim, g.key_dim, per_key * g.value_dim, per_key * g.value_dim)
        yield _grouped(f"{ours}.mix_in", f"{linear.prefix}.{names.mix_in[0]}", g.num_key_heads, sizes, d.hidden_size)
        sizes = (per_key, per_key)
        gates = f"{linear.prefix}.{names.mix_gate[0]}"
        yield _grouped(f"{ours}.mix_gate", gates, g.num_key_heads, sizes, d.hidden_size)
    else:
        rows = dict(zip(names.mix_in, (g.channels, widths[3]), strict=True))
        yield from linear(f"{ours}.mix_in", rows, d.hidden_size, False)
        yield from linear(f"{ours}.mix_gate", dict.fromkeys(names.mix_gate, heads), d.hidden_size, False)
    yield from linear(f"{ours}.mix_out", {names.mix_out: d.hidden_size}, g.width, False)
    yield from _kernel(g, names, ours, linear.prefix, bias=False)
    yield _vector(f"{ours}.mix_norm", f"{linear.prefix}.{names.mix_norm}.weight", g.value_dim)
    for name, theirs in (("decay", names.decay), ("decay_bias", names.decay_bias)):
        yield _vector(f"{ours}.{name}", f"{linear.prefix}.{theirs}", heads)


def _channel_delta(
    g: ChannelDelta, d: DecoderDescription, names: Names, ours: str, linear: "_Linears"
) -> Iterator[Parameter]:
    """Yields the parameters of a layer with a `ChannelDelta` in place of attention."""
    keys = g.num_heads * g.key_dim
    yield from linear(f"{ours}.mix_in", _shares(names.mix_in, g.in_widths), d.hidden_size, False)
    yield from linear(f"{ours}.mix_gate", _shares(names.mix_gate, g.gate_widths), d.hidden_size, False)
    yield from linear(f"{ours}.mix_decay", {names.mix_decay: keys}, g.rank, False)
    yield from linear(f"{ours}.mix_out_gate", {names.mix_out_gate: g.width}, g.rank, False)
    yield from linear(f"{ours}.mix_out", {names.mix_out: d.hidden_size}, g.width, False)
    yield from _kernel(g, names, ours, linear.prefix, bias=False)
    yield _vector(f"{ours}.mix_norm", f"{linear.prefix}.{names.mix_norm}.weight", g.value_dim)
    decay = Source(f"{linear.prefix}.{names.decay}", (1, 1, g.num_heads, 1))
    yield Parameter(name=f"{ours}.decay", sources=(decay,))
    yield _vector(f"{ours}.decay_bias", f"{linear.prefix}.{names.decay_bias}", keys)


def _kernel(mixer: Recurrent, names: Names, ours: str, theirs: str, bias: bool) -> Iterator[Parameter]:
    """Yields the convolution that all kinds of mixers with a recurrent state have."""
    tensors = {names.conv: mixer.channels}
    if isinstance(names.conv, tuple):
        tensors = dict(zip(names.conv, mixer.in_widths, strict=True))
    shapes = {f"{theirs}.{tensor}": (rows, 1, mixer.kernel_size) for tensor, rows in tensors.items()}
    sources = tuple(Source(f"{tensor}.weight", shape) for tensor, shape in shapes.items())
    yield Parameter(name=f"{ours}.conv", sources=sources)
    if bias:
        yield _vector(f"{ours}.conv.bias", f"{theirs}.{names.conv}.bias", mixer.channels)


def _vector(name: str, tensor: str, size: int) -> Parameter:
    return Parameter(name=name, sources=(Source(tensor, (size,)),))


def _grouped(name: str, tensor: str, groups: int, sizes: tuple[int, ...], columns: int) -> Parameter:
    """Returns a matrix whose parts alternate in groups of rows in the checkpoint. `sizes`: of the parts of a group."""
    ends = list(itertools.accumulate(sizes))
    parts = (RowPart(groups, end - size, end) for size, end in zip(sizes, ends, strict=True))
    shape = (groups * ends[-1], columns)
    return Parameter(name=f"{name}.weight", sources=tuple(Source(f"{tensor}.weight", shape, part) for part in parts))


def _latents(
    d: DecoderDescription, a: LatentAttention, names: Names, ours: str, linear: "_Linears"
) -> Iterator[Parameter]:
    """Yields the parameters of latent attention, which replace the query, key, value projections (`LatentAttention`).

    `qkv` stacks the matrices that read the hidden states: the one for queries or their latent, and the one for rows.
    """
    queries, values = d.num_heads * a.query_dim, d.num_heads * (a.nope_dim + a.value_dim)
    first = {names.q_latent: a.query_rank} if a.query_rank else {names.qkv[0]: queries}
    yield from linear(f"{ours}.qkv", {**first, names.latent: a.row_size}, d.hidden_size, d.qkv_bias)
    if a.query_rank:
        yield Parameter(
            name=f"{ours}.q_latent_norm",
            sources=(Source(f"{linear.prefix}.{names.q_latent_norm}.weight", (a.query_rank,)),),
        )
        yield from linear(f"{ours}.q_up", {names.q_up: queries}, a.query_rank, False)
    yield Parameter(
        name=f"{ours}.latent_norm", sources=(Source(f"{linear.prefix}.{names.latent_norm}.weight", (a.rank,)),)
    )
    yield from linear(f"{ours}.latent_up", {names.latent_up: values}, a.rank, False)


def _experts(d: DecoderDescription, names: Names, ours: str, linear: "_Linears") -> Iterator[Parameter]:
    """Yields a layer's experts: gate and up of all experts stacked in one parameter, their down in another."""
    assert d.experts is not None
    hidden, inner, shared = d.hidden_size, d.experts.intermediate_size, d.experts.shared_intermediate_size
    if d.experts.latent_size:
        yield from linear(f"{ours}.experts.in", {names.expert_in: d.experts.latent_size}, hidden, False)
        yield from linear(f"{ours}.experts.out", {names.expert_out: hidden}, d.experts.latent_size, False)
    width = d.experts.latent_size or hidden
    every = range(d.experts.num_experts)
    yield from linear(f"{ours}.router", {names.router: d.experts.num_experts}, hidden, d.experts.router_bias)
    if d.experts.correction:
        shape = (1, d.experts.num_experts) if names.correction_in_row else (d.experts.num_experts,)
        yield Parameter(
            name=f"{ours}.router.correction", sources=(Source(f"{linear.prefix}.{names.correction}", shape),)
        )
    if d.experts.beside_mlp:
        for which, norm in zip(("experts.norm", "experts.after", "mlp.after"), names.beside_norms, strict=True):
            yield from _norm(d, f"{ours}.{which}", f"{linear.prefix}.{norm}")
        yield _vector(f"{ours}.router.scale", f"{linear.prefix}.{names.router_scale}", hidden)
        yield _vector(f"{ours}.experts.scale", f"{linear.prefix}.{names.expert_scale}", d.experts.num_experts)
    if names.stacked_up:
        for part, name, sizes in (
            ("up", names.stacked_up, (width, 2 * inner)),
            ("down", names.stacked_down, (inner, width)),
        ):
            yield from _stacked(d.experts, f"{ours}.experts.{part}", f"{linear.prefix}.{name}", sizes, names)
    else:
        ups = {name.format(expert): inner for expert in every for name in names.expert_up}
        downs = {names.expert_down.format(expert): width for expert in every}
        for parameter in (
            *linear(f"{ours}.experts.up", ups, width, False),
            *linear(f"{ours}.experts.down", downs, inner, False),
        ):
            yield replace(parameter, experts=d.experts.num_experts)
    if shared:
        rows = (shared,) * (2 if d.gated_mlp else 1)
        yield from linear(f"{ours}.shared.up", _shares(names.shared_up, rows), hidden, False)
        yield from linear(f"{ours}.shared.down", {names.shared_down: hidden}, shared, False)
        if d.experts.shared_gate:
            yield from linear(f"{ours}.shared.gate", {names.shared_gate: 1}, hidden, False)


def _stacked(experts: Experts, ours: str, theirs: str, sizes: tuple[int, int], names: Names) -> Iterator[Parameter]:
    """Yields the weight and bias of a matrix whose experts are stored in one tensor. `sizes`: columns and rows."""
    count, (columns, rows) = experts.num_experts, sizes
    alternating = ours.endswith(".up") and not names.stacked_rows and not names.stacked_in_order
    yield Parameter(
        name=f"{ours}.weight",
        sources=(Source(theirs, (count, rows, columns) if names.stacked_rows else (count, columns, rows)),),
        transposed=not names.stacked_rows,
        grouping=None,
        stacked=True,
        alternating=alternating,
    )
    if experts.bias:
        yield Parameter(
            name=f"{ours}.bias",
            sources=(Source(f"{theirs}_bias", (count, rows)),),
            transposed=False,
            grouping=None,
            stacked=True,
            alternating=alternating,
        )


def _norm(d: DecoderDescription, ours: str, theirs: str) -> Iterator[Parameter]:
    yield Parameter(name=f"{ours}.weight", sources=(Source(f"{theirs}.weight", (d.hidden_size,)),))
    if d.norm == "layer" and d.norm_bias:
        yield Parameter(name=f"{ours}.bias", sources=(Source(f"{theirs}.bias", (d.hidden_size,)),))


def _shares(names: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, int]:
    """Returns the rows of each tensor. A single tensor has the rows of all parts."""
    return {"".join(names): sum(rows)} if len(names) == 1 else dict(zip(names, rows, strict=True))


@dataclass(frozen=True, slots=True)
class _Linears:
    """Creates the parameters of a layer's projections."""

    prefix: str
    transposed: bool

    def __call__(
        self, name: str, rows: dict[str, int], columns: int, bias: bool, grouping: Grouping | None = None
    ) -> Iterator[Parameter]:
        """Yields a projection's weight and bias. `rows`: the number of rows of each stacked tensor."""
        shapes = {part: (columns, n) if self.transposed else (n, columns) for part, n in rows.items()}
        weights = tuple(Source(f"{self.prefix}.{part}.weight", shape) for part, shape in shapes.items())
        yield Parameter(name=f"{name}.weight", sources=weights, transposed=self.transposed, grouping=grouping)
        if bias:
            biases = tuple(Source(f"{self.prefix}.{part}.bias", (n,)) for part, n in rows.items())
            yield Parameter(name=f"{name}.bias", sources=biases, grouping=grouping)
