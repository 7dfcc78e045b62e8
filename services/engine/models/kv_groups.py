"""The tensors of the KV cache: which layers share one, and which layers have block tables of their own.

A tensor, here a slab, has blocks of the same size for one layer, or for several narrow ones side by side.

If blocks of layers with a window are freed when the window has passed, layers are in groups, each with block tables of
its own. The first group has the layers without a window; each further one has as many slabs of layers with a window,
the last one perhaps fewer. The i-th slabs of all groups are one tensor. So a block takes the same memory in any group,
and one pool of blocks serves all.
"""

from collections.abc import Iterable
from dataclasses import replace

from antiphon.services.engine.models.description import DecoderDescription

Slabs = tuple[tuple[int, ...], ...]


def freeing_windows(description: DecoderDescription) -> DecoderDescription:
    """Returns the description with groups, so that blocks behind windows are freed.

    Unchanged if there is nothing to free, or if fewer slabs have windows than have none.
    """
    layers, windows = description.attention_layers, description.sliding_windows
    if description.recurrent is not None or description.latent is not None:
        return description
    whole = _slabs(description, [layer for layer in layers if windows[layer] is None])
    windowed = _slabs(description, [layer for layer in layers if windows[layer] is not None])
    size = len(whole)
    if not 0 < size <= len(windowed):
        return description
    further = tuple(windowed[first : first + size] for first in range(0, len(windowed), size))
    return replace(description, kv_groups=(whole, *further))


def num_groups(description: DecoderDescription) -> int:
    """Returns the number of groups: 1 if no blocks are freed."""
    return len(description.kv_groups) or 1


def freed_window(description: DecoderDescription) -> int:
    """Returns how many tokens a query sees at most in layers whose blocks are freed; 0: no blocks are."""
    if not description.kv_groups:
        return 0
    return max(description.mutual_tokens, *(window or 0 for window in description.sliding_windows))


def layer_groups(description: DecoderDescription) -> tuple[int, ...]:
    """Returns for each layer the group whose block tables have its blocks."""
    groups = {layer: number for number, slabs in enumerate(description.kv_groups) for slab in slabs for layer in slab}
    # A layer that borrows keys and values reads the blocks of its source.
    return tuple(groups.get(source, 0) for source in description.kv_sources or range(description.num_layers))


def slabs_of(layer_kv_heads: tuple[tuple[int, int], ...], layers: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Returns `kv_slabs` for some layers: each next to the layers before it, if the widest layer leaves room for it."""
    sizes = {layer: heads * width for layer, (heads, width) in enumerate(layer_kv_heads)}
    most, slabs = max(sizes.values()), list[list[int]]()
    for layer in layers:
        fitting = (slab for slab in slabs if sum(sizes[one] for one in slab) + sizes[layer] <= most)
        if (found := next(fitting, None)) is not None:
            found.append(layer)
        else:
            slabs.append([layer])
    return tuple(map(tuple, slabs))


def _slabs(description: DecoderDescription, layers: list[int]) -> Slabs:
    if description.kv_slabs:
        return slabs_of(description.layer_kv_heads, layers)
    return tuple((layer,) for layer in layers)
