"""Data structures of adapters.

A LoRA adapter is a low-rank product for each matrix of the decoder that it changes:

    y = x Wᵀ + (x Aᵀ) Bᵀ        x [n, in], A [rank, in], B [out, rank]; the adapter's scale is part of B

A matrix of the decoder may be stacked from several matrices of the checkpoint (query, key and value; gate and up), each
with its own low-rank product. Their A are stacked, and their B become blocks of one B: `Block` says which rows of B use
which ranks; everywhere else B is zero. A prompt adapter is the embeddings of virtual tokens before the prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.services.engine.models.description import DecoderDescription

if TYPE_CHECKING:  # The service imports this module, and torch only while it loads its model.
    import torch
    from torch import Tensor

TARGETS = ("qkv", "o", "up", "down")
"""The matrices of a layer that an adapter can change, by their names in `layout`."""
Place = tuple[int, str]
"""A matrix of the decoder: its layer and its name among `TARGETS`."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [row, row_end) of B use the ranks [rank, rank_end)."""

    row: int
    row_end: int
    rank: int
    rank_end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The low-rank product of one matrix: `a` [rank, in] and `b` [out, rank], with the scale in `b`."""

    a: "Tensor"
    b: "Tensor"
    blocks: tuple[Block, ...]


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in memory, in the form in which the backend reads it. Implements `core.request.Adapter`.

    It stays in memory as long as a waiting or running sequence uses it, even if it was replaced or unloaded.
    """

    version: str
    rank: int
    prepared: object = field(repr=False)
    """Result of the backend's `prepare`: for a LoRA adapter, the deltas in the backend's form; for a prompt adapter,
    the vectors [virtual tokens, hidden] in the model's data type (`virtual_rows`).
    """
    num_virtual_tokens: int = 0
    """See `core.request.Adapter`."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The deltas of one LoRA adapter, or the vectors of a prompt adapter, in float32."""

    version: str
    rank: int
    deltas: Mapping[Place, Delta]
    virtual: "Tensor | None" = None
    """For a prompt adapter: the embeddings of its virtual tokens, [virtual tokens, hidden]."""


def virtual_rows(virtual: "Tensor", dtype: "torch.dtype", device: "torch.device") -> "Tensor":
    """Returns the embeddings of virtual tokens as workers read them."""
    return virtual.to(dtype=dtype, device=device).contiguous()


def target_sizes(d: DecoderDescription) -> dict[Place, tuple[int, int]]:
    """Returns (out, in) of each matrix that an adapter can change.

    For mixtures of experts and layers without an MLP, `up` and `down` are missing; for layers without attention,
    `qkv` and `o`.
    """
    found: dict[Place, tuple[int, int]] = {}
    for layer in range(d.num_layers):
        if d.attends(layer):
            found[layer, "qkv"] = d.q_size + 2 * d.kv_size, d.hidden_size
            found[layer, "o"] = d.hidden_size, d.q_size
        if d.has_mlp(layer) and not d.has_experts(layer):
            found[layer, "up"] = d.intermediate_size * (2 if d.gated_mlp else 1), d.hidden_size
            found[layer, "down"] = d.hidden_size, d.intermediate_size
    return found


def adapter_bytes(d: DecoderDescription, rank: int, itemsize: int) -> int:
    """Returns the memory in bytes of an adapter of this rank for all matrices, with elements of `itemsize` bytes.

    For a stacked matrix, the ranks of all its parts are counted.
    """
    parts = {"qkv": 3, "o": 1, "up": 2 if d.gated_mlp else 1, "down": 1}
    sizes = target_sizes(d).items()
    return itemsize * sum((out + inner) * rank * parts[name] for (_, name), (out, inner) in sizes)


def part_widths(d: DecoderDescription) -> dict[str, tuple[int, ...]]:
    """Returns the outputs of each part of the matrices that an adapter can change, by their names in `TARGETS`."""
    return {
        "qkv": (d.q_size, d.kv_size, d.kv_size),
        "o": (d.hidden_size,),
        "up": (d.intermediate_size,) * (2 if d.gated_mlp else 1),
        "down": (d.hidden_size,),
    }


def padded_rank(rank: int) -> int:
    """Returns the number of ranks for which a slot on a GPU has room: a power of two, as tensor cores require."""
    return max(16, 1 << (rank - 1).bit_length())


def slots_bytes(d: DecoderDescription, num_slots: int, rank: int, itemsize: int) -> int:
    """Returns the memory in bytes of `num_slots` slots on a GPU, each with room for an adapter of this rank."""
    widths, sizes = part_widths(d), target_sizes(d).items()
    lines = sum(len(widths[name]) * columns + sum(widths[name]) for (_, name), (_, columns) in sizes)
    return num_slots * padded_rank(rank) * lines * itemsize
