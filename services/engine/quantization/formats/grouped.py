"""Weights of 2, 4 or 8 bits in groups of inputs, the common content of several formats. Called by the formats."""

import torch
from torch import Tensor

from services.engine.quantization.weight import GROUP_MULTIPLE, INT8_GROUP_MULTIPLE, QuantizedWeight, pack_nibbles

_INT4_BITS, _INT8_BITS = 4, 8


def grouped_weight(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bits: int,
    group_index: Tensor | None = None,
    group_size: int = 0,
) -> "Tensor | QuantizedWeight":
    """Returns the weight that is (values - zeros) * scales.

    `values` [out, in] uint8; `scales` and `zeros` [out, groups], without `zeros` half of the range; `group_index` [in]
    is the group of each input, by default groups of `group_size` in order; the last one may be shorter. Without a size
    (0 or less) all groups are equal. The weight is quantized if a backend multiplies this form, otherwise plain float32
    [out, in]. Raises ValueError if the size does not fit the number of groups.
    """
    out, width = values.shape
    groups = scales.shape[1]
    size = group_size if group_size > 0 else -(-width // groups)
    if -(-width // size) != groups:
        raise ValueError(f"there are {groups} groups of {size} for {width} inputs")
    scales, zeros = scales.to(torch.float32).contiguous(), None if zeros is None else zeros.to(torch.float32)
    in_order = torch.arange(width) // size
    if group_index is not None and torch.equal(group_index.to(torch.int64), in_order):
        group_index = None
    # A symmetric weight is stored without zero points: its product is faster.
    middle = zeros is None or bool((zeros == 1 << (bits - 1)).all())
    multiple = INT8_GROUP_MULTIPLE if bits == _INT8_BITS else GROUP_MULTIPLE
    whole = group_index is None and (groups == 1 or size % multiple == 0)
    if bits == _INT8_BITS and whole and (middle or groups > 1):
        signed = (values ^ 128).view(torch.int8)
        if groups == 1:
            return QuantizedWeight("int8", signed, (out, width), scales[:, 0])
        kept = None if middle or zeros is None else (zeros - 128).contiguous()
        return QuantizedWeight("int8", signed, (out, width), scales, size, kept)
    if bits == _INT4_BITS and whole:
        kept = None if middle or zeros is None else zeros.contiguous()
        return QuantizedWeight("int4", pack_nibbles(values), (out, width), scales, size, kept)
    index = in_order if group_index is None else group_index.to(torch.int64)
    centre = torch.full((), float(1 << (bits - 1))) if zeros is None else zeros[:, index]
    return (values.to(torch.float32) - centre) * scales[:, index]
