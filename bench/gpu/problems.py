"""Problems for the kernels, with random numbers on the device: attention with its reference, and sampling."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from antiphon.services.engine.backends.triton.kernels.sampling import Adjustments
from antiphon.services.engine.kernels.latent_attention import latent_attention
from antiphon.services.engine.kernels.paged_attention import AttentionShape, Scores, paged_attention, plan_attention
from antiphon.services.engine.kernels.sampling import SamplingColumns, new_columns, set_row
from antiphon.services.engine.kernels.storage import as_stored
from antiphon.services.engine.models import description
from antiphon.shared.parameters.sampling import SamplingParams
from bench.gpu.parts import DEVICE

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BLOCK_SIZE = 64


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    """Returns random numbers on the device."""
    return torch.randn(shape, device=DEVICE, dtype=dtype).mul_(scale)


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
    """Runs the kernels of attention; `attended` is their output."""
    if work.few is not None:
        attend_few(queries, caches[0], caches[1], attended, work, geometry)
    if work.many is not None:
        attend_many(queries, caches[0], caches[1], attended, work, geometry)
    return attended


def sampling_of(rows: int, vocab: int, params: SamplingParams) -> tuple[SamplingColumns[Tensor], Tensor, Adjustments]:
    """Returns the arguments of `choose_tokens` for rows with the same parameters, without penalties and masks."""
    columns = new_columns(rows)
    for row in range(rows):
        set_row(columns, row, params)
    none = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros((rows, vocab), dtype=torch.int32, device=DEVICE)
    everything = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=DEVICE)
    adjustments = Adjustments(
        counts=counts, in_prompt=counts.to(torch.int8), bitmask=everything, penalty_rows=none, mask_rows=none
    )
    return columns.map(lambda column: torch.from_numpy(column).to(DEVICE)), none + 1, adjustments
