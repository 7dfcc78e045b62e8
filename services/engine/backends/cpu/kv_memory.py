"""Converts the C++ backend's KV cache to and from the transfer layout (`antiphon.services.engine.kv.layout`).

The cache has panels (`source/cache.h`), where t = 1 for a model in float32 and 2 for one in bfloat16,
p = min(32, block_size), u = min(64, block_size), e = min(t, u):

    keys    [blocks, kv_heads, block_size / p, width / t, p tokens, t dimensions]
    values  [blocks, kv_heads, block_size / u, width / 32, u / e, 32 dimensions, e tokens]

With latent attention there are only keys. Engines with the same panels exchange them as they are (`OwnForm`); other
engines convert blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.kv.layout import KvLayout, OwnForm
from antiphon.services.engine.kv.pieces import Bytes, NativeCopy, checksum
from antiphon.services.engine.worker.capacity.kv_cache import KvCache
from antiphon.services.engine.worker.capacity.kv_memory import blocks_of

_PANEL, _UNIT = 32, 64
_NUMBERS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Unsigned types by size in bytes."""
_TERMS = {torch.float32: 1, torch.bfloat16: 2}
_FORM = "panels 1"
"""Name of this order of the numbers, to be changed when the order changes. `t` (`_TERMS`) is appended to the name."""
Numbers = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


class PanelMemory:
    """A `KvMemory` of the C++ backend. `head_dim` is without the padding; `dtype` is the model's type.

    `native`: the C++ library's function that copies blocks; None: numpy copies them.
    """

    def __init__(
        self, cache: KvCache, host: KvCache, head_dim: int, dtype: torch.dtype, native: NativeCopy | None = None
    ) -> None:
        first = cache.key_caches[0]
        _, block_size, self._num_heads, self._width = first.shape
        self._head_dim, self._type, self._terms = head_dim, _NUMBERS[first.dtype.itemsize], _TERMS[dtype]
        name = str(first.dtype).removeprefix("torch.")
        head_bytes, parts = head_dim * first.dtype.itemsize, cache.parts_per_layer
        self.layout = KvLayout(
            num_layers=len(cache.key_caches),
            num_kv_heads=self._num_heads,
            head_bytes=head_bytes,
            dtype=name,
            block_size=block_size,
            num_parts=parts,
        )
        self._cache, self._host = self._views(cache), self._views(host)
        self.own = OwnForm(f"{_FORM} {self._terms}", blocks_of(cache, native), blocks_of(host, native))

    def read(self, block: int, out: Bytes) -> int:
        """See `KvMemory`."""
        rows = self._empty()
        num_tokens = out.shape[2]
        numbers = out.reshape(-1, *out.shape[2:]).view(self._type)
        for target, view in zip(numbers, self._cache, strict=True):
            part = view[block]
            rows.reshape(part.shape)[:] = part
            target[:] = rows[:num_tokens, :, : self._head_dim]
        return checksum(out)

    def write(self, host_block: int, data: Bytes) -> int:
        """See `KvMemory`. The padding and the tokens after the given ones become zero."""
        rows = self._empty()
        num_tokens = data.shape[2]
        numbers = data.reshape(-1, *data.shape[2:]).view(self._type)
        for view, source in zip(self._host, numbers, strict=True):
            rows[:num_tokens, :, : self._head_dim] = source
            part = view[host_block]
            part[:] = rows.reshape(part.shape)
        return checksum(data)

    def _empty(self) -> Numbers:
        """Returns zeros, [block_size, kv_heads, width]."""
        return np.zeros((self.layout.block_size, self._num_heads, self._width), dtype=self._type)

    def _views(self, cache: KvCache) -> list[Numbers]:
        """Returns for the keys and the values of each layer a view whose dimensions are those of rows, split up."""
        if not cache.value_caches:
            return [self._keys(keys) for keys in cache.key_caches]
        pairs = zip(cache.key_caches, cache.value_caches, strict=True)
        return [view for keys, values in pairs for view in (self._keys(keys), self._values(values))]

    def _keys(self, keys: Tensor) -> Numbers:
        tokens = min(_PANEL, self.layout.block_size)
        shape = (self._num_heads, self.layout.block_size // tokens, self._width // self._terms, tokens, self._terms)
        return self._numbers(keys).reshape(-1, *shape).transpose(0, 2, 4, 1, 3, 5)

    def _values(self, values: Tensor) -> Numbers:
        tokens = min(_UNIT, self.layout.block_size)
        terms = min(self._terms, tokens)
        parts = (self.layout.block_size // tokens, self._width // _PANEL, tokens // terms, _PANEL, terms)
        return self._numbers(values).reshape(-1, self._num_heads, *parts).transpose(0, 2, 4, 6, 1, 3, 5)

    def _numbers(self, values: Tensor) -> Numbers:
        return values.view(torch.uint8).numpy().view(self._type)
