"""The cases of the compile check: every kernel in the shapes of published models, on tensors without data.

A case calls launchers with tensors of the `meta` device. The name of a case is the first column in
docs/contributing/kernels.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.services.engine.adapters.delta import padded_rank
from antiphon.services.engine.backends.triton.kernels.activation import activated
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import (
    DeviceWork,
    FewWork,
    Geometry,
    Heads,
    ManyWork,
)
from antiphon.services.engine.backends.triton.kernels.attention.decode_attention import attend_few
from antiphon.services.engine.backends.triton.kernels.attention.expanded_attention import attend_made, gather_rows
from antiphon.services.engine.backends.triton.kernels.attention.expanded_work import (
    SEGMENT_WORDS,
    ExpandedWork,
    Piece,
)
from antiphon.services.engine.backends.triton.kernels.attention.latent_attention import (
    RowShape,
    attend_few_latents,
    attend_many_latents,
)
from antiphon.services.engine.backends.triton.kernels.attention.latent_rows import store_latents
from antiphon.services.engine.backends.triton.kernels.attention.prefill_attention import attend_many
from antiphon.services.engine.backends.triton.kernels.attention.rope_kv import rotate_and_store
from antiphon.services.engine.backends.triton.kernels.blocks import copy_blocks, gather_blocks, scatter_blocks
from antiphon.services.engine.backends.triton.kernels.lora import LoraTiles, add_products
from antiphon.services.engine.backends.triton.kernels.norm import normed
from antiphon.services.engine.backends.triton.kernels.products.quantized import quantized_linear, swapped_linear
from antiphon.services.engine.backends.triton.kernels.products.rows import order_rows
from antiphon.services.engine.backends.triton.kernels.products.skinny import fixed_linear, skinny_linear
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight
from antiphon.services.engine.backends.triton.kernels.recurrent.convolution import convolve
from antiphon.services.engine.backends.triton.kernels.recurrent.delta import attend_delta, finish_delta
from antiphon.services.engine.backends.triton.kernels.recurrent.moves import DeviceMoves
from antiphon.services.engine.backends.triton.kernels.recurrent.state_space import (
    gate_heads,
    norm_parts,
    scan_channels,
    scan_heads,
)
from antiphon.services.engine.backends.triton.kernels.sampling import Adjustments, choose_tokens
from antiphon.services.engine.backends.triton.kernels.step_inputs import known_ids, scatter_words
from antiphon.services.engine.kernels.sampling import new_columns
from antiphon.services.engine.models.description import LatentAttention
from antiphon.services.engine.models.recurrent_kinds import ChannelDelta, ChannelSpace, GatedDelta, StateSpace
from infra.checks.kernels.expert_cases import expert_cases
from infra.checks.kernels.shapes import BF16, F16, F32, empty, words

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NOT_ON_SM_80 = frozenset({"sm_80"})
"""Targets left out for kernels that read or write 8-bit floats, which sm_80 does not support."""


@dataclass(frozen=True)
class Case:
    """Launches under one name. `left_out` names targets that lack a data type of the case."""

    name: str
    start: Callable[[], None]
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Attention:
    """Sizes and options of an attention layer. `queries` is the number of query tokens of each sequence."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    chunked: bool = False
    mutual: bool = False
    """Whether the tokens of an image attend to each other."""
    queries: int = 1
    token: int = 0
    """Width of a token in a tensor of the cache that layers share; 0: that of its key heads."""

    @property
    def work_heads(self) -> Heads:
        """Returns what the work lists depend on."""
        return Heads(
            group=self.heads // self.kv_heads,
            head_dim=self.head_dim,
            itemsize=self.dtype.itemsize,
            stored_itemsize=(self.cache or self.dtype).itemsize,
        )

    def make_cache(self) -> Tensor:
        """Returns keys or values, which may be a part of a wider tensor."""
        width = self.kv_heads * self.head_dim
        whole = empty(1024, 64, self.token or width, dtype=self.cache or self.dtype)
        return whole[..., :width].unflatten(2, (self.kv_heads, self.head_dim))


BYTES, HALVES = empty(6144, 4096, dtype=torch.int8), empty(6144, 2048, dtype=torch.uint8)
FLOATS, LEVELS = empty(6144, 4096, dtype=torch.uint8), empty(16, dtype=F32)
SCALES, GROUPS = empty(6144, dtype=F32), empty(32, 6144, dtype=F32)

ATTENTIONS = {
    "Llama 3.1 8B": Attention(32, 8, 128),
    "Llama 3.1 8B, float16": Attention(32, 8, 128, dtype=F16),
    "Llama 3.1 8B, float32": Attention(32, 8, 128, dtype=F32),
    "Llama 3.1 8B, cache e4m3": Attention(32, 8, 128, cache=E4M3),
    "Llama 3.1 8B, cache e5m2": Attention(32, 8, 128, cache=E5M2),
    "Llama 3.1 8B, 9 queries": Attention(32, 8, 128, queries=9),
    "Qwen3 0.6B": Attention(16, 8, 128),
    "Qwen2 0.5B": Attention(14, 2, 64),
    "Mistral 7B": Attention(32, 8, 128, window=4096),
    "Gemma 2 9B": Attention(16, 8, 256, window=4096, softcap=50.0),
    "Baichuan 13B": Attention(40, 40, 128, alibi=True),
    "GPT-NeoX": Attention(64, 64, 96),
    "gpt-oss": Attention(64, 8, 64, window=128, sinks=True),
    "Llama 4": Attention(40, 8, 128, window=8192, chunked=True),
    "Gemma 3 12B, images, window": Attention(16, 8, 256, window=1024, mutual=True),
    "Gemma 3 27B, images": Attention(32, 16, 128, mutual=True),
    "Gemma 4 E2B, window": Attention(8, 1, 256, window=512, token=512),
    "Gemma 4 E4B, 8 queries": Attention(8, 2, 512, queries=8),
    "Gemma 4 31B": Attention(32, 4, 512),
    "Gemma 4 31B, float32": Attention(32, 4, 512, dtype=F32),
    "Gemma 4 31B, cache e4m3": Attention(32, 4, 512, cache=E4M3),
}


def attention(a: Attention) -> Callable[[], None]:
    def start() -> None:
        few = FewWork(8, a.queries, 64, *(words(8) for _ in range(4)), words(9), words(64), words(1))
        places = (words(8) for _ in range(4))
        many = ManyWork(64, a.work_heads.queries_a_tile, *places, words(64), words(64) if a.mutual else None)
        work = DeviceWork(tables=words(256, 512), window=a.window, few=few, many=many, chunked=a.chunked)
        slopes = empty(a.heads, dtype=F32) if a.alibi else None
        sinks = empty(a.heads, dtype=F32) if a.sinks else None
        geometry = Geometry(kv_heads=a.kv_heads, scale=a.head_dim**-0.5, softcap=a.softcap, slopes=slopes, sinks=sinks)
        queries = empty(64, a.heads + 2 * a.kv_heads, a.head_dim, dtype=a.dtype)[:, : a.heads]
        cache = a.make_cache()
        attended = empty(64, a.heads, a.head_dim, dtype=a.dtype)
        attend_few(queries, cache, cache, attended, work, geometry)
        attend_many(queries, cache, cache, attended, work, geometry)

    return start


@dataclass(frozen=True)
class Latents:
    """Sizes and options of a layer of latent attention, with a rank of 512 and 64 dimensions that are rotated."""

    heads: int
    nope_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None
    queries: int = 1


LATENTS = {
    "DeepSeek V3": Latents(128),
    "DeepSeek V3, cache e4m3": Latents(128, cache=E4M3),
    "DeepSeek V2-Lite": Latents(16),
    "DeepSeek V2-Lite, float16": Latents(16, dtype=F16),
    "DeepSeek V2-Lite, float32": Latents(16, dtype=F32),
    "DeepSeek V2-Lite, cache e4m3": Latents(16, cache=E4M3),
    "GLM 4.7 Flash, 9 queries": Latents(20, nope_dim=192, value_dim=256, queries=9),
}


def latent_attention(a: Latents) -> Callable[[], None]:
    """Returns a case with the kernels that run between the projections of latent attention, without matrix products."""
    rank, turning = 512, 64
    shape = LatentAttention(rank=rank, rope_dim=turning, nope_dim=a.nope_dim, value_dim=a.value_dim)

    def start() -> None:
        heads = Heads(
            group=a.heads,
            head_dim=rank + turning,
            itemsize=a.dtype.itemsize,
            stored_itemsize=(a.cache or a.dtype).itemsize,
            latent=shape,
        )
        places = (words(8) for _ in range(4))
        few = FewWork(8, a.queries, 64, *places, words(9), words(64), words(1), heads.split_tokens)
        many = ManyWork(64, heads.queries_a_tile, *(words(8) for _ in range(4)), words(64))
        work = DeviceWork(tables=words(256, 512), window=None, few=few, many=many)
        row = RowShape(rank, turning, 0.1)
        cache = empty(1024, 64, 1, rank + turning, dtype=a.cache or a.dtype)
        queries = empty(64, a.heads, a.nope_dim + turning, dtype=a.dtype)
        turned, absorbed = empty(64, a.heads, turning, dtype=a.dtype), empty(64, a.heads, rank, dtype=a.dtype)
        table, norm = empty(8192, 2, turning // 2, dtype=a.dtype), empty(rank, dtype=a.dtype)
        projected = empty(64, 1536 + rank + turning, dtype=a.dtype)
        store_latents(projected, queries, turned, words(64), words(64), cache, table, True, norm, 1e-6)
        attended = empty(64, a.heads, rank, dtype=a.dtype)
        attend_few_latents(absorbed, turned, cache, attended, work, row)
        attend_many_latents(absorbed, turned, cache, attended, work, row)
        expanded(a, heads.queries_an_expanded_tile, queries, turned, cache)

    return start


def expanded(a: Latents, each: int, queries: Tensor, turned: Tensor, cache: Tensor) -> None:
    """Starts the kernels for keys and values that are computed from latents, in one piece and in several."""
    piece = Piece(
        num_segments=8, num_tiles=64, num_rows=4096, most_keys=1024, segments=words(8, SEGMENT_WORDS), tiles=words(64)
    )
    work = ExpandedWork(others=(0, 0), queries_a_tile=each, most_rows=4096, pieces=(piece,))
    rows, values = empty(4096, cache.shape[3], dtype=a.dtype), empty(64, a.heads, a.value_dim, dtype=a.dtype)
    made = empty(4096, a.heads * (a.nope_dim + a.value_dim), dtype=a.dtype)
    sums = empty(64, a.heads, a.value_dim, dtype=F32), empty(64, a.heads, dtype=F32), empty(64, a.heads, dtype=F32)
    gather_rows(cache, rows, words(256, 512), piece)
    attend_made(queries, turned, made, rows, values, None, (work, piece), 0.1)
    attend_made(queries, turned, made, rows, values, sums, (work, piece), 0.1)


def rope(
    a: Attention, rotary: int, interleaved: bool, normed_heads: bool, norm_last: bool = False, spatial: bool = False
) -> Callable[[], None]:
    """Returns a case of the kernel. `spatial`: tokens have a position in each of three axes."""

    def start() -> None:
        positions, axes = (words(3, 64), words(rotary // 2)) if spatial else (words(64), None)
        cache = a.make_cache()
        norm = empty(a.heads + a.kv_heads, a.head_dim, dtype=a.dtype) if normed_heads else None
        table = empty(8192, 2, rotary // 2, dtype=a.dtype) if rotary else None
        qkv = empty(64, (a.heads + 2 * a.kv_heads) * a.head_dim, dtype=a.dtype)
        rotate_and_store(
            *(qkv, positions, words(64), cache, cache, a.heads, table, interleaved, norm, 1e-6, norm_last), axes=axes
        )

    return start


def normed_values(a: Attention) -> Callable[[], None]:
    """Returns a case of Gemma 4: layers that norm values too, and layers with queries only."""

    def start() -> None:
        cache, table = a.make_cache(), empty(8192, 2, a.head_dim // 2, dtype=a.dtype)
        for kv_heads in (a.kv_heads, 0):
            norm = empty(a.heads + kv_heads, a.head_dim, dtype=a.dtype)
            qkv = empty(64, (a.heads + 2 * kv_heads) * a.head_dim, dtype=a.dtype)
            rotate_and_store(
                qkv, words(64), words(64), cache, cache, a.heads, table, False, norm, 1e-6, values_normed=True
            )

    return start


def norms(width: int, dtype: torch.dtype) -> Callable[[], None]:
    def start() -> None:
        x, weight = empty(64, width, dtype=dtype), empty(width, dtype=dtype)
        normed(x, weight, None, 1e-6)
        normed(x, empty(width, dtype=F32), None, 1e-6, x)
        normed(x, weight, weight, 1e-5)

    return start


def activations(width: int, dtype: torch.dtype) -> Callable[[], None]:
    def start() -> None:
        for kind in ("silu", "gelu", "gelu_tanh", "relu", "swigluoai"):
            activated(empty(64, width, dtype=dtype), kind, gated=True)
        for kind in ("gelu", "relu2"):
            activated(empty(64, width, dtype=dtype), kind, gated=False)
        activated(empty(64, width, dtype=dtype), "xielu", gated=False, numbers=empty(4, dtype=F32))

    return start


def fixed_products(hidden: int, inner: int, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case with products whose tiles do not depend on the number of rows."""

    def start() -> None:
        x = empty(64, hidden, dtype=dtype)
        fixed_linear(x, empty(2 * inner, hidden, dtype=dtype), empty(2 * inner, dtype=dtype))
        fixed_linear(empty(64, inner, dtype=dtype), empty(hidden, inner, dtype=dtype), residual=x)

    return start


def layer_of_few(hidden: int, qkv: int, attended: int, inner: int, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case with the matrix products of a decoder layer for four rows, and the output projection."""

    def start() -> None:
        x = empty(4, hidden, dtype=dtype)
        skinny_linear(x, empty(qkv, hidden, dtype=dtype))
        skinny_linear(x, empty(qkv, hidden, dtype=dtype), empty(qkv, dtype=dtype))
        skinny_linear(empty(4, attended, dtype=dtype), empty(hidden, attended, dtype=dtype), residual=x)
        skinny_linear(x, empty(2 * inner, hidden, dtype=dtype), activation="silu")
        skinny_linear(empty(4, inner, dtype=dtype), empty(hidden, inner, dtype=dtype), residual=x)
        skinny_linear(x, empty(128_256, hidden, dtype=dtype))

    return start


def adapters(rank: int, hidden: int, kv: int, inner: int, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case with the products of adapters in a decoder layer, for eight slots."""

    def start() -> None:
        tiles, ranks = LoraTiles(words(12 * 16), words(12)), padded_rank(rank)
        for widths, columns in (((hidden, kv, kv), hidden), ((inner, inner), hidden), ((hidden,), inner)):
            a, b = (8, len(widths) * ranks, columns), (8, sum(widths), ranks)
            x, y = empty(64, columns, dtype=dtype), empty(64, sum(widths), dtype=dtype)
            add_products(y, x, empty(*a, dtype=dtype), empty(*b, dtype=dtype), widths, tiles)

    return start


def state_moves(decodes: bool) -> DeviceMoves:
    return DeviceMoves(
        num_sequences=64,
        decodes=decodes,
        owners=words(64),
        query_start_loc=words(65),
        sources=words(64),
        starts=words(65),
        ends=words(64),
        slots=words(64),
    )


def convolution(channels: int, size: int, dtype: torch.dtype, biased: bool = False) -> Callable[[], None]:
    """Returns a case with the gated short convolution of steps with prompts, and of steps that decode."""

    def start() -> None:
        weight, bias = empty(size, channels, dtype=dtype), empty(channels, dtype=dtype) if biased else None
        states = empty(1024, (size - 1) * channels, dtype=F32)
        for decodes in (False, True):
            moves = state_moves(decodes)
            convolve(empty(64, 3 * channels, dtype=dtype), weight, bias, states, moves, gated=True)

    return start


def delta_rule(shape: GatedDelta | ChannelDelta, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case with the kernels between the projections of a layer with a delta rule."""

    def start() -> None:
        states, heads = empty(1024, shape.state_size, dtype=F32), shape.width // shape.value_dim
        rows = heads * (shape.key_dim if isinstance(shape, ChannelDelta) else 1)
        projected = empty(64, sum(shape.in_widths), dtype=dtype)
        kernel = empty(shape.kernel_size, shape.channels, dtype=dtype)
        for decodes in (False, True):
            moves = state_moves(decodes)
            mixed = convolve(projected[:, : shape.channels], kernel, None, states, moves, gated=False)
        betas, speeds = empty(64, 2 * heads, dtype=dtype)[:, :heads], empty(64, rows, dtype=dtype)
        vectors = empty(heads, dtype=F32), empty(rows, dtype=F32)
        attended = attend_delta(shape, mixed, betas, speeds, *vectors, states, moves)
        finish_delta(shape, attended, empty(64, shape.width, dtype=dtype), empty(shape.value_dim, dtype=dtype))

    return start


def state_space(shape: StateSpace, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case with the kernels between the projections of a layer with a state space of heads."""

    def start() -> None:
        states, vector = empty(1024, shape.state_size, dtype=F32), empty(shape.num_heads, dtype=F32)
        z, inputs, steps = empty(64, sum(shape.in_widths), dtype=dtype).split(
            (shape.width, shape.channels, shape.num_heads), dim=1
        )
        kernel, bias = empty(shape.kernel_size, shape.channels, dtype=dtype), empty(shape.channels, dtype=dtype)
        for decodes in (False, True):
            moves = state_moves(decodes)
            mixed = convolve(inputs, kernel, bias, states, moves, gated=False)
        read = scan_heads(shape, mixed, steps, vector, vector, vector, states, moves)
        gate_heads(shape, read, z, empty(shape.width, dtype=F32))

    return start


def channel_space(shape: ChannelSpace, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case with the kernels between the projections of a layer with a state space of channels."""

    def start() -> None:
        states, vector = empty(1024, shape.state_size, dtype=F32), empty(shape.channels, dtype=F32)
        inputs, z = empty(64, 2 * shape.channels, dtype=dtype).chunk(2, dim=1)
        kernel, bias = empty(shape.kernel_size, shape.channels, dtype=dtype), empty(shape.channels, dtype=dtype)
        for decodes in (False, True):
            moves = state_moves(decodes)
            values = convolve(inputs, kernel, bias, states, moves, gated=False)
        selected, steps = empty(64, sum(shape.select_widths), dtype=dtype), empty(64, shape.channels, dtype=dtype)
        norm_parts(shape, selected, empty(sum(shape.select_widths), dtype=dtype))
        decay = empty(shape.state_dim, shape.channels, dtype=F32)
        scan_channels(shape, values, selected, steps, z, decay, vector, vector, states, moves)

    return start


QWEN3_NEXT = GatedDelta(
    layers=frozenset({0}),
    num_key_heads=16,
    num_value_heads=32,
    key_dim=128,
    value_dim=128,
    kernel_size=4,
    norm_eps=1e-6,
)
KIMI_LINEAR = ChannelDelta(
    layers=frozenset({0}), num_heads=32, key_dim=128, value_dim=128, rank=128, kernel_size=4, norm_eps=1e-5
)
STATE_SPACES = {
    "Nemotron 3 Nano": StateSpace(
        layers=frozenset({0}), num_heads=64, head_dim=64, state_dim=128, num_groups=8, kernel_size=4, norm_eps=1e-5
    ),
    "Granite 4 Small": StateSpace(
        layers=frozenset({0}), num_heads=128, head_dim=64, state_dim=128, num_groups=1, kernel_size=4, norm_eps=1e-5
    ),
    "Falcon H1 7B": StateSpace(
        layers=frozenset({0}),
        num_heads=24,
        head_dim=128,
        state_dim=256,
        num_groups=1,
        kernel_size=4,
        norm_eps=1e-5,
        norm="none",
        scales=(0.35, 0.25, 0.18, 0.5, 0.35),
    ),
}
JAMBA = ChannelSpace(
    layers=frozenset({0}), channels=8192, state_dim=16, step_rank=256, kernel_size=4, part_norms="weighted"
)
QUANTIZED = {
    "int8": KernelWeight(
        kind="int8", values=BYTES, scales=SCALES, zeros=None, levels=None, columns=4096, group_size=0, piece=128
    ),
    "int8, groups of 128": KernelWeight(
        kind="int8", values=BYTES, scales=GROUPS, zeros=None, levels=None, columns=4096, group_size=128, piece=128
    ),
    "int8_dynamic": KernelWeight(
        kind="int8_dynamic", values=BYTES, scales=SCALES, zeros=None, levels=None, columns=4096, group_size=0, piece=128
    ),
    "int4, groups of 128": KernelWeight(
        kind="int4", values=HALVES, scales=GROUPS, zeros=None, levels=None, columns=4096, group_size=128, piece=128
    ),
    "int4, groups of 128, zero points": KernelWeight(
        kind="int4", values=HALVES, scales=GROUPS, zeros=GROUPS, levels=None, columns=4096, group_size=128, piece=128
    ),
    "int4, groups of 32": KernelWeight(
        kind="int4",
        values=HALVES,
        scales=empty(128, 6144, dtype=F32),
        zeros=None,
        levels=None,
        columns=4096,
        group_size=32,
        piece=32,
    ),
    "nf4, groups of 64": KernelWeight(
        kind="int4",
        values=HALVES,
        scales=empty(64, 6144, dtype=F32),
        zeros=None,
        levels=LEVELS,
        columns=4096,
        group_size=64,
        piece=64,
    ),
    "fp8": KernelWeight(
        kind="fp8", values=FLOATS, scales=SCALES, zeros=None, levels=None, columns=4096, group_size=0, piece=128
    ),
    "fp8, blocks of 128": KernelWeight(
        kind="fp8", values=FLOATS, scales=GROUPS, zeros=None, levels=None, columns=4096, group_size=128, piece=128
    ),
}
"""The projection of query, key and value of Llama 3.1 8B, in each kind of quantized weights."""


def quantized(weight: KernelWeight, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a case with the products of few, some and many rows, and of one, some and most with swapped operands."""

    def start() -> None:
        bias = empty(weight.width, dtype=dtype)
        for rows in (4, 64, 2048):
            quantized_linear(empty(rows, weight.columns, dtype=dtype), weight, bias)
        for rows in (1, 64, 128):
            swapped_linear(empty(rows, weight.columns, dtype=dtype), weight, bias)

    return start


def ordered_rows() -> None:
    order_rows(empty(64, 4096), words(4096))


def sampling(vocab: int, dtype: torch.dtype) -> Callable[[], None]:
    def start() -> None:
        columns = new_columns(64).map(lambda column: torch.from_numpy(column).to("meta"))
        counts, in_prompt, numbers = words(256, vocab), empty(256, vocab, dtype=torch.int8), words(64)
        adjustments = Adjustments(
            counts=counts,
            in_prompt=in_prompt,
            bitmask=words(64, -(-vocab // 32)),
            penalty_rows=numbers,
            mask_rows=numbers,
        )
        choose_tokens(empty(64, vocab, dtype=dtype), columns, numbers, adjustments)

    return start


def moves() -> None:
    cache, packed = empty(64, 1024, 2048, dtype=torch.int64), empty(16, 64, 2048, dtype=torch.int64)
    copy_blocks(cache, words(16), words(16))
    gather_blocks(cache, words(16), packed)
    scatter_blocks(packed, words(16), cache)
    known_ids(words(64), words(64), empty(256, dtype=torch.int64))
    scatter_words(words(256, 512), words(64), words(64))


def all_cases() -> Iterator[Case]:
    """Yields every case, in the order of the table in docs/contributing/kernels.md."""
    for name, a in ATTENTIONS.items():
        yield Case(f"attention, {name}", attention(a), NOT_ON_SM_80 if a.cache else frozenset())
    for name, latents in LATENTS.items():
        left_out = NOT_ON_SM_80 if latents.cache else frozenset[str]()
        yield Case(f"latent attention, {name}", latent_attention(latents), left_out)
    llama, qwen = ATTENTIONS["Llama 3.1 8B"], ATTENTIONS["Qwen3 0.6B"]
    yield Case("rotation and cache, Llama 3.1 8B", rope(llama, 128, False, False))
    yield Case("rotation and cache, Qwen3 0.6B", rope(qwen, 128, False, True))
    yield Case("rotation and cache, GLM 4", rope(Attention(32, 2, 128), 64, True, False))
    yield Case("rotation and cache, Hunyuan 7B", rope(llama, 128, False, True, norm_last=True))
    vision = Attention(28, 4, 128)
    yield Case("rotation and cache, Qwen2.5-VL 7B, images", rope(vision, 128, False, False, spatial=True))
    yield Case("rotation and cache, GPT-2", rope(Attention(12, 12, 64, dtype=F16), 0, False, False))
    yield Case("rotation and cache, Gemma 4 E4B", normed_values(ATTENTIONS["Gemma 4 E4B, 8 queries"]))
    eight = ATTENTIONS["Llama 3.1 8B, cache e4m3"]
    yield Case("rotation and cache, cache e4m3", rope(eight, 128, False, False), NOT_ON_SM_80)
    for dtype, label in ((BF16, "bfloat16"), (F16, "float16"), (F32, "float32")):
        yield Case(f"norms, {label}", norms(4096, dtype))
        yield Case(f"activations, {label}", activations(2 * 14336, dtype))
        yield Case(f"products of few rows, Llama 3.1 8B, {label}", layer_of_few(4096, 6144, 4096, 14336, dtype))
        yield Case(f"products in a fixed order, Llama 3.1 8B, {label}", fixed_products(4096, 14336, dtype))
        yield Case(f"sampling, {label}", sampling(128_256, dtype))
    yield Case("products of few rows, Qwen3 0.6B, bfloat16", layer_of_few(1024, 4096, 2048, 3072, BF16))
    for name, start in expert_cases():
        yield Case(name, start)
    for name, weight in QUANTIZED.items():
        yield Case(f"products of quantized weights, {name}", quantized(weight, BF16))
    yield Case("rows in the order of a quantized weight", ordered_rows)
    yield Case("products of quantized weights, float16, int4", quantized(QUANTIZED["int4, groups of 128"], F16))
    wide = KernelWeight(
        kind="int4", values=HALVES, scales=GROUPS, zeros=GROUPS, levels=None, columns=4096, group_size=128, piece=32
    )
    yield Case("products of quantized weights, float32, int4", quantized(wide, F32))
    yield Case("adapters, Llama 3.1 8B, rank 16", adapters(16, 4096, 1024, 14336, BF16))
    yield Case("adapters, Llama 3.1 8B, rank 128, float16", adapters(128, 4096, 1024, 14336, F16))
    yield Case("adapters, float32", adapters(16, 1024, 512, 2048, F32))
    yield Case("convolution, LFM2 1.2B", convolution(2048, 3, BF16))
    yield Case("convolution, float16", convolution(1536, 4, F16, biased=True))
    yield Case("convolution, float32", convolution(1536, 3, F32, biased=True))
    for dtype, label in ((BF16, "bfloat16"), (F16, "float16"), (F32, "float32")):
        yield Case(f"gated delta rule, Qwen3-Next 80B, {label}", delta_rule(QWEN3_NEXT, dtype))
        yield Case(f"gated delta rule, Kimi Linear 48B, {label}", delta_rule(KIMI_LINEAR, dtype))
        yield Case(f"state space, Nemotron 3 Nano, {label}", state_space(STATE_SPACES["Nemotron 3 Nano"], dtype))
        yield Case(f"state space, Jamba 1.5 Mini, {label}", channel_space(JAMBA, dtype))
    for name in ("Granite 4 Small", "Falcon H1 7B"):
        yield Case(f"state space, {name}", state_space(STATE_SPACES[name], BF16))
    yield Case("blocks and inputs", moves)
