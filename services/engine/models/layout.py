"""The layout of checkpoints: which tensors make up each parameter of a decoder, and in which order they are stacked.

A parameter is one checkpoint tensor or several, joined along their first dimension: query, key and value projections
are one matrix, and so are gate and up. A family specifies its checkpoints' tensor names (`Names`). Called by the weight
loaders, which read and join the tensors; this module contains no weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from antiphon.services.engine.models.description import DecoderDescription, Experts, LatentAttention


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint and the shape that it must have."""

    name: str
    shape: tuple[int, ...]


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
    o: str = "self_attn.o_proj"
    after_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up; a single matrix if the MLP has no gate or the checkpoint stores both in one."""
    down: str = "mlp.down_proj"
    after_mlp_norm: str = ""

    q_latent: str = "self_attn.q_a_proj"
    q_latent_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    """Relative to a layer, like the others, but without `.weight` appended."""
    correction_in_row: bool = False
    """Whether the checkpoint stores the corrections as [1, experts]."""
    expert_up: tuple[str, str] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    stacked_up: str = ""
    """Name of one tensor [experts, hidden, 2m] with alternating gates and ups; with the suffix `_bias`, that of
    the biases. Used with `stacked_down`, in place of `expert_up` and `expert_down`.
    """
    stacked_down: str = ""
    sinks: str = "self_attn.sinks"
    """Without `.weight` appended."""
    shared_up: tuple[str, str] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"

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
        return (*outer, *(parameter for layer in range(d.num_layers) for parameter in _layer(d, names, layer)))

    return layout


llama_layout = named_layout(Names())


def ignored_names(description: DecoderDescription) -> frozenset[str]:
    """Returns the tensors that a checkpoint may contain although the decoder does not need them.

    A name that ends with a dot stands for all tensors whose names begin with it.
    """
    head = {"lm_head.weight", "output.weight"} if description.tied_embeddings else set[str]()
    return frozenset((*head, *description.other_parts))


def _layer(d: DecoderDescription, names: Names, layer: int) -> Iterator[Parameter]:
    ours, theirs = f"layers.{layer}", names.layer.format(layer)
    if d.residual != "post_normed":
        yield from _norm(d, f"{ours}.input_norm", f"{theirs}.{names.input_norm}")
    if not d.shared_norm and d.residual != "post_normed":
        yield from _norm(d, f"{ours}.mlp_norm", f"{theirs}.{names.mlp_norm}")
    if d.residual in ("normed", "post_normed"):
        yield from _norm(d, f"{ours}.after_attention_norm", f"{theirs}.{names.after_attention_norm}")
        yield from _norm(d, f"{ours}.after_mlp_norm", f"{theirs}.{names.after_mlp_norm}")
    linear = _Linears(theirs, names.transposed)
    grouping = Grouping(d.num_kv_heads, d.head_dim) if names.grouped_qkv else None
    if d.latent is not None:
        yield from _latents(d, d.latent, names, ours, linear)
    else:
        heads = _shares(names.qkv, (d.q_size, d.kv_size, d.kv_size))
        yield from linear(f"{ours}.qkv", heads, d.hidden_size, d.qkv_bias, grouping)
    yield from linear(f"{ours}.o", {names.o: d.hidden_size}, d.attended_size, d.o_bias)
    if d.qk_norm:
        widths = (d.q_size, d.kv_size) if d.whole_qk_norm else (d.head_dim, d.head_dim)
        for which, name, width in zip(("q_norm", "k_norm"), names.qk_norm, widths, strict=True):
            yield Parameter(name=f"{ours}.{which}", sources=(Source(f"{theirs}.{name}.weight", (width,)),))
    if d.attention_sinks:
        yield Parameter(name=f"{ours}.sinks", sources=(Source(f"{theirs}.{names.sinks}", (d.num_heads,)),))
    if d.has_experts(layer):
        yield from _experts(d, names, ours, linear)
    else:
        rows = (d.intermediate_size,) * (2 if d.gated_mlp else 1)
        yield from linear(f"{ours}.up", _shares(names.up, rows), d.hidden_size, d.mlp_bias)
        yield from linear(f"{ours}.down", {names.down: d.hidden_size}, d.intermediate_size, d.mlp_bias)


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
    every = range(d.experts.num_experts)
    yield from linear(f"{ours}.router", {names.router: d.experts.num_experts}, hidden, d.experts.router_bias)
    if d.experts.correction:
        shape = (1, d.experts.num_experts) if names.correction_in_row else (d.experts.num_experts,)
        yield Parameter(
            name=f"{ours}.router.correction", sources=(Source(f"{linear.prefix}.{names.correction}", shape),)
        )
    if names.stacked_up:
        yield from _stacked(d.experts, f"{ours}.experts.up", f"{linear.prefix}.{names.stacked_up}", hidden, 2 * inner)
        yield from _stacked(d.experts, f"{ours}.experts.down", f"{linear.prefix}.{names.stacked_down}", inner, hidden)
    else:
        ups = {name.format(expert): inner for expert in every for name in names.expert_up}
        downs = {names.expert_down.format(expert): hidden for expert in every}
        for parameter in (
            *linear(f"{ours}.experts.up", ups, hidden, False),
            *linear(f"{ours}.experts.down", downs, inner, False),
        ):
            yield replace(parameter, experts=d.experts.num_experts)
    if shared:
        yield from linear(f"{ours}.shared.up", dict.fromkeys(names.shared_up, shared), hidden, False)
        yield from linear(f"{ours}.shared.down", {names.shared_down: hidden}, shared, False)
        if d.experts.shared_gate:
            yield from linear(f"{ours}.shared.gate", {names.shared_gate: 1}, hidden, False)


def _stacked(experts: Experts, ours: str, theirs: str, columns: int, rows: int) -> Iterator[Parameter]:
    """Yields the weight and bias of a matrix whose experts are stored in one transposed tensor."""
    count, alternating = experts.num_experts, ours.endswith(".up")
    yield Parameter(
        name=f"{ours}.weight",
        sources=(Source(theirs, (count, columns, rows)),),
        transposed=True,
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
