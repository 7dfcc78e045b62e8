"""Matrices of GGUF files in ggml's block types: consecutive numbers share scales, and a row consists of whole blocks.

The reader of the files (`worker/loading/gguf_file.py`) returns a quantized matrix under its name and type, as the bytes
of its blocks [out, bytes of a row]. Types with groups of 32 numbers stay quantized: 4-bit types in 4 bits, 5- and 8-bit
types in 8 bits. Types with groups of 16 numbers are kept in 8 bits:

    Q4_0   32 numbers   d * (q - 8)
    Q4_1   32 numbers   d * q + m                                       as d * (q - zero), zero = -m / d
    Q4_K   8 x 32       (d * scale) * q - (dmin * minimum)              in the same way
    IQ4_NL 32 numbers   d * level[q]
    Q5_0   32 numbers   d * (q - 16)
    Q5_1   32 numbers   as Q4_1
    Q5_K   8 x 32       as Q4_K
    Q8_0   32 numbers   d * q
    Q2_K   16 x 16      (d * scale) * q - (dmin * minimum), as Q4_1
    Q3_K   16 x 16      (d * scale) * q
    Q6_K   16 x 16      (d * scale) * q

All other types are dequantized. The package `gguf` has the layouts of all types. Called by `formats.prepared` and the
checkpoint reader.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, Q4_K, dequantize
from numpy.typing import NDArray
from torch import Tensor

from antiphon.services.engine.quantization.formats.packing import expect
from antiphon.services.engine.quantization.method import PreparedMethod
from antiphon.services.engine.quantization.weight import QuantizedWeight

_GROUP, _SHORT_GROUP = 32, 16
_K_BLOCK = 256
"""How many numbers a block has if the name of its type ends with K."""
_HALF = 2
_ROWS_AT_ONCE = 2048
"""Rows that are dequantized at a time: the package needs several times the memory of its result."""
_BLOCKS_AT_ONCE = 8192
"""Blocks that are repacked at a time, so that intermediate results stay in the processor's cache."""
_COLUMNS = "columns"
TYPES = tuple(kind.name for kind in GGMLQuantizationType)


@dataclass(frozen=True, slots=True)
class Gguf(PreparedMethod):
    """A `PreparedMethod`."""

    @staticmethod
    def of_config(settings: Mapping[str, Any]) -> "Gguf":
        """Returns the method; the tensors' names contain their types."""
        return Gguf()

    def parts(self, module: str, has: Callable[[str], bool]) -> dict[str, str]:
        """See `PreparedMethod`. The part is named after the type."""
        names = {kind: blocks_name(f"{module}.weight", kind) for kind in TYPES}
        names[_COLUMNS] = columns_name(f"{module}.weight")
        return {kind: name for kind, name in names.items() if has(name)}

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> "Tensor | QuantizedWeight":
        """See `PreparedMethod`."""
        ((kind, blocks),) = ((kind, blocks) for kind, blocks in parts.items() if kind != _COLUMNS)
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        if shape[1] % numbers:
            raise ValueError(f"rows of {shape[1]} numbers are not blocks of {numbers} ({kind})")
        expect(f"{kind} blocks", blocks, shape[0], shape[1] // numbers * size)
        convert = _KEPT.get(kind)
        weight = plain(blocks, kind) if convert is None else convert(blocks.reshape(-1, size).numpy(), shape)
        return _in_order(weight, parts[_COLUMNS]) if _COLUMNS in parts else weight


def blocks_name(name: str, kind: str) -> str:
    """Returns the name under which the blocks of a matrix are read."""
    return f"{name}.{kind}"


def columns_name(name: str) -> str:
    """Returns the name under which the order of a matrix's columns is read: [heads], where each head's columns lie."""
    return f"{name}.{_COLUMNS}"


def _in_order(weight: "Tensor | QuantizedWeight", heads: Tensor) -> "Tensor | QuantizedWeight":
    """Returns a weight with the columns of its heads in another order: `heads` [heads], where each one lies.

    Dequantized if heads do not have whole groups.
    """

    def ordered(part: Tensor) -> Tensor:
        return part.unflatten(1, (len(heads), -1))[:, heads].flatten(1)

    if isinstance(weight, Tensor):
        return ordered(weight)
    if weight.shape[1] % (len(heads) * weight.group_size):
        return ordered(weight.dequantized())
    zeros = None if weight.zeros is None else ordered(weight.zeros)
    return replace(weight, values=ordered(weight.values), scales=ordered(weight.scales), zeros=zeros)


def plain(blocks: Tensor, kind: str) -> Tensor:
    """Returns the dequantized numbers [..., n] float32 of blocks [..., bytes]. Raises ValueError for unknown types."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = blocks.reshape(-1, blocks.shape[-1])
    found = torch.empty(len(rows), rows.shape[1] // size * numbers)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        try:
            found[part] = torch.from_numpy(dequantize(rows[part].numpy(), GGMLQuantizationType[kind]))
        except NotImplementedError as error:
            raise ValueError(f"weights of type {kind} are not supported") from error
    return found.unflatten(0, blocks.shape[:-1])


def _q4_0(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    scales, values = blocks[:, :_HALF], blocks[:, _HALF:]
    return _weight(_halves(values), _floats(scales), None, shape)


def _q4_1(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    scales, least, values = blocks[:, :_HALF], blocks[:, _HALF : 2 * _HALF], blocks[:, 2 * _HALF :]
    return _weight(_halves(values), _floats(scales), _floats(least), shape)


def _q4_k(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    scale, least, packed, values = np.split(blocks, [_HALF, 2 * _HALF, 2 * _HALF + Q4_K.K_SCALE_SIZE], axis=1)
    of_scale, of_least = Q4_K.get_scale_min(np.ascontiguousarray(packed))
    scales = _floats(scale) * torch.from_numpy(of_scale.astype(np.float32))
    least = -_floats(least) * torch.from_numpy(of_least.astype(np.float32))
    # Each 32 bytes have the values of one group in their lower halves and those of the next in their upper halves.
    return _weight(_halves(values.reshape(-1, _GROUP)), scales, least, shape)


def _iq4_nl(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    scales, values = blocks[:, :_HALF], blocks[:, _HALF:]
    weight = _weight(_halves(values), _floats(scales), None, shape)
    return replace(weight, levels=torch.tensor(IQ4_NL.kvalues, dtype=torch.float32))


def _q8_0(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    scales, values = blocks[:, :_HALF], np.ascontiguousarray(blocks[:, _HALF:]).view(np.int8)
    return _bytes(values, _floats(scales), None, shape)


def _q5_0(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    scales, upper, lower = np.split(blocks, [_HALF, _HALF + _GROUP // 8], axis=1)
    return _bytes(_fives(lower, upper) - np.int8(16), _floats(scales), None, shape)


def _q5_1(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    scales, least, upper, lower = np.split(blocks, [_HALF, 2 * _HALF, 2 * _HALF + _GROUP // 8], axis=1)
    return _bytes(_fives(lower, upper), _floats(scales), _floats(least), shape)


def _q5_k(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    ends = np.cumsum([_HALF, _HALF, Q4_K.K_SCALE_SIZE, _GROUP])
    scale, least, packed, upper, lower = np.split(blocks, ends, axis=1)
    of_scale, of_least = Q4_K.get_scale_min(np.ascontiguousarray(packed))
    scales = _floats(scale) * torch.from_numpy(of_scale.astype(np.float32))
    least = -_floats(least) * torch.from_numpy(of_least.astype(np.float32))
    # Bit g of each of the 32 bytes is the highest bit of a number of group g; the lower bits are stored as in Q4_K.
    highest = (upper[:, None] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    lower = (lower.reshape(len(blocks), -1, 1, _GROUP) >> np.array([0, 4], dtype=np.uint8)[:, None]) & 0x0F
    return _bytes(lower.reshape(highest.shape) | (highest << 4), scales, least, shape)


def _q2_k(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    packed, values, scale, least = np.split(blocks, np.cumsum([_K_BLOCK // 16, _K_BLOCK // 4, _HALF]), axis=1)
    scales = _floats(scale) * torch.from_numpy((packed & 0x0F).astype(np.float32))
    least = -_floats(least) * torch.from_numpy((packed >> 4).astype(np.float32))
    return _bytes(_crumbs(values), scales, least, shape, _SHORT_GROUP)


def _q3_k(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    highest, values, packed, scale = np.split(blocks, np.cumsum([_K_BLOCK // 8, _K_BLOCK // 4, 12]), axis=1)
    lower = np.concatenate([packed[:, :8] & 0x0F, packed[:, :8] >> 4], axis=1)
    upper = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3
    of_scale = (lower | (upper.reshape(lower.shape) << 4)).view(np.int8) - np.int8(32)
    scales = _floats(scale) * torch.from_numpy(of_scale.astype(np.float32))
    # Bit g of each of the 32 bytes belongs to a number of the g-th 32; 0 means that 4 is subtracted.
    high = (highest[:, None] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    return _bytes((_crumbs(values) | (high << 2)).view(np.int8) - np.int8(4), scales, None, shape, _SHORT_GROUP)


def _q6_k(blocks: NDArray[np.uint8], shape: tuple[int, int]) -> QuantizedWeight:
    low, high, packed, scale = np.split(blocks, np.cumsum([_K_BLOCK // 2, _K_BLOCK // 4, _K_BLOCK // 16]), axis=1)
    scales = _floats(scale) * torch.from_numpy(np.ascontiguousarray(packed).view(np.int8).astype(np.float32))
    lower = (low.reshape(len(blocks), -1, 1, 64) >> np.array([0, 4], dtype=np.uint8)[:, None]) & 0x0F
    values = (lower.reshape(len(blocks), 8, 32) | (_crumbs(high) << 4)).view(np.int8) - np.int8(32)
    return _bytes(values, scales, None, shape, _SHORT_GROUP)


def _crumbs(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns values of 2 bits [n, 8, 32]: each 32 bytes of `packed` [n, 64] hold four times 32 values."""
    parts = packed.reshape(len(packed), -1, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (parts & np.uint8(3)).reshape(len(packed), 8, 32)


_KEPT: dict[str, Callable[[NDArray[np.uint8], tuple[int, int]], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "IQ4_NL": _iq4_nl,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q6_K": _q6_k,
}


def _fives(lower: NDArray[np.uint8], upper: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Returns values 0 … 31 [n, 32] of their lower four bits [n, 16] (see `_halves`) and their highest bits [n, 4]."""
    highest = np.unpackbits(np.ascontiguousarray(upper), axis=1, bitorder="little")
    return (np.concatenate([lower & 0x0F, lower >> 4], axis=1) | (highest << 4)).view(np.int8)


def _halves(values: NDArray[np.uint8]) -> Tensor:
    """Returns values packed two per byte [n, bytes], of bytes [n, bytes].

    In the file the lower halves of the bytes have the first values and the upper halves the rest.
    """
    packed = np.empty(values.shape, dtype=np.uint8)
    for first in range(0, len(values), _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        # Two bytes as one number: one shift brings the halves of neighbours together.
        words = np.ascontiguousarray(values[part]).view("<u2")
        upper = words >> 4
        packed[part, : words.shape[1]] = (words & 0x0F) | (upper & 0xF0)
        packed[part, words.shape[1] :] = (upper & 0x0F) | ((words >> 8) & 0xF0)
    return torch.from_numpy(packed)


def _floats(halves: NDArray[np.uint8]) -> Tensor:
    """Returns float16 numbers as [n, 1] float32."""
    return torch.from_numpy(np.ascontiguousarray(halves).view(np.float16).astype(np.float32))


def _weight(packed: Tensor, scales: Tensor, least: Tensor | None, shape: tuple[int, int]) -> QuantizedWeight:
    """Returns the weight scale * q + least in groups of 32; if `least` is None, scale * (q - 8)."""
    out, width = shape
    packed, scales = packed.view(out, width // 2), scales.reshape(out, -1).contiguous()
    if least is None:
        return QuantizedWeight(kind="int4", values=packed, shape=shape, scales=scales, group_size=_GROUP)
    # A group of equal numbers has scale 0: the number is represented by the zero point.
    constant = scales == 0
    if bool(constant.any()):
        scales = torch.where(constant, 1.0, scales)
        packed.unflatten(1, (-1, _GROUP // 2))[constant] = 0
    zeros = -least.reshape(out, -1) / scales
    return QuantizedWeight(
        kind="int4", values=packed, shape=shape, scales=scales, group_size=_GROUP, zeros=zeros.contiguous()
    )


def _bytes(
    values: NDArray[np.uint8] | NDArray[np.int8],
    scales: Tensor,
    least: Tensor | None,
    shape: tuple[int, int],
    group: int = _GROUP,
) -> QuantizedWeight:
    """Returns the weight scale * q + least of 8 bits in groups."""
    out, width = shape
    whole = torch.from_numpy(np.ascontiguousarray(values).view(np.int8)).view(out, width)
    scales = scales.reshape(out, -1).contiguous()
    if least is None:
        return QuantizedWeight(kind="int8", values=whole, shape=shape, scales=scales, group_size=group)
    # As in `_weight`.
    constant = scales == 0
    if bool(constant.any()):
        scales = torch.where(constant, 1.0, scales)
        whole.unflatten(1, (-1, group))[constant] = 0
    zeros = -least.reshape(out, -1) / scales
    return QuantizedWeight(
        kind="int8", values=whole, shape=shape, scales=scales, group_size=group, zeros=zeros.contiguous()
    )
