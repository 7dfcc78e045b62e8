"""The tensors of a GGUF file, converted to the names, the order of rows and the form that the model's family has.

GGUF has one set of names for all architectures (gguf-py's `tensor_mapping.py`), and llama.cpp's converter changes some
tensors, which is undone here: the rows of Llama's queries and keys are in the order of interleaved rotation, Gemma's
norms include the 1 that is added, and all experts of a layer are one tensor. A quantized matrix is returned as blocks
(`quantization/formats/gguf.py`). Called by the checkpoint reader.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from antiphon.services.engine.quantization.formats.gguf import blocks_name, plain
from antiphon.shared.models.gguf_model.reader import PLAIN_TYPES, GgufModel, GgufTensor, part_paths

_MATRIX_DIMENSIONS, _STACK_DIMENSIONS = 2, 3
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose content is in the config."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_ONE_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_NORMED = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DIFFERENT = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": _NORMED,
    "gemma3": _NORMED,
}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_ROUTER = "ffn_gate_inp"
_LLAMA_HEADS = "llama.attention.head_count"
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""The projections whose rows have another order in Llama's files, and the metadata key of their number of heads."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """The source of a tensor. `change` is applied to plain tensors, and to the rows of blocks."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    change: Callable[[Tensor], Tensor] | None = None


class GgufFile:
    """An open GGUF file, in one or several parts, with the interface that the checkpoint reader uses."""

    def __init__(self, paths: list[Path]) -> None:
        """Opens the file. Raises GgufError if it is damaged or unknown, or if its parts do not belong together."""
        self._model = GgufModel(paths[0])
        if part_paths(paths[0]) != paths:
            raise self._model.fail(f"{len(paths)} files of this kind lie beside each other")
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
        tensor, data = entry.tensor, entry.tensor.data
        found = torch.from_numpy(data if entry.expert is None else data[entry.expert])
        if tensor.type == "BF16":
            found = found.view(torch.bfloat16)
        elif tensor.type not in PLAIN_TYPES and not _is_matrix(entry.shape):
            found = plain(found, tensor.type)
        found = found.view(entry.shape)
        return found if entry.change is None else entry.change(found)

    def _add(self, tensor: GgufTensor) -> None:
        """Adds the entries of a tensor: one, or one for each expert."""
        stem, _, kind = tensor.name.rpartition(".")
        layer = _LAYER.fullmatch(stem)
        inner = layer[2] if layer is not None else ""
        experts = _EXPERTS.fullmatch(inner)
        if layer is not None and experts is not None and len(tensor.shape) == _STACK_DIMENSIONS:
            for expert in range(tensor.shape[0]):
                name = f"model.layers.{layer[1]}.{self._expert(experts[1], expert)}"
                self._enter(f"{name}.{kind}", tensor, tensor.shape[1:], expert)
            return
        name = f"model.layers.{layer[1]}.{self._inner(inner)}" if layer is not None else self._outer(stem)
        shape = tensor.shape
        if inner == "ffn_gate_inp_shexp" and len(shape) == 1:
            shape = (1, *shape)
        self._enter(f"{name}.{kind}", tensor, shape, None, self._change(inner or stem, shape[0]))

    def _enter(
        self,
        name: str,
        tensor: GgufTensor,
        shape: tuple[int, ...],
        expert: int | None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if tensor.type not in PLAIN_TYPES and _is_matrix(shape):
            name, shape = blocks_name(name, tensor.type), (shape[0], tensor.data.shape[-1])
        self._entries[name] = _Entry(tensor, shape, expert, change)

    def _outer(self, stem: str) -> str:
        return _OUTER.get(stem, stem)

    def _inner(self, name: str) -> str:
        """Returns the family's name of a layer's part; an unknown name unchanged, for the reader's check."""
        one = _ONE_EXPERT.fullmatch(name)
        if one is not None:
            return self._expert(one[1], int(one[2]))
        if name == _ROUTER and self._model.architecture == "llama":
            return "block_sparse_moe.gate"
        return _DIFFERENT.get(self._model.architecture, {}).get(name) or _INNER.get(name, name)

    def _expert(self, part: str, expert: int) -> str:
        if self._model.architecture == "llama":
            return f"block_sparse_moe.experts.{expert}.{_MIXTRAL[part]}"
        return f"mlp.experts.{expert}.{part}_proj"

    def _change(self, name: str, rows: int) -> Callable[[Tensor], Tensor] | None:
        """Returns a function that undoes the converter's change of a tensor with `rows` rows; None if there is none."""
        architecture = self._model.architecture
        if architecture == "llama" and name in _HEADS:
            heads = self._model.uniform_integer(f"llama.{_HEADS[name]}", self._model.uniform_integer(_LLAMA_HEADS))
            if heads < 1 or rows % (2 * heads):
                raise self._model.fail(f"{name} has {rows} rows, which are not {heads} heads")
            return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm"):
            return lambda weight: weight - 1.0
        return None


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) == _MATRIX_DIMENSIONS
