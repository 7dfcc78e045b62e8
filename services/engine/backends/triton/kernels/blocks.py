"""Copies blocks of the KV cache: within the cache, and between the cache and one contiguous buffer.

    cache    [parts, num_blocks, words]     parts: keys and values of every layer
    packed   [n, parts, words]              the data of a block in all layers is contiguous
    copy     cache[:, target] = cache[:, source]     for pairs of blocks
    gather   packed[i] = cache[:, block_i]
    scatter  cache[:, block_i] = packed[i]

Words are integers of any size; the kernels do not interpret them. `packed` is the layout for copies to the host's
memory or to another engine: one large copy instead of many small ones. In one call no block may be the target of two
copies, or both source and target.

Reference: indexing, as the formulas are written. Paged caches: arXiv 2309.06180.
"""

import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import launch

_WORDS_AT_ONCE = 1024


@triton.jit
def _move_kernel(
    source, target, source_blocks, target_blocks, source_block, source_part, target_block, target_part, words,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Copies one part of one block. None as a block list means 0, 1, 2, …."""
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    origin = i if source_blocks is None else tl.load(source_blocks + i).to(tl.int64)
    goal = i if target_blocks is None else tl.load(target_blocks + i).to(tl.int64)
    source += origin * source_block + part * source_part
    target += goal * target_block + part * target_part
    for first in range(0, words, PIECE):
        w = first + tl.arange(0, PIECE)
        tl.store(target + w, tl.load(source + w, mask=w < words, other=0), mask=w < words)


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copies blocks within the cache; `sources`, `targets` [n] int32."""
    strides = (cache.stride(1), cache.stride(0))
    _move(cache, cache, sources, targets, (*strides, *strides), (len(sources), cache.shape[0]))


def gather_blocks(cache: Tensor, blocks: Tensor, packed: Tensor) -> None:
    """Copies blocks [n] int32 of the cache into the first n entries of `packed`."""
    strides = (cache.stride(1), cache.stride(0), packed.stride(0), packed.stride(1))
    _move(cache, packed, blocks, None, strides, (len(blocks), cache.shape[0]))


def scatter_blocks(packed: Tensor, blocks: Tensor, cache: Tensor) -> None:
    """Copies the first n entries of `packed` into blocks [n] int32 of the cache."""
    strides = (packed.stride(0), packed.stride(1), cache.stride(1), cache.stride(0))
    _move(packed, cache, None, blocks, strides, (len(blocks), cache.shape[0]))


def _move(
    source: Tensor,
    target: Tensor,
    source_blocks: Tensor | None,
    target_blocks: Tensor | None,
    strides: tuple[int, ...],
    grid: tuple[int, int],
) -> None:
    assert source.stride(-1) == target.stride(-1) == 1
    assert source.dtype == target.dtype
    launch(
        _move_kernel, grid, source, target, source_blocks, target_blocks, *strides, source.shape[-1],
        warps=4, PIECE=_WORDS_AT_ONCE,
    )  # fmt: skip
