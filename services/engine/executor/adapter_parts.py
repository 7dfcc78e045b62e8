"""Messages that send adapters from the first rank, which reads their files, to the others: by matrix, in float32.

Each rank gets its own part (`adapters.shards`) and needs no files. A rank keeps an adapter until the first rank tells
it to drop it. The messages are sent over `channel`, before the plans that use the adapters.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.services.engine.adapters.delta import AdapterWeights, Delta, Place
    from antiphon.services.engine.adapters.library import AdapterLibrary


class AdapterMatrix(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The adapter's matrices for one matrix of the model: `a` [rank, inputs] and `b` [outputs, rank].

    `blocks`: see `adapters.delta.Block`. After all matrices of an adapter, `AdapterComplete` is sent.
    """

    version: str
    layer: int
    name: str
    rank: int
    a: bytes
    b: bytes
    blocks: tuple[tuple[int, int, int, int], ...]


class AdapterComplete(msgspec.Struct, frozen=True, tag=True):
    """All matrices of an adapter have been sent. `virtual`: vectors of a prompt adapter, [num_virtual, hidden]."""

    version: str
    rank: int
    virtual: bytes = b""
    num_virtual: int = 0


class ForgetAdapter(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank to drop an adapter, which no sequence uses any more."""

    version: str


AdapterMessage = AdapterMatrix | AdapterComplete | ForgetAdapter


def messages_of(weights: "AdapterWeights") -> Iterator[AdapterMessage]:
    """Yields the messages that send a rank its part of an adapter."""
    for (layer, name), delta in weights.deltas.items():
        blocks = tuple((b.row, b.row_end, b.rank, b.rank_end) for b in delta.blocks)
        a, b = _packed(delta.a), _packed(delta.b)
        yield AdapterMatrix(
            version=weights.version, layer=layer, name=name, rank=delta.a.shape[0], a=a, b=b, blocks=blocks
        )
    virtual = weights.virtual
    if virtual is None:
        yield AdapterComplete(weights.version, weights.rank)
    else:
        yield AdapterComplete(weights.version, weights.rank, _packed(virtual), len(virtual))


class AdapterReceiver:
    """Receives an adapter's messages on a rank. `library`: that of its worker."""

    def __init__(self, library: "AdapterLibrary") -> None:
        self._library = library
        self._parts: dict[str, dict[Place, Delta]] = {}

    def take(self, message: AdapterMessage) -> None:
        """Applies a message."""
        from antiphon.services.engine.adapters.delta import AdapterWeights, Block, Delta

        if isinstance(message, ForgetAdapter):
            self._library.forget(message.version)
        elif isinstance(message, AdapterMatrix):
            a, b = _tensor(message.a, message.rank), _tensor(message.b, -1, message.rank)
            delta = Delta(a, b, tuple(Block(*block) for block in message.blocks))
            self._parts.setdefault(message.version, {})[message.layer, message.name] = delta
        else:
            virtual = _tensor(message.virtual, message.num_virtual) if message.num_virtual else None
            deltas = self._parts.pop(message.version, {})
            self._library.accept(AdapterWeights(message.version, message.rank, deltas, virtual))


def _packed(tensor: "Tensor") -> bytes:
    return tensor.float().contiguous().numpy().tobytes()


def _tensor(data: bytes, rows: int, columns: int = -1) -> "Tensor":
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(rows, columns)
