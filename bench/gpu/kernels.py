"""Compares the kernels on the GPU in bfloat16 with the reference in float32, then times the most important ones.

An error is ‖ours - theirs‖ / ‖theirs‖. With bfloat16 operands it is between 0.001 and 0.01.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.activation import activated
from antiphon.services.engine.backends.triton.kernels.attention.attention_work import (
    DeviceWork,
    Geometry,
    Heads,
    Sequences,
    plan_work,
)
from antiphon.services.engine.backends.triton.kernels.attention.decode_attention import attend_few
from antiphon.services.engine.backends.triton.kernels.attention.expanded_attention import attend_made, gather_rows
from antiphon.services.engine.backends.triton.kernels.attention.latent_attention import (
    RowShape,
    attend_few_latents,
    attend_many_latents,
)
from antiphon.services.engine.backends.triton.kernels.attention.prefill_attention import attend_many
from antiphon.services.engine.backends.triton.kernels.blocks import gather_blocks, scatter_blocks
from antiphon.services.engine.backends.triton.kernels.experts import library_experts, mixed_experts
from antiphon.services.engine.backends.triton.kernels.norm import normed
from antiphon.services.engine.backends.triton.kernels.products.quantized import quantized_linear, swapped_linear
from antiphon.services.engine.backends.triton.kernels.products.skinny import skinny_linear
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight, kernel_weight
from antiphon.services.engine.backends.triton.kernels.sampling import Adjustments, choose_tokens
from antiphon.services.engine.kernels.activation import ACTIVATIONS, gated, gated_by, xielu, xielu_numbers
from antiphon.services.engine.kernels.experts import mixed_experts as reference_experts
from antiphon.services.engine.kernels.experts import route
from antiphon.services.engine.kernels.latent_attention import latent_attention
from antiphon.services.engine.kernels.paged_attention import AttentionShape, Scores, paged_attention, plan_attention
from antiphon.services.engine.kernels.rms_norm import rms_norm
from antiphon.services.engine.kernels.sampling import new_columns, set_row
from antiphon.services.engine.kernels.storage import as_stored
from antiphon.services.engine.models import description
from antiphon.services.engine.quantization.rounding import quantize_fp8, quantize_int4, quantize_int8, quantize_nf4
from antiphon.services.engine.quantization.weight import QuantizedWeight
from antiphon.shared.parameters.sampling import SamplingParams
from bench.gpu.timing import graph_ms

QUANTIZED: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int8_dynamic": lambda weight: quantize_int8(weight, "int8_dynamic"),
    "int4": quantize_int4,
    "int4 with zero points": lambda weight: quantize_int4(weight, 128, zero_points=True),
    "nf4": quantize_nf4,
    "fp8": quantize_fp8,
}
DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
ERROR_MAX = 0.012
BLOCK_SIZE = 64


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def error(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).norm() / theirs.norm())


class Attention:
    """An attention problem with random queries, keys and values, whose KV blocks are in random order.

    `lengths` has, for each sequence, the number of tokens computed earlier and the number of query tokens. With
    `images` the query tokens of a sequence are those of an image, which attend to each other.
    """

    def __init__(
        self, lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, window: int | None = None,
        softcap: float | None = None, cache: torch.dtype = BF16, images: bool = False,
    ) -> None:  # fmt: skip
        query_lens = np.array([queries for _, queries in lengths])
        seq_lens = np.array([computed + queries for computed, queries in lengths])
        widths = -(-seq_lens // BLOCK_SIZE)
        ids = np.random.default_rng(1).permutation(int(widths.sum()))
        self.tables = np.zeros((len(lengths), int(widths.max())), dtype=np.int32)
        for row, width in enumerate(widths):
            self.tables[row, :width], ids = ids[:width], ids[width:]
        self.spans = [[(computed, computed + queries)] if images else [] for computed, queries in lengths]
        horizons = np.repeat(seq_lens - 1, query_lens) if images else None
        starts = query_lens.cumsum() - query_lens
        self.sequences = Sequences(np.arange(len(lengths)), seq_lens, starts, query_lens, horizons)
        self.queries = draw(int(query_lens.sum()), heads, head_dim)
        shape = (int(widths.sum()), BLOCK_SIZE, kv_heads, head_dim)
        self.caches = [as_stored(draw(*shape), cache) for _ in range(2)]
        self.window, self.softcap, self.kv_heads = window, softcap, kv_heads
        self.geometry = Geometry(kv_heads=kv_heads, scale=head_dim**-0.5, softcap=softcap)
        tables = torch.from_numpy(self.tables).to(DEVICE)
        kind = _heads(heads // kv_heads, self.caches[0], images=images)
        self.work = plan_work(self.sequences, tables, window, kind, _put)

    def run(self) -> Tensor:
        """Runs the kernels. The output is first filled with NaN, so that missing values are noticed."""
        attended = torch.full_like(self.queries, float("nan"))
        return attend(self.queries, self.caches, attended, self.work, self.geometry)

    def expected(self) -> Tensor:
        """Returns the result of the reference in float32."""
        shape = AttentionShape(block_size=BLOCK_SIZE, bytes_per_slot=1, dtype=torch.float32, device=DEVICE)
        starts = np.concatenate((self.sequences.query_starts, [len(self.queries)]))
        tables = self.tables.astype(np.int64)
        batch = plan_attention(starts, self.sequences.seq_lens, tables[None], self.window, shape, self.spans)
        keys, values = (cache.float() for cache in self.caches)
        none = keys.new_zeros((len(self.queries), self.kv_heads, keys.shape[-1]))
        scores = Scores(None, self.softcap)
        return paged_attention(self.queries.float(), none, none, keys, values, batch, scores)


class LatentAttention(Attention):
    """An attention problem over rows of latents. A row serves all heads as key, and its latent part as value."""

    RANK, ROPE = 512, 64
    SHAPE = description.LatentAttention(rank=512, rope_dim=64, nope_dim=512, value_dim=512)
    """With keys and values so wide that no sequence is expanded."""

    def __init__(self, lengths: list[tuple[int, int]], heads: int, cache: torch.dtype = BF16) -> None:
        super().__init__(lengths, heads, 1, self.RANK + self.ROPE, cache=cache)
        self.caches = self.caches[:1] * 2
        tables = torch.from_numpy(self.tables).to(DEVICE)
        self.work = plan_work(self.sequences, tables, None, _heads(heads, self.caches[0], self.SHAPE), _put)

    def run(self) -> Tensor:
        """See `Attention`; the result has the width of the latent part of a row (`RANK`)."""
        row = RowShape(self.RANK, self.ROPE, self.geometry.scale)
        attended = torch.full_like(self.queries[..., : self.RANK], float("nan"), memory_format=torch.contiguous_format)
        absorbed, turned = (part.contiguous() for part in self.queries.split((self.RANK, self.ROPE), dim=2))
        for work, attends in ((self.work.few, attend_few_latents), (self.work.many, attend_many_latents)):
            if work is not None:
                attends(absorbed, turned, self.caches[0], attended, self.work, row)
        return attended

    def expected(self) -> Tensor:
        """See `Attention`."""
        return super().expected()[..., : self.RANK]


class ExpandedLatents(LatentAttention):
    """The same for sequences with many queries, with keys and values of each head computed from the rows."""

    SHAPE = description.LatentAttention(rank=512, rope_dim=64, nope_dim=128, value_dim=128)

    def __init__(self, lengths: list[tuple[int, int]], heads: int) -> None:
        super().__init__(lengths, heads)
        a = self.SHAPE
        self.queries, self.up = (
            draw(len(self.queries), heads, a.query_dim),
            draw(heads, 256, a.rank, scale=a.rank**-0.5),
        )
        expanded = self.work.expanded
        assert expanded is not None
        assert self.work.few is self.work.many is None
        self.expanded = expanded
        self.rows, self.made = draw(expanded.most_rows, a.row_size), draw(expanded.most_rows, heads * 256)
        sums = (torch.empty(*self.queries.shape[:2], *last, device=DEVICE) for last in ((a.value_dim,), (), ()))
        self.sums: Any = tuple(sums) if len(expanded.pieces) > 1 else None

    def run(self) -> Tensor:
        """See `Attention`."""
        a, queries = self.SHAPE, self.queries
        turned = queries[..., a.nope_dim :].contiguous()
        attended = torch.full((*queries.shape[:2], a.value_dim), float("nan"), dtype=BF16, device=DEVICE)
        tables = torch.as_tensor(self.tables, device=DEVICE)
        for piece in self.expanded.pieces:
            gather_rows(self.caches[0], self.rows, tables, piece)
            made = self.made[: piece.num_rows]
            torch.mm(self.rows[: piece.num_rows, : a.rank], self.up.flatten(0, 1).t(), out=made)
            work = self.expanded, piece
            attend_made(queries, turned, made, self.rows, attended, self.sums, work, a.query_dim**-0.5)
        return attended

    def expected(self) -> Tensor:
        """See `Attention`; of sequences with a context."""
        shape = AttentionShape(block_size=BLOCK_SIZE, bytes_per_slot=1, dtype=torch.float32, device=DEVICE)
        starts = np.concatenate((self.sequences.query_starts, [len(self.queries)]))
        batch = plan_attention(starts, self.sequences.seq_lens, self.tables.astype(np.int64)[None], None, shape)
        cache, none = self.caches[0].float(), torch.zeros(len(self.queries), self.SHAPE.row_size, device=DEVICE)
        up = self.up.float()
        return latent_attention(self.queries.float(), none, cache, up, batch, self.SHAPE.query_dim**-0.5)


def _heads(
    group: int, cache: Tensor, latent: description.LatentAttention | None = None, *, images: bool = False
) -> Heads:
    return Heads(
        group=group,
        head_dim=cache.shape[-1],
        itemsize=BF16.itemsize,
        stored_itemsize=cache.dtype.itemsize,
        latent=latent,
        mutual=images,
    )


def _put(values: "np.ndarray[Any, Any]", capacity: int) -> Tensor:
    out = np.zeros(max(capacity, len(values)), dtype=np.int32)
    out[: len(values)] = values
    return torch.from_numpy(out).to(DEVICE)


def attend(queries: Tensor, caches: list[Tensor], attended: Tensor, work: DeviceWork, geometry: Geometry) -> Tensor:
    if work.few is not None:
        attend_few(queries, caches[0], caches[1], attended, work, geometry)
    if work.many is not None:
        attend_many(queries, caches[0], caches[1], attended, work, geometry)
    return attended


def errors() -> Iterator[tuple[str, float]]:
    """Yields the name and the error of each test of a kernel."""
    decodes = [(n, 1) for n in (1, 15, 255, 256, 1000, 4097, 40_000)]
    # Each prompt has a computed prefix, so that the reference reads all keys and values from the cache too.
    prefills = [(16, 300), (500, 129), (100, 1), (1000, 64)]
    for name, lengths in (("decode", decodes), ("prefill", prefills)):
        yield f"{name}, 32 heads on 8", _attention_error(Attention(lengths, 32, 8, 128))
        yield f"{name}, window", _attention_error(Attention(lengths, 16, 8, 128, window=200))
        yield f"{name}, soft cap, 256", _attention_error(Attention(lengths, 8, 4, 256, softcap=30.0))
        yield f"{name}, groups of 7, 64", _attention_error(Attention(lengths, 14, 2, 64))
        yield f"{name}, groups of 8, 512", _attention_error(Attention(lengths, 8, 1, 512))
        eight = Attention(lengths, 32, 8, 128, cache=torch.float8_e4m3fn)
        yield f"{name}, e4m3 cache", _attention_error(eight)
        for heads in (16, 20, 128):
            yield f"{name}, latents, {heads} heads", _attention_error(LatentAttention(lengths, heads))
        yield f"{name}, latents, e4m3 cache", _attention_error(LatentAttention(lengths, 16, torch.float8_e4m3fn))
    yield "chunks, expanded latents", _attention_error(ExpandedLatents([(300, 700), (64, 400)], 16))
    yield "chunks, expanded latents, in pieces", _attention_error(ExpandedLatents([(30_000, 300)], 16))
    yield "images", _attention_error(Attention([*prefills, (300, 5)], 32, 16, 128, images=True))
    yield "images, window", _attention_error(Attention(prefills, 16, 8, 256, window=200, images=True))
    yield "guesses, latents", _attention_error(LatentAttention([(300, 9), (4000, 5)], 20))
    x, weight, residual = draw(65, 4096), draw(4096), draw(65, 4096)
    expected = residual.float() + rms_norm(x.float(), weight.float(), 1e-5)
    yield "norm", error(normed(x, weight, None, 1e-5, residual), expected)
    wide = draw(65, 2 * 14336)
    yield "silu", error(activated(wide, "silu", gated=True), gated(ACTIVATIONS["silu"], wide.float()))
    yield "gelu", error(activated(wide, "gelu", gated=True), gated(ACTIVATIONS["gelu"], wide.float()))
    yield "relu2", error(activated(wide, "relu2", gated=False), ACTIVATIONS["relu2"](wide.float()))
    numbers = xielu_numbers(torch.tensor([0.2, -0.8, 0.5, -1e-6], device=DEVICE))
    yield "xielu", error(activated(wide, "xielu", gated=False, numbers=numbers), xielu(numbers, wide.float()))
    for rows in (1, 5, 16):
        yield f"few rows, {rows}", _skinny_error(rows)
    for name, quantize in QUANTIZED.items():
        weight = quantize(draw(1000, 4096, scale=0.02))
        for rows in (1, 16, 70, 300):
            yield f"{name}, {rows} rows", _quantized_error(weight, rows, quantized_linear)
            yield f"{name}, {rows} rows, swapped", _quantized_error(weight, rows, swapped_linear)
    for tokens in (3, 300, 4000):
        yield f"experts, {tokens} tokens", _experts_error(tokens, mixed_experts)
        yield f"experts, {tokens} tokens, library", _experts_error(tokens, library_experts)
    cache = torch.randint(0, 2**60, (64, 50, 4096), device=DEVICE)
    packed = torch.zeros(7, 64, 4096, device=DEVICE, dtype=torch.int64)
    blocks = torch.tensor([3, 49, 0, 7, 8, 11, 20], dtype=torch.int32, device=DEVICE)
    gather_blocks(cache, blocks, packed)
    copy = torch.zeros_like(cache)
    scatter_blocks(packed, blocks, copy)
    yield "blocks", 0.0 if torch.equal(copy[:, blocks.long()], cache[:, blocks.long()]) else 1.0


def _attention_error(attention: Attention) -> float:
    return error(attention.run(), attention.expected())


def _skinny_error(rows: int) -> float:
    x, weight, residual = draw(rows, 4096), draw(2 * 1000, 4096, scale=0.02), draw(rows, 1000)
    ours = skinny_linear(x, weight, activation="silu", residual=residual)
    return error(ours, residual.float() + gated(ACTIVATIONS["silu"], F.linear(x.float(), weight.float())))


def _quantized_error(weight: QuantizedWeight, rows: int, product: Callable[..., Tensor]) -> float:
    x = draw(rows, weight.shape[1])
    ours = product(x, kernel_weight(weight, BF16))
    return error(ours, F.linear(weight.round_rows(x.float()), weight.dequantized()))


def _experts_error(tokens: int, mixed: Callable[..., Tensor]) -> float:
    x, up, down = draw(tokens, 512), draw(16, 2 * 384, 512, scale=0.04), draw(16, 512, 384, scale=0.05)
    shares, chosen = route(draw(tokens, 16), 4, normalise=True)
    ours = mixed(x, shares, chosen, up, down, "silu")
    ups, downs = ([partial(F.linear, weight=one.float()) for one in matrices] for matrices in (up, down))
    theirs = reference_experts(x.float(), shares.float(), chosen, ups, downs, gated_by("silu"))
    return error(ours, theirs)


def times() -> dict[str, dict[str, float]]:
    """Returns, for single kernels, the milliseconds and the rate of bytes moved or operations computed."""
    found: dict[str, dict[str, float]] = {}
    for cache in (BF16, torch.float8_e4m3fn):
        for count, length in ((1, 1024), (8, 1024), (64, 4096), (256, 1024), (1, 32768), (1, 131072), (8, 131072)):
            attention = Attention([(length - 1, 1)] * count, 32, 8, 128, cache=cache)
            ms = graph_ms(attention.run)
            name = f"decode attention, {count} x {length}, {str(cache).removeprefix('torch.')}"
            found[name] = _moved(ms, 2 * count * length * 8 * 128 * cache.itemsize)
    for length in (2048, 8192):
        attention = Attention([(0, length)], 32, 8, 128)
        ms = graph_ms(attention.run, 10)
        found[f"prefill attention, {length}"] = {"ms": ms, "tflop_s": 4 * length**2 / 2 * 32 * 128 / ms / 1e9}
    for heads in (16, 128):
        for count, length in ((1, 4096), (8, 4096), (64, 4096)):
            latents = LatentAttention([(length - 1, 1)] * count, heads)
            ms = graph_ms(latents.run)
            found[f"decode latent attention, {heads} heads, {count} x {length}"] = _moved(ms, count * length * 576 * 2)
        for name, kind, products in (("absorbed", LatentAttention, 1088), ("expanded", ExpandedLatents, 320)):
            ms = graph_ms(kind([(0, 4096)], heads).run, 10)
            rate = 4096**2 * heads * products / ms / 1e9
            found[f"prefill latent attention, {name}, {heads} heads, 4096"] = {"ms": ms, "tflop_s": rate}
    for name, width, columns in (("qkv", 6144, 4096), ("down", 4096, 14336), ("head", 128256, 4096)):
        # Several weight matrices are used in turn, because a single one would stay in the cache.
        weights = [draw(width, columns) for _ in range(max(2, int(4e8 / (2 * width * columns))))]
        for rows in (1, 8):
            x = draw(rows, columns)
            for label, product in (("ours", skinny_linear), ("library", F.linear)):
                ms = graph_ms(_in_turn(product, x, weights)) / len(weights)
                found[f"{name}, {rows} rows, {label}"] = _moved(ms, 2 * width * columns)
        del weights
    for rows in (8, 256, 8192):
        x, weight, wide = draw(rows, 4096), draw(4096), draw(rows, 2 * 14336)
        found[f"norm, {rows} rows"] = _moved(graph_ms(partial(normed, x, weight, None, 1e-5)), 2 * x.nbytes)
        ms = graph_ms(partial(activated, wide, "silu", gated=True))
        found[f"silu, {rows} rows"] = _moved(ms, wide.nbytes + wide.nbytes // 2)
    return found | quantized_times() | sampling_times()


def quantized_times() -> dict[str, dict[str, float]]:
    """Returns the same for products of 1 to 256 rows with weights of 4096 x 14336, quantized and in bfloat16."""
    width, columns, found = 4096, 14336, dict[str, dict[str, float]]()
    plain = [draw(width, columns, scale=0.02) for _ in range(4)]
    for name, quantize in QUANTIZED.items():
        weights = [kernel_weight(quantize(weight), BF16) for weight in plain]
        for rows in (1, 8, 256):
            ms = graph_ms(_in_turn(quantized_linear, draw(rows, columns), weights)) / len(weights)
            found[f"{name}, {rows} rows"] = _moved(ms, weights[0].values.nbytes)
        for rows in (8, 64, 128):
            ms = graph_ms(_in_turn(swapped_linear, draw(rows, columns), weights)) / len(weights)
            found[f"{name}, {rows} rows, swapped"] = _moved(ms, weights[0].values.nbytes)
    for rows in (1, 8, 64, 128, 256):
        ms = graph_ms(_in_turn(F.linear, draw(rows, columns), plain)) / len(plain)
        found[f"bfloat16, {rows} rows"] = _moved(ms, plain[0].nbytes)
    return found


def _in_turn(product: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor | KernelWeight]) -> Callable[[], None]:
    def work() -> None:
        for weight in weights:
            product(x, weight)

    return work


def _moved(ms: float, num_bytes: int) -> dict[str, float]:
    return {"ms": round(ms, 4), "tb_s": round(num_bytes / ms / 1e9, 3)}


def sampling_times() -> dict[str, dict[str, float]]:
    """Returns the milliseconds of sampling from 128,256 logits, peaked as those of a trained model, and flat ones."""
    vocab, found = 128_256, dict[str, dict[str, float]]()
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "plain": SamplingParams(),
        "top-p": SamplingParams(top_p=0.9),
        "top-k and top-p": SamplingParams(top_k=50, top_p=0.9),
    }
    everything = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=DEVICE)
    for rows in (1, 64, 256):
        none = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros((rows, vocab), dtype=torch.int32, device=DEVICE)
        adjustments = Adjustments(
            counts=counts, in_prompt=counts.to(torch.int8), bitmask=everything, penalty_rows=none, mask_rows=none
        )
        for shape, scale in (("peaked", 3.0), ("flat", 0.3)):
            logits = draw(rows, vocab, scale=scale)
            for name, params in kinds.items():
                columns = new_columns(rows)
                for row in range(rows):
                    set_row(columns, row, params)
                given = columns.map(lambda column: torch.from_numpy(column).to(DEVICE)), none + 1, adjustments
                ms = graph_ms(partial(choose_tokens, logits, *given, any_draws=name != "greedy"))
                found[f"sampling, {name}, {rows} rows, {shape}"] = {"ms": round(ms, 4)}
    return found


def main() -> None:
    torch.manual_seed(0)
    found = {name: round(value, 5) for name, value in errors()}
    wrong = [name for name, value in found.items() if not value <= ERROR_MAX]
    print(json.dumps({"errors": found, "wrong": wrong, "times": times()}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
