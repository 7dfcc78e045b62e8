"""The forms of products with a weight, and which of them computes a number of rows.

    y = x Wᵀ + b (+ residual)          x, residual, y [n, ·]; W [out, in], plain or quantized

    plain        skinny     a kernel that reads W once, for up to 16 rows
                 library    the vendor's library
                 fixed      a kernel in which a row has the same bits in any batch; only where that is asked for
    quantized    tiles      a kernel that dequantizes in registers, for every tile of 16 rows; a row has the same bits
                            in any batch
                 swapped    the same with W as the left operand, so that up to 128 rows share what is dequantized
                 library    W is dequantized first, then the vendor's library
                 scaled     the vendor's library for 8-bit floating point; rows are rounded to it too, if W is of this
                            kind and was made for that (`QuantizedWeight.rows_in_fp8`)
    experts      tiles      kernels that gather the rows of each expert; rows come with what a router has chosen
                 library    PyTorch's grouped product, for plain matrices without biases

Without measuring a fixed rule chooses (`usual`). `tuning` chooses by measuring.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from antiphon.services.engine.backends.triton.autotune.expert_forms import ExpertWeights, grouped_experts, tile_experts
from antiphon.services.engine.backends.triton.kernels.products.quantized import (
    in_tiles,
    library_linear,
    scaled_linear,
    swapped_linear,
    tiles_linear,
)
from antiphon.services.engine.backends.triton.kernels.products.skinny import ROWS_MAX, fixed_linear, skinny_linear
from antiphon.services.engine.backends.triton.kernels.products.weights import KernelWeight

FEW_ROWS = 8
"""Rows up to which `skinny` is usual: up to here a product takes only the time of reading its weight, with any tile
size."""
_TILES_ROWS_MAX, _SWAPPED_ROWS_MAX = 256, 512
"""Rows up to which `tiles` and `swapped` can be faster than the library, which then multiplies many times as many rows
a byte."""

Kind = Literal["plain", "quantized", "experts"]
Compute = Callable[[Any, Any, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to compute a product: `compute(x, weight, bias, residual)`, which may overwrite the residual.

    `rows_max`: most rows that it takes; `tried_max`: and with which it is measured, where it cannot be the fastest with
    more.
    """

    name: str
    compute: Compute
    rows_max: int | None = None
    tried_max: int | None = None
    in_fp8: bool = False
    """Whether rows are rounded to float8_e4m3."""


def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return skinny_linear(x, weight, bias, residual=residual)


def _library(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    if residual is None:
        return F.linear(x, weight, bias)
    # The library can add in place for free.
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


FORMS: dict[Kind, tuple[Form, ...]] = {
    "plain": (
        Form(name="skinny", compute=_skinny, rows_max=ROWS_MAX, tried_max=ROWS_MAX),
        Form(name="library", compute=_library),
        Form(name="fixed", compute=fixed_linear, tried_max=0),
    ),
    "quantized": (
        Form(name="tiles", compute=tiles_linear, tried_max=_TILES_ROWS_MAX),
        Form(name="swapped", compute=swapped_linear, tried_max=_SWAPPED_ROWS_MAX),
        Form(name="library", compute=library_linear),
        Form(name="scaled", compute=scaled_linear, in_fp8=True),
    ),
    "experts": (Form(name="tiles", compute=tile_experts), Form(name="library", compute=grouped_experts)),
}


class Choice:
    """Which form computes products with weights of one kind, shape and type."""

    def __init__(self, kind: Kind, usual: Callable[[int], str], *, left_out: str = "") -> None:
        """`usual` returns the name of the form for a number of rows where nothing else was chosen.

        `left_out`: the name of a form that does not compute this product, if there is one.
        """
        self.kind: Kind = kind
        self.usual = usual
        self.forms = {form.name: form for form in FORMS[kind] if form.name != left_out}
        self._bounds: Sequence[int] = ()
        self._names: Sequence[str] = ()

    def choose(self, bounds: Sequence[int], names: Sequence[str]) -> None:
        """Sets the forms: the first for up to `bounds[0]` rows, and so on, ascending. More rows have the usual one."""
        self._bounds, self._names = bounds, names

    def name(self, rows: int) -> str:
        """Returns the name of the form for a number of rows."""
        place = bisect_left(self._bounds, rows)
        return self._names[place] if place < len(self._names) else self.usual(rows)

    def candidates(self, rows: int) -> list[Form]:
        """Returns the forms that may be the fastest for a number of rows, the usual one first."""
        usual = self.usual(rows)
        others = (form for name, form in self.forms.items() if name != usual)
        return [self.forms[usual], *(form for form in others if form.tried_max is None or rows <= form.tried_max)]

    def compute(self, x: Any, weight: Any, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Returns y, see the module. `x` is contiguous; the residual may be overwritten."""
        return self.forms[self.name(x.shape[0])].compute(x, weight, bias, residual)


def usual_plain(rows: int) -> str:
    """Returns the usual form of a product with a plain weight."""
    return "skinny" if rows <= FEW_ROWS else "library"


def usual_quantized(weight: KernelWeight) -> Callable[[int], str]:
    """Returns what names the usual form of a product with weights like this one."""
    return lambda rows: "tiles" if in_tiles(rows, weight) else "library"


@dataclass(frozen=True, slots=True)
class Product:
    """All weights of a model whose products have one choice, and that choice."""

    choice: Choice
    weights: list[Any]


class Products:
    """The products of a model, by what they have in common, for example "bfloat16 6144 x 4096"."""

    def __init__(self) -> None:
        self.found: dict[str, Product] = {}

    def add_plain(self, weight: Tensor) -> Choice:
        """Returns the choice for a weight [out, in]."""
        name = f"{_type(weight)} {weight.shape[0]} x {weight.shape[1]}"
        return self._add(name, weight, lambda: Choice("plain", usual_plain))

    def add_quantized(self, weight: KernelWeight, like: Tensor) -> Choice:
        """Returns the choice for a quantized weight; `like` has the type of the rows."""
        parts = [weight.kind, f"groups of {weight.group_size}" if weight.group_size else ""]
        parts += [
            "rows in fp8" if weight.rows_in_fp8 else "",
            "zero points" if weight.zeros is not None else "",
            "levels" if weight.levels is not None else "",
        ]
        name = f"{', '.join(filter(None, parts))}, {_type(like)} {weight.width} x {weight.columns}"
        usual = usual_quantized(weight)
        left_out = "" if weight.rows_in_fp8 else "scaled"
        return self._add(name, weight, lambda: Choice("quantized", usual, left_out=left_out))

    def add_experts(self, weight: ExpertWeights, like: Tensor) -> Choice:
        """Returns the choice for a layer's experts; `like` has the type of the rows."""
        experts, hidden, inner = weight.down.shape
        parts = [
            f"{weight.per_token} of {experts} experts",
            weight.stored,
            weight.activation,
            "" if weight.gated else "no gates",
            "weighted inputs" if weight.weighted_inputs else "",
            "biases" if weight.has_biases else "",
        ]
        name = f"{', '.join(filter(None, parts))}, {_type(like)} {inner} x {hidden}"
        left_out = "" if weight.fits_library else "library"
        return self._add(name, weight, lambda: Choice("experts", lambda _: "tiles", left_out=left_out))

    def _add(self, name: str, weight: Any, make: Callable[[], Choice]) -> Choice:
        product = self.found.get(name)
        if product is None:
            product = self.found[name] = Product(make(), [])
        product.weights.append(weight)
        return product.choice


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
