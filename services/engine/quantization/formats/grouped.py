"""Weights of 2, 3, 4 or 8 bits in groups of inputs, the common content of several formats. Called by the formats.

Weights of 2 and 3 bits are stored in 4 bits, with the same scales and zero points.
"""

import torch
from torch import Tensor

from antiphon.services.engine.quantization.group_order import GroupOrder, group_order
from antiphon.services.engine.quantization.weight import (
    GROUP_MULTIPLE,
    INT8_GROUP_MULTIPLE,
    QuantizedWeight,
    WeightKind,
    is_smaller,
    pack_nibbles,
)

_INT4_BITS, _INT8_BITS = 4, 8
_INT4_MIDDLE, _INT8_MIDDLE = 8, 128


def grouped_weight(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_index: Tensor | None = None,
    group_size: int = 0,
) -> "Tensor | QuantizedWeight":
    """Returns the weight that is (values - zeros) * scales.

    `values` [out, in] uint8; `scales` and `zeros` [out, groups]; without `zeros` the zero points are half of the range.
    `group_index` [in] is the group of each input, by default groups of `group_size` in order, of which the last one may
    be shorter. If `group_size` is 0 or less, the inputs are divided equally among the groups. The weight is quantized
    if a backend multiplies this form, otherwise plain float32 [out, in]. Raises ValueError if the size does not fit the
    number of groups, or an index is no group.
    """
    width, groups = values.shape[1], scales.shape[1]
    size = group_size if group_size > 0 else -(-width // groups)
    if -(-width // size) != groups:
        raise ValueError(f"there are {groups} groups of {size} for {width} inputs")
    scales, zeros = scales.to(torch.float32).contiguous(), None if zeros is None else zeros.to(torch.float32)
    index = _disordered(group_index, width, size, groups)
    # A symmetric weight is stored without zero points: its product is faster.
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    if bits < _INT4_BITS:
        # The values are moved so that the middle of their range is that of 4 bits.
        shift = _INT4_MIDDLE - (1 << (bits - 1))
        values, zeros, bits = values + shift, None if zeros is None else zeros + shift, _INT4_BITS
    kind: WeightKind = "int4" if bits == _INT4_BITS else "int8"
    multiple = INT8_GROUP_MULTIPLE if kind == "int8" else GROUP_MULTIPLE
    if index is None:
        if groups == 1 or size % multiple == 0:
            return _stored(kind, values, scales, size, zeros)
    else:
        order = group_order(index, size, multiple)
        if is_smaller(kind, order, width, zeros=zeros is not None):
            return _stored(kind, values, scales, size, zeros, order)
    index = torch.arange(width) // size if index is None else index
    centre = torch.full((), float(1 << (bits - 1))) if zeros is None else zeros[:, index]
    return (values.to(torch.float32) - centre) * scales[:, index]


def _disordered(index: Tensor | None, width: int, size: int, groups: int) -> Tensor | None:
    """Returns the group of each input as int64; None if groups are in the order of the inputs."""
    if index is None:
        return None
    index = index.to(torch.int64)
    if len(index) != width or int(index.min()) < 0 or int(index.max()) >= groups:
        found = f"{int(index.min())} to {int(index.max())}"
        raise ValueError(f"the groups of {len(index)} inputs are {found}; there are {groups} for {width} inputs")
    return None if torch.equal(index, torch.arange(width) // size) else index


def _stored(
    kind: WeightKind, values: Tensor, scales: Tensor, size: int, zeros: Tensor | None, order: GroupOrder | None = None
) -> QuantizedWeight:
    """Returns the weight as the backends take it, its columns in the given order."""
    shape = (values.shape[0], values.shape[1])
    if order is not None:
        values, scales, size = order.taken(values), scales[:, order.groups].contiguous(), order.size
        zeros = None if zeros is None else zeros[:, order.groups]
    inputs = None if order is None else order.order
    if kind == "int4":
        kept = None if zeros is None else zeros.contiguous()
        return QuantizedWeight(
            kind="int4",
            values=pack_nibbles(values),
            shape=shape,
            scales=scales,
            group_size=size,
            zeros=kept,
            order=inputs,
        )
    signed = (values ^ _INT8_MIDDLE).view(torch.int8)
    if zeros is None and scales.shape[1] == 1 and order is None:
        return QuantizedWeight(kind="int8", values=signed, shape=shape, scales=scales[:, 0])
    kept = None if zeros is None else (zeros - _INT8_MIDDLE).contiguous()
    return QuantizedWeight(
        kind="int8", values=signed, shape=shape, scales=scales, group_size=size, zeros=kept, order=inputs
    )
