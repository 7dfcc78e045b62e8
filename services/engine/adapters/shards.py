"""The part of an adapter that one rank has, divided along the split of the model's own matrices (`parallel.shard`).

    matrices that lose rows (qkv, up)        B loses the same rows; A is whole
    matrices that lose columns (o, down)     A loses the same columns; B is whole, and the products are summed over the
                                             ranks together with those of the model's own matrix
    layers of other pipeline stages          are left out; the rank's own layers are numbered from 0

The vectors of a prompt adapter are replicated on each rank. Pure. Called by the first rank, which reads the adapters.
"""

from dataclasses import replace

import torch
from torch import Tensor

from antiphon.services.engine.adapters.delta import AdapterWeights, Block, Delta, Place
from antiphon.services.engine.models.description import DecoderDescription
from antiphon.services.engine.parallel.shard import Shard, columns_of, rows_of


def local_adapter(weights: AdapterWeights, d: DecoderDescription, shard: Shard) -> AdapterWeights:
    """Returns a rank's part of an adapter. `d` describes the whole model."""
    layers = shard.layers(d.num_layers)
    deltas: dict[Place, Delta] = {
        (layer - layers.start, name): _local(name, delta, d, shard)
        for (layer, name), delta in weights.deltas.items()
        if layer in layers
    }
    return replace(weights, deltas=deltas)


def _local(name: str, delta: Delta, d: DecoderDescription, shard: Shard) -> Delta:
    rows = rows_of(name, d, shard)
    if rows is not None:
        return replace(delta, b=delta.b.index_select(0, rows), blocks=tuple(_moved(b, rows) for b in delta.blocks))
    columns = columns_of(name, delta.a.shape[1], shard)
    return delta if columns is None else replace(delta, a=delta.a[:, columns].contiguous())


def _moved(block: Block, rows: Tensor) -> Block:
    """Returns the positions of a block's rows among `rows`, which are sorted."""
    first, end = torch.searchsorted(rows, torch.tensor([block.row, block.row_end])).tolist()
    return replace(block, row=first, row_end=end)
