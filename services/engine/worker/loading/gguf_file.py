"""The tensors of a GGUF file, converted to the names, the order of rows and the form that the model's family has.

GGUF has one set of names for all architectures (gguf-py's `tensor_mapping.py`), and llama.cpp's converter changes some
tensors, which is undone here: the rows of Llama's queries and keys are in the order of interleaved rotation, Gemma's
norms include the 1 that is added, kernels of convolutions are matrices, and all experts of a layer are one tensor. A
quantized matrix is returned as blocks (`quantization/formats/gguf.py`). Called by the checkpoint reader.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.gguf import blocks_name, columns_name, plain
from antiphon.services.engine.worker.loading.gguf_changes import Change, Changes
from antiphon.services.engine.worker.loading.gguf_names import (
    expert_name,
    layer_name,
    layer_prefix,
    outer_name,
    stacked_name,
)
from antiphon.shared.models.gguf_model.fields import Fields
from antiphon.shared.models.gguf_model.reader import PLAIN_TYPES, GgufModel, GgufTensor, part_paths

_MATRIX_DIMENSIONS, _STACK_DIMENSIONS = 2, 3
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose content is in the config."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight")
_BOTH = "gate_up"
_LATENT_HALVES = ("attn_k_b", "attn_v_b")
"""What keys and values are made of from latents (MLA); older files have it as one matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The source of a tensor: one of the file, or a function that makes it."""

    shape: tuple[int, ...]
    tensor: GgufTensor | None = None
    expert: int | None = None
    change: Change | None = None
    make: Callable[[], Tensor] | None = None


class GgufFile:
    """An open GGUF file, in one or several parts, with the interface that the checkpoint reader uses."""

    def __init__(self, paths: list[Path]) -> None:
        """Opens the file. Raises GgufError if it is damaged or unknown, or if its parts do not belong together."""
        self._model = GgufModel(paths[0])
        if part_paths(paths[0]) != paths:
            raise self._model.fail(f"{len(paths)} files of this kind lie beside each other")
        fields = Fields(self._model)
        self._architecture, self._num_layers = self._model.architecture, fields.num_layers
        self._changes = Changes(fields)
        self._entries: dict[str, _Entry] = {}
        for tensor in self._model.tensors.values():
            if tensor.name not in _IGNORED:
                self._add(tensor)

    def keys(self) -> Iterable[str]:
        """Returns the names of the family's tensors; for quantized ones, with the block type."""
        return self._entries.keys()

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape; for quantized ones, the shape of the blocks' bytes."""
        return self._entries[name].shape

    def get_tensor(self, name: str) -> Tensor:
        """Returns a tensor; if it needs no change, as the file's mapped pages."""
        entry = self._entries[name]
        if entry.make is not None:
            return entry.make()
        tensor = entry.tensor
        assert tensor is not None
        found = torch.from_numpy(tensor.data if entry.expert is None else tensor.data[entry.expert])
        if tensor.type == "BF16":
            found = found.view(torch.bfloat16)
        elif tensor.type not in PLAIN_TYPES and not _is_matrix(entry.shape):
            found = plain(found, tensor.type)
        return (found if entry.change is None else entry.change(found)).reshape(entry.shape)

    def _add(self, tensor: GgufTensor) -> None:
        """Adds the entries of a tensor: one, or one for each expert."""
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            stem = tensor.name.rpartition(".")[0]
            name = outer_name(self._architecture, tensor.name)
            if len(tensor.shape) == _STACK_DIMENSIONS:
                for number in range(tensor.shape[0]):
                    self._enter(name.format(number), tensor, tensor.shape[1:], number)
                return
            self._enter(name, tensor, tensor.shape, change=self._changes.undo(stem, tensor.shape[0]))
            return
        layer, inner = int(match[1]), match[2]
        experts = _EXPERTS.fullmatch(inner)
        if experts is not None and len(tensor.shape) == _STACK_DIMENSIONS:
            self._add_experts(tensor, layer, experts[1])
            return
        stem = inner.removesuffix(".weight").removesuffix(".bias")
        if stem in _LATENT_HALVES:
            self._add_latents(tensor, layer, stem)
            return
        shape = self._changes.shape(stem, tensor.shape)
        if parts := self._changes.parts(stem, shape[0]):
            for part, rows in parts.items():
                name = layer_name(self._architecture, layer, self._num_layers, f"{part}.weight")
                self._enter(name, tensor, (len(rows), *shape[1:]), change=lambda x, rows=rows: x[rows])
            return
        name = layer_name(self._architecture, layer, self._num_layers, inner)
        heads = self._changes.columns(stem)
        if heads is None or tensor.type in PLAIN_TYPES:
            self._enter(name, tensor, shape, change=self._changes.undo(stem, shape[0]))
        else:  # Blocks lie along rows, so their columns change places when they have been unpacked.
            self._enter(name, tensor, shape)
            self._entries[columns_name(name)] = _Entry(make=lambda: heads, shape=tuple(heads.shape))

    def _add_latents(self, tensor: GgufTensor, layer: int, stem: str) -> None:
        """Adds the matrix of both halves: for each head, the transposed rows of its keys, then those of its values."""
        first, second = (self._model.tensors.get(f"blk.{layer}.{half}.weight") for half in _LATENT_HALVES)
        if first is None or second is None or {len(first.shape), len(second.shape)} != {_STACK_DIMENSIONS}:
            raise self._model.fail(f"{tensor.name} has no other half")
        if stem != _LATENT_HALVES[0]:
            return
        name = layer_name(self._architecture, layer, self._num_layers, "attn_kv_b.weight")
        heads, rank, width = first.shape

        def both() -> Tensor:
            return torch.cat([_plain(first).transpose(1, 2), _plain(second)], dim=1).flatten(0, 1)

        self._entries[name] = _Entry(make=both, shape=(heads * (width + second.shape[1]), rank))

    def _add_experts(self, tensor: GgufTensor, layer: int, part: str) -> None:
        prefix = layer_prefix(self._architecture, layer, self._num_layers, f"ffn_{part}_exps.weight")
        if (stacked := stacked_name(self._architecture, part)) is not None:
            self._add_stack(tensor, f"{prefix}{stacked}")
            return
        half = tensor.shape[1] // 2
        halves = {"gate": slice(half), "up": slice(half, None)} if part == _BOTH else {part: None}
        for expert in range(tensor.shape[0]):
            for each, rows in halves.items():
                name = f"{prefix}{expert_name(self._architecture, each, expert)}.weight"
                shape = tensor.shape[1:] if rows is None else (half, tensor.shape[2])
                self._enter(name, tensor, shape, expert, None if rows is None else lambda x, rows=rows: x[rows])

    def _add_stack(self, tensor: GgufTensor, name: str) -> None:
        """Adds all experts as one tensor, the rows of one below those of the other if they are blocks."""
        shape = tensor.shape
        if tensor.type not in PLAIN_TYPES:
            name, shape = blocks_name(f"{name}.weight", tensor.type), (shape[0] * shape[1], tensor.data.shape[-1])
        self._entries[name] = _Entry(tensor=tensor, shape=shape)

    def _enter(
        self,
        name: str,
        tensor: GgufTensor,
        shape: tuple[int, ...],
        expert: int | None = None,
        change: Change | None = None,
    ) -> None:
        if tensor.type not in PLAIN_TYPES and _is_matrix(shape):
            name, shape = blocks_name(name, tensor.type), (shape[0], tensor.data.shape[-1])
        self._entries[name] = _Entry(tensor=tensor, shape=shape, expert=expert, change=change)


def _plain(tensor: GgufTensor) -> Tensor:
    """Returns a whole tensor as numbers."""
    found = torch.from_numpy(tensor.data)
    if tensor.type == "BF16":
        found = found.view(torch.bfloat16)
    elif tensor.type not in PLAIN_TYPES:
        found = plain(found, tensor.type)
    return found.reshape(tensor.shape)


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) == _MATRIX_DIMENSIONS
