"""`QuantizedWeight`: a matrix of 8 or 4 bits per weight, in the form that all backends accept.

File formats are not handled here: `rounding` creates such weights from plain ones, and the methods in `formats` from
the tensors of checkpoints. The C++ library's `quantized.h` documents the products with these kinds and the bounds of
their errors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from antiphon.services.engine.quantization.group_order import GroupOrder, group_order

WeightKind = Literal["int8", "int8_dynamic", "int4", "int4_dynamic", "fp8"]
"""int8: 8 bits per weight, optionally in groups; int8_dynamic: activations are rounded to 8 bits too, with a scale for
each row; int4: 4 bits per weight, in groups; int4_dynamic: activations are rounded to 8 bits too, with a scale for each
row and group; fp8: float8_e4m3, optionally in groups, which the C++ library does not multiply."""
INT4_KINDS: tuple[WeightKind, ...] = ("int4", "int4_dynamic")
GROUP_MULTIPLE = 32
"""The number of inputs that share a scale must be a multiple of this."""
INT8_GROUP_MULTIPLE = 16
"""The same for the kind int8."""
INT4_MAX = 15
INT4_MIDDLE = 8
INT8_MAX = 127
GROUPED_KINDS: tuple[WeightKind, ...] = ("int8", *INT4_KINDS, "fp8")
_ROW_GROUP_MAX = 128
_PLAIN_BITS, _SCALE_BITS = 16, 32
_TYPES = {"fp8": (torch.float8_e4m3fn,)}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantizedWeight:
    """A quantized matrix [out, in]. All tensors but `values` are float32."""

    kind: WeightKind
    values: Tensor
    """int8 or uint8 [out, columns]; int4 also uint8 [out, ceil(columns / 2)] with two per byte, the first in the lower
    half. `columns` is `in`, or the length of `order`."""
    shape: tuple[int, int]
    scales: Tensor
    """[out]; with groups [out, groups]."""
    group_size: int = 0
    """Number of inputs that share a scale, a multiple of 32 (int8: of 16) or at least `in`. int8, fp8: 0 for one
    group."""
    zeros: Tensor | None = None
    """Zero points [out, groups], for int8 with groups and int4. int4: in the unit of values 0 … 15 or of `levels`."""
    levels: Tensor | None = None
    """int4: the 16 numbers that the values represent. None: 0 … 15 with `zeros`, -8 … 7 without.

    The C++ library rounds them to bfloat16 in a bfloat16 model; in a float32 model they are exact. int4_dynamic: whole
    numbers from -127 to 127.
    """
    rows_in_fp8: bool = False
    """fp8 without groups: whether a backend may round the rows of products to float8_e4m3 too, with a scale for each
    row, where that is faster: the weights were made for such products. Results are more exact without."""
    has_sign: bool = False
    """int4: whether values are -8 … 7 instead of 0 … 15."""
    order: Tensor | None = None
    """With groups: the input of each column of `values`, int32 [columns]; -1 for padding. None: columns are the inputs.

    Each input has one column, and the columns of a group are side by side; see `group_order`. [parts, columns]: the
    matrix consists of parts of equal height (experts), each with an order of its own. A product needs a single order,
    so `chunk` separates the parts before."""

    def __post_init__(self) -> None:
        """Raises ValueError if shapes or types of the parts do not match."""
        out, width = self.shape[0], self.num_columns
        two = self.two_a_byte
        columns = (width + 1) // 2 if two else width
        if self.group_size and self.kind not in GROUPED_KINDS:
            raise ValueError(f"weights of kind {self.kind} have one scale per output, no groups")
        if self.zeros is not None and not self.group_size:
            raise ValueError("weights without groups have no zeros")
        if self.order is not None and (not self.group_size or self.order.dtype != torch.int32):
            raise ValueError("an order needs groups, and int32 numbers")
        if self.rows_in_fp8 and (self.kind != "fp8" or self.group_size):
            raise ValueError("rows in 8-bit floating point are for fp8 weights without groups")
        if self.kind not in INT4_KINDS and self.levels is not None:
            raise ValueError(f"weights of kind {self.kind} have no levels")
        if self.kind == "int4_dynamic" and not _are_bytes(self.levels):
            raise ValueError("levels of int4_dynamic must be whole numbers from -127 to 127")
        groups = (out, -(-width // self.group_size)) if self.group_size > 0 else (out,)
        types = _TYPES.get(self.kind, (torch.int8, torch.uint8))
        if self.values.shape != (out, columns) or self.values.dtype not in types:
            raise ValueError(f"values are {self.values.dtype} {tuple(self.values.shape)}")
        for name, part, shape in (
            ("scales", self.scales, groups),
            ("zeros", self.zeros, groups),
            ("levels", self.levels, (INT4_MAX + 1,)),
        ):
            if part is not None and (part.shape != shape or part.dtype != torch.float32):
                raise ValueError(f"{name} are {part.dtype} {tuple(part.shape)}, not float32 {shape}")

    @property
    def num_columns(self) -> int:
        """Number of stored columns, which are the inputs, in the order of `order` and with its padding if given."""
        return self.shape[1] if self.order is None else self.order.shape[-1]

    @property
    def has_parts(self) -> bool:
        """Whether parts have orders of their own."""
        return self.order is not None and self.order.dim() > 1

    @property
    def two_a_byte(self) -> bool:
        """Whether `values` has two values per byte."""
        return self.kind in INT4_KINDS and self.values.shape[1] != self.num_columns

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.values, self.scales, self.zeros, self.levels, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Returns the weight with its tensors on a device."""
        return self._mapped(lambda part: part.to(device), lambda shared: shared.to(device))

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        """Returns some of the rows (outputs), in the given order.

        If parts have orders of their own, there must be equally many rows of each chosen part.
        """
        found = self._mapped(lambda part: part[index].contiguous(), lambda shared: shared)
        if not self.has_parts or self.order is None:
            return found
        part_of_row = torch.arange(self.shape[0]) // (self.shape[0] // len(self.order))
        parts, counts = part_of_row[index].unique_consecutive(return_counts=True)
        assert len(counts.unique()) == 1, "parts with orders of their own must keep equal heights"
        return replace(found, order=_without_repeats(self.order[parts]))

    def columns(self, first: int, last: int) -> "QuantizedWeight | Tensor":
        """Returns the columns (inputs) from `first` up to `last`.

        Groups that the bounds cut become several smaller groups with the same scale. The result is plain float32 if
        the smaller groups would be too short, if padding them would take more memory than plain weights, or if parts
        have orders of their own.
        """
        if self.has_parts:
            return self.dequantized()[:, first:last].contiguous()
        if self.order is not None:
            return self._ordered_columns(self.order, first, last)
        if not self.group_size:
            return replace(self, values=self.values[:, first:last].contiguous(), shape=(self.shape[0], last - first))
        size = self.group_size
        one_group = size >= self.shape[1]
        if (first % 2 or last % 2) if one_group else (first % size or (last % size and last != self.shape[1])):
            smaller = math.gcd(size, first, 0 if last == self.shape[1] else last)
            if not one_group and smaller % _multiple(self.kind) == 0:
                return self._regrouped(smaller).columns(first, last)
            return self.dequantized()[:, first:last].contiguous()
        places = slice(first // 2, -(-last // 2)) if self.two_a_byte else slice(first, last)
        groups = slice(0, 1) if one_group else slice(first // size, -(-last // size))
        return replace(
            self,
            values=self.values[:, places].contiguous(),
            shape=(self.shape[0], last - first),
            scales=self.scales[:, groups].contiguous(),
            zeros=None if self.zeros is None else self.zeros[:, groups].contiguous(),
        )

    def chunk(self, count: int) -> "tuple[QuantizedWeight, ...]":
        """Returns `count` weights with equal numbers of rows."""
        size = self.shape[0] // count
        return tuple(self.rows(slice(first, first + size)) for first in range(0, size * count, size))

    def round_rows(self, x: Tensor) -> Tensor:
        """Returns x [n, columns] as used in products: with dynamic kinds in steps of 8 bits, otherwise unchanged."""
        if not self.row_group_size:
            return x
        groups = torch.nn.functional.pad(x.to(torch.float32), (0, -x.shape[-1] % self.row_group_size))
        groups = groups.unflatten(-1, (-1, self.row_group_size))
        scale = groups.abs().amax(dim=-1, keepdim=True) / INT8_MAX
        scale = torch.where(scale > 0, scale, 1.0)
        return ((groups / scale).round() * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    @property
    def row_group_size(self) -> int:
        """Number of columns for which a row of activations has one scale; 0 if rows are not rounded."""
        if self.kind == "int8_dynamic":
            return self.num_columns
        if self.kind != "int4_dynamic":
            return 0
        size = _ROW_GROUP_MAX
        return size if self.group_size >= self.num_columns else math.gcd(size, self.group_size)

    def ordered(self, x: Tensor) -> Tensor:
        """Returns x [n, in] in the order of the columns, [n, columns], with zeros for padding."""
        if self.order is None:
            return x
        return x.index_select(-1, self.order.clamp(min=0)).masked_fill(self.order < 0, 0)

    def dequantized(self) -> Tensor:
        """Returns the plain weights [out, in] float32 that this matrix stands for."""
        if self.has_parts and self.order is not None:
            return torch.cat([part.dequantized() for part in self.chunk(len(self.order))])
        numbers = self.numbers()
        if self.order is None:
            return numbers
        real = self.order >= 0
        plain = numbers.new_empty(self.shape)
        plain[:, self.order[real].to(torch.int64)] = numbers[:, real]
        return plain

    def numbers(self) -> Tensor:
        """Returns the plain weights in the order of the columns, [out, columns] float32."""
        if not self.group_size:
            return self.values.to(torch.float32) * self.scales[:, None]
        int4 = self.kind in INT4_KINDS
        numbers = self._levels_of(self._places()) if int4 else self.values.to(torch.float32)
        groups = torch.arange(self.num_columns, device=self.values.device) // self.group_size
        if self.zeros is not None:
            numbers = numbers - self.zeros[:, groups]
        return numbers * self.scales[:, groups]

    def in_8_bits(self, size: int) -> "QuantizedWeight":
        """Returns the same weight of kind int8 in groups of `size`, a divisor of the group size. Not with `levels`."""
        finer = self._regrouped(size)
        if self.kind == "int8":
            return finer
        values = self._places() - (0 if self.zeros is not None else INT4_MIDDLE)
        return replace(finer, kind="int8", values=values.to(torch.int8), has_sign=False)

    def _regrouped(self, size: int) -> "QuantizedWeight":
        """Returns the same weight in groups of `size`, a divisor of the group size: scales are repeated."""
        places = torch.arange(-(-self.num_columns // size), device=self.values.device) // (self.group_size // size)
        zeros = None if self.zeros is None else self.zeros[:, places].contiguous()
        return replace(self, scales=self.scales[:, places].contiguous(), group_size=size, zeros=zeros)

    def _ordered_columns(self, order: Tensor, first: int, last: int) -> "QuantizedWeight | Tensor":
        """Returns `columns` of a weight with an order: each group with those of its columns that are asked for."""
        order = order.cpu()
        places = ((order >= first) & (order < last)).nonzero()[:, 0]
        part = group_order(places // self.group_size, self.group_size, _multiple(self.kind))
        if not is_smaller(self.kind, part, last - first, zeros=self.zeros is not None):
            return self.dequantized()[:, first:last].contiguous()
        inputs = order[places[part.order.clamp(min=0)]] - first
        values = part.taken(self._one_a_byte()[:, places])
        return replace(
            self,
            values=pack_nibbles(values) if self.two_a_byte else values,
            shape=(self.shape[0], last - first),
            scales=self.scales[:, part.groups].contiguous(),
            group_size=part.size,
            zeros=None if self.zeros is None else self.zeros[:, part.groups].contiguous(),
            order=torch.where(part.order < 0, -1, inputs).to(self.values.device),
        )

    def _mapped(
        self, change: Callable[[Tensor], Tensor], change_shared: Callable[[Tensor], Tensor]
    ) -> "QuantizedWeight":
        """Returns the weight with `change` applied to the tensors that have a row for each output."""
        values = change(self.values)
        return replace(
            self,
            values=values,
            shape=(values.shape[0], self.shape[1]),
            scales=change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
            levels=None if self.levels is None else change_shared(self.levels),
            order=None if self.order is None else change_shared(self.order),
        )

    def _one_a_byte(self) -> Tensor:
        """Returns the values [out, columns], one per byte."""
        if not self.two_a_byte:
            return self.values
        return torch.stack([self.values & INT4_MAX, self.values >> 4], dim=-1).flatten(1)[:, : self.num_columns]

    def _places(self) -> Tensor:
        """Returns the index among the 16 levels of each value: [out, columns] int64."""
        return (self._one_a_byte().to(torch.int64) & INT4_MAX) ^ (INT4_MIDDLE if self.has_sign else 0)

    def _levels_of(self, places: Tensor) -> Tensor:
        if self.levels is not None:
            return self.levels[places]
        return places.to(torch.float32) - (0 if self.zeros is not None else INT4_MIDDLE)


Quantize = Callable[[str, Tensor], "Tensor | QuantizedWeight"]
"""Takes a matrix's name within its layer and its weight; returns the quantized weight, or the given one unchanged."""


def is_smaller(kind: WeightKind, order: GroupOrder, width: int, *, zeros: bool) -> bool:
    """Whether columns in an order, with scales and zero points, take less memory than `width` plain ones."""
    bits = len(order.order) * (4 if kind in INT4_KINDS else 8) + len(order.groups) * _SCALE_BITS * (1 + zeros)
    return bits < width * _PLAIN_BITS


def _multiple(kind: WeightKind) -> int:
    return INT8_GROUP_MULTIPLE if kind == "int8" else GROUP_MULTIPLE


def pack_nibbles(values: Tensor) -> Tensor:
    """Packs values 0 … 15 [out, in] uint8 into [out, ceil(in / 2)], two per byte, the first in the lower half."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    return (values[:, ::2] | (values[:, 1::2] << 4)).contiguous()


def stack(parts: Sequence[QuantizedWeight], products: int = 1) -> QuantizedWeight | None:
    """Returns the weights on top of each other, [sum of out, in]; None if they are not quantized alike.

    Weights with zero points and weights without them (their zero point is the middle of the range) count as alike.
    Weights of 4 and of 8 bits, or in groups of different sizes, become weights of 8 bits in groups of a common size.
    Weights whose inputs are in different orders are not alike, since a product reads its inputs in one order.
    `products`: number of products (the experts of a layer) for which the weights are, equally many for each.
    """
    if len({(part.kind, part.group_size) for part in parts}) > 1:
        parts = _in_8_bits(parts)
    if any(part.zeros is not None for part in parts):
        parts = [_with_zeros(part) for part in parts]
    first = parts[0]
    if any(_form(part) != _form(first) or not _equal(part.levels, first.levels) for part in parts[1:]):
        return None
    order = first.order
    if not all(_equal(part.order, order) for part in parts[1:]):
        order = _orders(parts, products)
        if order is None:
            return None
    return replace(
        first,
        values=torch.cat([part.values for part in parts]),
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None]),
        order=order,
    )


def _form(part: QuantizedWeight) -> tuple[object, ...]:
    """Returns what weights must have in common to be stacked, apart from levels and orders."""
    has_zeros = part.zeros is not None
    return (part.kind, part.shape[1], part.num_columns, part.group_size, has_zeros, part.has_sign, part.two_a_byte)


def _orders(parts: Sequence[QuantizedWeight], products: int) -> Tensor | None:
    """Returns the order of each product's parts, [products, columns]; None if the parts of one have different ones."""
    each = len(parts) // products
    found = []
    for first in range(0, len(parts), each):
        some = parts[first : first + each]
        if not all(_equal(part.order, some[0].order) for part in some):
            return None
        order = some[0].order
        found.append(torch.arange(some[0].num_columns, dtype=torch.int32) if order is None else order)
    heights = {sum(part.shape[0] for part in parts[first : first + each]) for first in range(0, len(parts), each)}
    return torch.stack(found) if len(heights) == 1 else None


def _without_repeats(orders: Tensor) -> Tensor:
    """Returns orders [parts, columns], or [columns] if they are the same one."""
    return orders[0].contiguous() if bool((orders == orders[0]).all()) else orders


def _in_8_bits(parts: Sequence[QuantizedWeight]) -> Sequence[QuantizedWeight]:
    """Returns the same weights in 8 bits in groups of a common size; unchanged if they have no such form."""
    size = math.gcd(*(part.group_size for part in parts))
    fit = all(part.kind in ("int4", "int8") and part.group_size and part.levels is None for part in parts)
    if not fit or size % INT8_GROUP_MULTIPLE:
        return parts
    return [part.in_8_bits(size) for part in parts]


def _with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns the same weight with zero points; unchanged if it has them, no groups, or levels of its own."""
    if weight.zeros is not None or not weight.group_size or weight.levels is not None or weight.kind == "fp8":
        return weight
    return replace(weight, zeros=torch.full_like(weight.scales, INT4_MIDDLE if weight.kind in INT4_KINDS else 0))


def _are_bytes(levels: Tensor | None) -> bool:
    """Whether levels are numbers of 8 bits, as those that are not given are. Levels without values (meta) pass."""
    return levels is None or levels.is_meta or bool(((levels == levels.round()) & (levels.abs() <= INT8_MAX)).all())


def _equal(levels: Tensor | None, others: Tensor | None) -> bool:
    if levels is None or others is None:
        return levels is others
    return torch.equal(levels, others)
