"""What llama.cpp's converter changes in tensors, undone: the order of rows and columns, added ones, exponents.

Called by `gguf_file`, with the names that tensors have in the file.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from antiphon.shared.models.gguf_model.fields import RECURRENT, Fields
from antiphon.shared.models.gguf_model.recurrent import JOINED

Change = Callable[[Tensor], Tensor]
"""Applied to plain tensors, and to the rows of blocks."""
_INTERLEAVED = frozenset({"arcee", "granite", "granitehybrid", "llama", "mistral3", "nemotron_h", "nemotron_h_moe"})
"""Architectures whose queries and keys have their rows in the order of interleaved rotation."""
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""The projections whose rows have another order in these files, and the metadata key of their number of heads."""
_PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next"})
"""Architectures whose norms include the 1 that is added to their weights, except those of recurrent layers."""
_TILED = frozenset({"qwen35", "qwen35moe"})
"""Architectures whose value heads lie as llama.cpp repeats key heads: first one of each key head, then the next."""
_RECURRENT_NORM, _DECAY, _MIX_OUT = "ssm_norm", "ssm_a", "ssm_out"
_OF_HEADS = (_DECAY, "ssm_d")
_KERNELS = ("shortconv.conv", "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
_BEHIND_KEYS = frozenset({"attn_qkv", "ssm_conv1d"})
"""Tensors with the rows of queries and keys before those of values."""
_VALUE_ROWS = _BEHIND_KEYS | {"attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"}


class Changes:
    """The changes of one file."""

    def __init__(self, fields: Fields) -> None:
        self._fields, self._architecture = fields, fields.model.architecture

    def undo(self, name: str, rows: int) -> Change | None:
        """Returns a function that undoes the converter's change of a tensor; None if there is none.

        `name`: that of the tensor without layer and ending, `rows`: its first dimension.
        """
        if self._architecture in _INTERLEAVED and name in _HEADS:
            return self._in_halves(name, rows)
        if self._architecture in _PLUS_ONE and name.endswith("norm") and name != _RECURRENT_NORM:
            return lambda weight: weight - 1.0
        order = self._value_rows(name, rows)
        if name == _DECAY:
            return lambda decay: torch.log(-(decay if order is None else decay[order]))
        if order is not None:
            return lambda tensor: tensor[order]
        heads = self.columns(name)
        return None if heads is None else lambda matrix: matrix.unflatten(1, (len(heads), -1))[:, heads].flatten(1)

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the family has: kernels are channels of one row each, vectors have one dimension."""
        if name in _KERNELS and len(shape) > 1:
            return math.prod(shape) // shape[-1], 1, shape[-1]
        if name == _DECAY and self._architecture == "kimi-linear":
            return 1, 1, math.prod(shape), 1
        if name == "ffn_gate_inp_shexp" and len(shape) == 1:
            return 1, *shape
        if name == _RECURRENT_NORM or (name in _OF_HEADS and shape[1:] == (1,)):
            return (math.prod(shape),)
        return shape

    def columns(self, name: str) -> Tensor | None:
        """Returns where the heads lie, as which a matrix reads its columns, in the family's order [heads] int64.

        None if they are in this order.
        """
        return self._value_heads() if name == _MIX_OUT else None

    def parts(self, name: str, rows: int) -> dict[str, Tensor]:
        """Returns the names of tensors whose rows alternate in one of `rows` rows, and where they lie; {} for others.

        In files of Qwen3-Next these are the b of the value heads of each key head, and then their a, as in the family's
        checkpoints. The family's code expects them so together with queries, keys, values and their gates, which were
        as one only in older files.
        """
        if name != "ssm_ba" or any(each.endswith(f".{JOINED}") for each in self._fields.model.tensors):
            return {}
        keys = self._fields.integer("ssm.group_count")
        if keys < 1 or rows % (2 * keys):
            raise self._fields.model.fail(f"{name} has {rows} rows, which are not those of {keys} key heads")
        first, second = torch.arange(rows).view(keys, 2, -1).unbind(1)
        return {"ssm_beta": first.flatten(), "ssm_alpha": second.flatten()}

    def _in_halves(self, name: str, rows: int) -> Change:
        every = self._fields.integer("attention.head_count")
        heads = self._fields.integer(_HEADS[name], every, some=self._architecture in RECURRENT)
        if heads < 1 or rows % (2 * heads):
            raise self._fields.model.fail(f"{name} has {rows} rows, which are not {heads} heads")
        return lambda tensor: tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)

    def _value_heads(self) -> Tensor | None:
        """Returns where the value heads of linear attention lie, those of each key head side by side."""
        if self._architecture not in _TILED:
            return None
        keys, values = self._fields.integer("ssm.group_count"), self._fields.integer("ssm.time_step_rank")
        if keys < 1 or values % keys:
            raise self._fields.model.fail(f"linear attention has {keys} key heads and {values} value heads")
        return torch.arange(values).view(-1, keys).t().flatten() if keys != values else None

    def _value_rows(self, name: str, rows: int) -> Tensor | None:
        """Returns where the rows of a tensor lie that has rows for the value heads; None: in the family's order."""
        heads = self._value_heads()
        if heads is None or name not in _VALUE_ROWS:
            return None
        others = 0
        if name in _BEHIND_KEYS:
            others = 2 * self._fields.integer("ssm.group_count") * self._fields.integer("ssm.state_size")
        if rows <= others or (rows - others) % len(heads):
            raise self._fields.model.fail(f"{name} has {rows} rows, which are not those of {len(heads)} value heads")
        values = torch.arange(others, rows).view(len(heads), -1)[heads].flatten()
        return torch.cat([torch.arange(others), values])
