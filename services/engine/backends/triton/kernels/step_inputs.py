"""Small kernels that combine the host's inputs with state kept on the device: sampled tokens and block tables.

    known_ids       ids[i] = last[sources[i]] where sources[i] >= 0; elsewhere ids[i] keeps the id that the host sent
    scatter_words   table.flatten()[places[i]] = words[i]: writes the changed entries of a table

`last` has the last sampled token of each sequence, in the sequence's row. The next step of the sequence reads the token
from there, so the step can start before the host has read the token.

Reference: PyTorch's indexing, as in these formulas.
"""

import triton
import triton.language as tl
from torch import Tensor

from antiphon.services.engine.backends.triton.kernels.runtime import ceil_div, launch

_AT_ONCE = 256


@triton.jit(do_not_specialize=["count"])
def _known_ids_kernel(ids, sources, last, count, AT_ONCE: tl.constexpr):
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    source = tl.load(sources + i, mask=i < count, other=-1)
    token = tl.load(last + source, mask=source >= 0, other=0)
    tl.store(ids + i, token.to(ids.dtype.element_ty), mask=source >= 0)


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(table, places, words, count, AT_ONCE: tl.constexpr):
    i = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    place = tl.load(places + i, mask=i < count, other=0)
    tl.store(table + place, tl.load(words + i, mask=i < count, other=0), mask=i < count)


def known_ids(ids: Tensor, sources: Tensor, last: Tensor) -> None:
    """Replaces ids [n] int32 in place by sampled tokens; `sources` [n] int32: rows of `last` [rows] int64, or -1."""
    count = len(ids)
    launch(_known_ids_kernel, (ceil_div(count, _AT_ONCE),), ids, sources, last, count, warps=4, AT_ONCE=_AT_ONCE)


def scatter_words(table: Tensor, places: Tensor, words: Tensor) -> None:
    """Writes `words` [n] int32 at the flat indices `places` [n] int32 of `table`. The indices must be distinct."""
    count = len(places)
    launch(_scatter_kernel, (ceil_div(count, _AT_ONCE),), table, places, words, count, warps=4, AT_ONCE=_AT_ONCE)
