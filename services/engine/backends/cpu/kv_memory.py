"""Converts the C++ backend's KV cache to and from the transfer layout (`antiphon.services.engine.kv.layout`).

The cache has panels (`source/cache.h`), where t = 1 for a model in float32 and 2 for one in bfloat16,
p = min(32, block_size), u = min(64, block_size), e = min(t, u):

    keys    [blocks, kv_heads, block_size / p, width / t, p tokens, t dimensions]
    values  [blocks, kv_heads, block_size / u, width / 32, u / e, 32 dimensions, e tokens]

With latent attention there are only keys. Engines with the same panels exchange them as they are (`OwnForm`); other
engines convert blocks. Where layers have heads of their own and are in several groups (`models/kv_groups`), a block
does not tell the heads that it has, so that only engines with the same panels exchange such blocks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.kv.layout import KvLayout, OwnForm
from antiphon.services.engine.kv.pieces import Bytes, NativeCopy, checksum
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.worker.capacity.kv_cache import KvCache, padded_heads
from antiphon.services.engine.worker.capacity.kv_memory import blocks_of

_PANEL, _UNIT = 32, 64
_NUMBERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Unsigned types by size in bytes."""
_TERMS = {torch.float32: 1, torch.bfloat16: 2}
_FORM = "panels 1"
"""Name of this order of the numbers, to be changed when the order changes. `t` (`_TERMS`) is appended to the name."""
Numbers = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


class _Rows(NamedTuple):
    """The keys or values of a layer in a cache."""

    part: int
    """Index among the parts of a block in the transfer layout."""
    first: int
    """The layer's first number in a row of the part."""
    shape: tuple[int, int, int]
    """Tokens of a block, heads, numbers of a head with the padding."""
    head_dim: int
    view: Numbers
    """The cache with the dimensions of such rows, split up, after that of the blocks."""


class PanelMemory:
    """A `KvMemory` of the C++ backend. `description` is without the padding; `dtype` is the model's type.

    `native`: the C++ library's function that copies blocks; None: numpy copies them.
    """

    def __init__(
        self,
        cache: KvCache,
        host: KvCache,
        description: DecoderDescription,
        dtype: torch.dtype,
        native: NativeCopy | None = None,
    ) -> None:
        first = cache.parts[0]
        self._type, self._terms = _NUMBERS[first.dtype.itemsize], _TERMS[dtype]
        shared, form = bool(description.layer_kv_heads), f"{_FORM} {self._terms}"
        self._as_panels = bool(description.kv_groups) and len(set(description.layer_kv_heads)) > 1
        width = description.slab_width if shared else description.head_dim
        if self._as_panels:
            width = padded_heads(description).slab_width
        self.layout = KvLayout(
            num_layers=len(description.slabs),
            num_kv_heads=1 if shared else first.shape[2],
            head_bytes=width * first.dtype.itemsize,
            dtype=str(first.dtype).removeprefix("torch.") + f" {form}" * self._as_panels,
            block_size=first.shape[1],
            num_parts=cache.parts_per_layer,
        )
        self._cache, self._host = (list(self._rows(each, description)) for each in (cache, host))
        self.own = OwnForm(form, blocks_of(cache, native), blocks_of(host, native))

    def read(self, block: int, out: Bytes) -> int:
        """See `KvMemory`."""
        if self._as_panels:
            return self.own.cache.read(block, out)
        num_tokens = out.shape[2]
        parts = out.reshape(-1, num_tokens, out.shape[3] * out.shape[4]).view(self._type)
        for one in self._cache:
            part, rows = one.view[block], np.empty(one.shape, dtype=self._type)
            rows.reshape(part.shape)[:] = part
            numbers = rows[:num_tokens, :, : one.head_dim].reshape(num_tokens, -1)
            parts[one.part, :, one.first : one.first + numbers.shape[1]] = numbers
        return checksum(out)

    def write(self, host_block: int, data: Bytes) -> int:
        """See `KvMemory`. The padding and the tokens after the given ones become zero."""
        if self._as_panels:
            return self.own.host.write(host_block, data)
        num_tokens = data.shape[2]
        parts = data.reshape(-1, num_tokens, data.shape[3] * data.shape[4]).view(self._type)
        for one in self._host:
            part, rows = one.view[host_block], np.zeros(one.shape, dtype=self._type)
            heads = (num_tokens, one.shape[1], one.head_dim)
            numbers = parts[one.part, :, one.first : one.first + one.shape[1] * one.head_dim]
            rows[:num_tokens, :, : one.head_dim] = numbers.reshape(heads)
            part[:] = rows.reshape(part.shape)
        return checksum(data)

    def _rows(self, cache: KvCache, description: DecoderDescription) -> Iterator[_Rows]:
        """Yields the rows of each layer in the parts of a cache."""
        padded, num_parts = padded_heads(description), cache.parts_per_layer
        for slab, layers in enumerate(description.slabs):
            first = begin = 0
            for layer in layers:
                own, wide = description.of_layer(layer), padded.of_layer(layer)
                heads = cache.parts[0].shape[2] if cache.slabs is None else own.num_kv_heads
                shape = (self.layout.block_size, heads, wide.head_dim)
                end = begin + shape[0] * shape[1] * shape[2]
                for which, panels in enumerate((self._keys, self._values)[:num_parts]):
                    part = slab * num_parts + which
                    view = panels(self._numbers(cache.parts[part])[:, begin:end], heads, wide.head_dim)
                    yield _Rows(part, first, shape, own.head_dim, view)
                begin, first = end, first + own.kv_size

    def _keys(self, keys: Numbers, heads: int, width: int) -> Numbers:
        tokens = min(_PANEL, self.layout.block_size)
        shape = (heads, self.layout.block_size // tokens, width // self._terms, tokens, self._terms)
        return keys.reshape(-1, *shape).transpose(0, 2, 4, 1, 3, 5)

    def _values(self, values: Numbers, heads: int, width: int) -> Numbers:
        tokens = min(_UNIT, self.layout.block_size)
        terms = min(self._terms, tokens)
        parts = (self.layout.block_size // tokens, width // _PANEL, tokens // terms, _PANEL, terms)
        return values.reshape(-1, heads, *parts).transpose(0, 2, 4, 6, 1, 3, 5)

    def _numbers(self, values: Tensor) -> Numbers:
        """Returns the numbers of each block in one dimension, [blocks, numbers]."""
        return values.view(torch.uint8).numpy().view(self._type).reshape(len(values), values.shape[1:].numel())
